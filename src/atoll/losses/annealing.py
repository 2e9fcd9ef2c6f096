"""The loss for networks that are 1-Lipschitz by construction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import check_range
from atoll.losses.base import LOSSES, Loss, Outputs, Term, hard_labels


class AnnealedCrossEntropy(Term):
    r"""Cross-entropy with a margin that gives less weight to examples beyond it.

    .. math:: -T (1 - p_y)^\beta \log p_y, \quad p = \mathrm{softmax}((f - \xi\, e_y) / T)
    """

    def __init__(self, temperature: float, offset: float, beta: float) -> None:
        check_range("(0, inf)", temperature=temperature)
        check_range("[0, inf)", offset=offset, beta=beta)
        self.temperature, self.offset, self.beta = temperature, offset, beta

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        labels = hard_labels(y, "LogitAnnealing")
        log_p = ((out.g - self.offset * F.one_hot(labels, out.g.shape[1])) / self.temperature).log_softmax(1)
        # log(1 - p_y) from the other classes, to avoid cancellation when p_y is close to 1.
        others = log_p.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
        return -self.temperature * (self.beta * others).exp() * log_p.gather(1, labels[:, None]).squeeze(1)


@LOSSES.register()
class LogitAnnealing(Loss):
    r"""Logit annealing (Lai et al., 2025): -T (1 - p_y)^beta log p_y, with p = softmax((f - xi e_y) / T).

    For networks with a fixed Lipschitz constant, such as ``OrthogonalNet``, because the loss does not depend on the
    constant.  If the vector of logits is 1-Lipschitz, a lead of xi over all other logits certifies the radius
    xi / sqrt(2).

    Args:
        temperature: T.  Smaller values focus on examples close to the margin.
        offset: xi, the margin that is subtracted from the logit of the correct class.
        beta: how fast the weight of examples beyond the margin decreases; 0 for cross-entropy.

    >>> out = Outputs(logits=torch.tensor([[2.0, 0.0]]))
    >>> LogitAnnealing(temperature=1.0, offset=2.0, beta=1.0).values(out, torch.tensor([0]))["ce"]
    tensor([0.3466])
    """

    certifies = True

    def __init__(self, *, temperature: float = 0.75, offset: float = 2.0, beta: float = 5.0) -> None:
        super().__init__(ce=(1.0, AnnealedCrossEntropy(temperature, offset, beta)))
