"""S2O, second-order statistics optimization (Jin et al., 2022), as in the authors' code or as in their text.

RAT shares its soft targets, built from statistics of the batch, and their distance to predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from atoll.distributed import all_sum, differentiable_sum, world_size
from atoll.errors import check_range
from atoll.training.methods.base import METHODS, Method, Step

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


def target_matrix(scores: Tensor) -> Tensor:
    """Rows of non-negative scores to target distributions: 2/K on the diagonal, the rest shared by the scores.

    The scores' own diagonal is ignored; a row of zeros shares evenly instead of dividing by zero.

    >>> target_matrix(torch.tensor([[9.0, 1.0, 3.0, 0.0]]).expand(4, 4))[0]
    tensor([0.5000, 0.1250, 0.3750, 0.0000])
    """
    classes = len(scores)
    off = scores.clone()
    off.fill_diagonal_(0)
    total = off.sum(1, keepdim=True)
    even = (1 - torch.eye(classes, dtype=scores.dtype, device=scores.device)) / (classes - 1)
    rows = torch.where(total > 0, off / total.clamp_min(torch.finfo(scores.dtype).tiny), even)
    return rows * (1 - 2 / classes) + torch.eye(classes, dtype=scores.dtype, device=scores.device) * (2 / classes)


def rows_for(matrix: Tensor, y: Tensor) -> Tensor:
    """Row y of a matrix for each example; mixed labels mix the rows."""
    return matrix[y] if y.dim() == 1 else y.to(matrix.dtype) @ matrix


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target, softmax(logits)), one value per example."""
    value: Tensor = torch.special.xlogy(target, target) - target * logits.log_softmax(1)
    return value.sum(1)
