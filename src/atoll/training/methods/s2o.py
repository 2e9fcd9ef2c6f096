"""S2O, second-order statistics optimization (Jin et al., 2022), as in the authors' code or as in their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from atoll.distributed import all_sum, differentiable_sum, world_size
from atoll.errors import check_range
from atoll.training.methods.base import METHODS, Method, Step
from atoll.training.methods.targets import divergence, rows_for, target_matrix

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class S2O(Method):
    r"""Predictions are drawn to targets made of the correlation of logits over the batch.

    ``code``, what the authors run: :math:`A = \sum_b g g^T`; the targets of class y are row y of :math:`-|A|`, shifted
    to be non-negative and normalized; :math:`\mathrm{S2O} = \frac12 [KL(t, p) + KL(t', q)]` replaces a share ``weight``
    of the cross-entropy.  ``text``, what they write: ``weight`` times the Frobenius norm of the normalized correlation.

    Args:
        weight: 0.1 for AT and 0.3 for TRADES in the papers.
        reading: ``code`` or ``text``.
    """

    uses_clean = True

    weight: float = 0.1
    reading: Literal["code", "text"] = "code"

    def __post_init__(self) -> None:
        check_range("[0, 1]", weight=self.weight)

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        both = [logits for logits in (step.out.logits, step.out.adv_logits) if logits is not None]
        if self.reading == "text":
            step.terms["s2o"] = self.weight * torch.stack([correlation(g) for g in both]).mean()
            return
        values = [divergence(rows_for(second_order_targets(g), step.y), g) for g in both]
        step.terms["ce"] = (1 - self.weight) * step.terms["ce"]
        step.terms["s2o"] = self.weight * torch.stack(values).mean(0)


@torch.no_grad()
def second_order_targets(logits: Tensor) -> Tensor:
    """The matrix of targets from the batch's logits, over all processes."""
    scores = -all_sum(logits.T @ logits).abs()
    return target_matrix(scores - scores.amin(1, keepdim=True))


def correlation(logits: Tensor) -> Tensor:
    """Frobenius norm of the matrix of uncentered correlations between logits over the batch."""
    second = logits.T @ logits
    if world_size() > 1:
        second = differentiable_sum(second)
    size = second.diagonal().clamp_min(torch.finfo(second.dtype).tiny).sqrt()
    norm: Tensor = torch.linalg.matrix_norm(second / (size[:, None] * size))
    return norm
