"""Objectives of attacks: functions of logits with one value per point.

``margin`` is the loss of Carlini & Wagner; PGD with this loss is often called CW, as in "CW-20".  ``dlr`` is the
difference of logits ratio of Croce & Hein (2020), which is invariant to shifting and scaling the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Objective = Literal["ce", "kl", "margin", "pm", "dlr"]


def cross_entropy(logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
    """Return CE(g', y); labels may be class indices or probabilities (mixup)."""
    return F.cross_entropy(logits, y, reduction="none")


def kl(logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
    """Return KL(p, q) from the clean to the adversarial prediction, the inner objective of TRADES."""
    assert clean is not None
    return F.kl_div(logits.log_softmax(1), clean.log_softmax(1), reduction="none", log_target=True).sum(1)


def margin(logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
    """Return the largest other logit minus the logit of ``y``; positive if the point is misclassified.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
    tensor([-1.])
    """
    own = logits.gather(1, y[:, None]).squeeze(1)
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - own


def probability_margin(logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
    """Largest probability of another class minus that of ``y``; positive where the point is misclassified.

    Unlike that of cross-entropy, its gradient fades once the point is misclassified with confidence.

    >>> round(probability_margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).item(), 4)
    -0.4205
    """
    return margin(logits.softmax(1), y)


def dlr(logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
    """Return the margin divided by the difference of the largest and the third largest logit.

    With two classes the ratio would be +-1 everywhere, so the margin itself is used.
    """
    if logits.shape[1] < 3:
        return margin(logits, y)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2]).clamp_min(1e-12)


def margin_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the logit of ``y``."""
    return logits.gather(1, target[:, None]).squeeze(1) - logits.gather(1, y[:, None]).squeeze(1)


def probability_margin_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's probability minus that of ``y``."""
    return margin_targeted(logits.softmax(1), y, target)


def dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the target logit minus the true logit, relative to the spread of the four largest logits.

    With fewer than four classes, the difference itself is used: with the spread of three logits, the ratio would be -1
    wherever the target has the lowest logit, and have no gradient there.
    """
    difference = margin_targeted(logits, y, target)
    if logits.shape[1] < 4:
        return difference
    top = logits.topk(4, dim=1).values
    return difference / (top[:, 0] - top[:, 2:].mean(1)).clamp_min(1e-12)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "ce": cross_entropy,
    "kl": kl,
    "margin": margin,
    "pm": probability_margin,
    "dlr": dlr,
}

TARGETED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "margin": margin_targeted,
    "pm": probability_margin_targeted,
    "dlr": dlr_targeted,
}
