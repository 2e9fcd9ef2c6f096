"""Gradients integrated along straight paths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.gradients import mean_gradient
from atoll.threat import per_point

STEPS = 20  # thesis, B.3


def path_gradient(model: nn.Module, x: Tensor, baseline: Tensor, target: Tensor, steps: int, batch_size: int) -> Tensor:
    r"""The way from a baseline times the mean gradient on it, by the trapezoid rule.

    .. math:: (x - b) \cdot \sum_k w_k \nabla f_y(b + t_k (x - b)), \quad t_k = \frac k {n - 1}

    with weights 1/(n - 1), half of that at both ends; exact where the gradient is linear on the way.

    Args:
        model: f, in evaluation mode.
        x: ends of the paths.
        baseline: their beginnings, b.
        target: y.
        steps: n.
        batch_size: points of paths that go through the model together.
    """
    if steps < 2:
        raise InputError(f"steps: expected at least 2, got {steps}")
    t = torch.linspace(0, 1, steps, dtype=x.dtype, device=x.device)
    weights = torch.full_like(t, 1 / (steps - 1))
    weights[[0, -1]] /= 2
    way = x - baseline

    def place(point: Tensor, k: Tensor) -> Tensor:
        return torch.addcmul(baseline[point], per_point(t[k], x), way[point])

    return way * mean_gradient(model, target, place, weights, x, batch_size)
