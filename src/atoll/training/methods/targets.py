"""Soft targets from statistics of the batch, and their divergence from predictions, shared by S2O and RAT."""

from __future__ import annotations

import torch
from torch import Tensor


def target_matrix(scores: Tensor, share: float) -> Tensor:
    """Convert rows of non-negative scores to target distributions with ``share`` on the diagonal.

    The rest of each row is proportional to the scores, or uniform if they are zero.  The diagonal of the scores is
    ignored.

    >>> target_matrix(torch.tensor([[9.0, 1.0, 3.0, 0.0]]).expand(4, 4), 0.5)[0]
    tensor([0.5000, 0.1250, 0.3750, 0.0000])
    """
    classes = len(scores)
    own = torch.eye(classes, dtype=scores.dtype, device=scores.device)
    off = scores.clone()
    off.fill_diagonal_(0)
    total = off.sum(1, keepdim=True)
    rows = torch.where(total > 0, off / total.clamp_min(torch.finfo(scores.dtype).tiny), (1 - own) / (classes - 1))
    return rows * (1 - share) + own * share


def rows_for(matrix: Tensor, y: Tensor) -> Tensor:
    """Return row y of a matrix for each example; mixed labels mix the rows."""
    return matrix[y] if y.dim() == 1 else y.to(matrix.dtype) @ matrix


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return KL(target, softmax(logits)), one value per example."""
    value: Tensor = torch.special.xlogy(target, target) - target * logits.log_softmax(1)
    return value.sum(1)
