"""S2O, second-order statistics optimization (Jin et al., 2022), as in the authors' code or in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from atoll.distributed import all_sum, differentiable_sum
from atoll.errors import check_range
from atoll.training.methods.base import METHODS, Method, Step
from atoll.training.methods.targets import divergence, rows_for, target_matrix

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class S2O(Method):
    r"""S2O: soft targets from the correlation of logits over the batch (second-order statistics).

    ``code``, as in the authors' code: with :math:`A = \sum_b g g^T`, the targets of class y are row y of :math:`-|A|`,
    shifted to be non-negative and normalized to ``1 - share``, with ``share`` for y itself.  :math:`\mathrm{S2O} =
    \frac12 [KL(t, p) + KL(t', q)]` replaces a share ``weight`` of the cross-entropy.  ``text``, as in the paper:
    ``weight`` times the Frobenius norm of the normalized correlation.

    Args:
        weight: weight of S2O; 0.1 for AT and 0.3 for TRADES in the papers.
        reading: ``code`` or ``text``.
        share: probability of the true class in its targets; the authors use 0.2 for 10 classes.  Should be more than
            1 / classes.
    """

    uses_clean = True
    uses_batch = True

    weight: float = 0.1
    reading: Literal["code", "text"] = "code"
    share: float = 0.2

    def __post_init__(self) -> None:
        check_range("[0, 1]", weight=self.weight, share=self.share)

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        batch = step.whole or step
        names = ("logits", "adv_logits") if step.x_adv is not None else ("logits",)
        both: list[tuple[Tensor, Tensor]] = [(getattr(step.out, n), getattr(batch.out, n)) for n in names]
        if self.reading == "text":
            parts = len(batch.y) // len(step.y)
            step.terms["s2o"] = self.weight * torch.stack([correlation(g, whole, parts) for g, whole in both]).mean()
            return
        values = [divergence(rows_for(second_order_targets(whole, self.share), step.y), g) for g, whole in both]
        step.terms["ce"] = (1 - self.weight) * step.terms["ce"]
        step.terms["s2o"] = self.weight * torch.stack(values).mean(0)


@torch.no_grad()
def second_order_targets(logits: Tensor, share: float) -> Tensor:
    """Return the matrix of targets from the logits of the batch, over all processes."""
    scores = -all_sum(logits.T @ logits).abs()
    return target_matrix(scores - scores.amin(1, keepdim=True), share)


def correlation(logits: Tensor, whole: Tensor, parts: int) -> Tensor:
    """Return the Frobenius norm of the matrix of uncentered correlations between logits over the whole batch.

    It has the value of the batch.  The gradient flows to one of its equal parts, multiplied by their number, so that
    the mean over the parts has the gradient of the batch.
    """
    second = differentiable_sum(logits.T @ logits)
    if parts > 1:
        second = all_sum(whole.T @ whole) + parts * (second - second.detach())
    size = second.diagonal().clamp_min(torch.finfo(second.dtype).tiny).sqrt()
    norm: Tensor = torch.linalg.matrix_norm(second / (size[:, None] * size))
    return norm
