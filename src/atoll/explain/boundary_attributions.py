"""Attributions that look at the closest decision boundary (thesis, definitions 6 and 7; Wang et al., 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.boundary import BoundaryPoints, boundary_search
from atoll.explain.gradients import ATTRIBUTIONS, PointAttribution, mean_gradient
from atoll.explain.path import STEPS, path_gradient


class BoundaryAttribution(PointAttribution):
    """Base of the two: paths start at the closest points found across the boundary.

    Args:
        model: the classifier.
        search: arguments of ``boundary_search``, for calls that bring no boundary points along.
    """

    def __init__(self, model: nn.Module, **search: Any) -> None:
        super().__init__(model)
        self.search = search

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        if boundary is None:
            boundary = boundary_search(self.model, x, **{"batch_size": batch_size} | self.search)
        if boundary.x.shape != x.shape or not torch.equal(boundary.x, x):
            raise InputError("boundary: expected the boundary points of these inputs, got those of others")
        if boundary.words is not None:
            raise InputError(boundary.words)
        return boundary.across


@ATTRIBUTIONS.register("BSM")
class BoundarySaliency(BoundaryAttribution):
    r"""BSM: the gradient of the logit at the closest point found across the boundary.

    .. math:: \nabla f_y(x_{adv})

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> BoundarySaliency(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -1.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return mean_gradient(self.model, target, lambda point, _: start[point], x.new_ones(1), x, batch_size)


@ATTRIBUTIONS.register("BIG")
class BoundaryIntegratedGradients(BoundaryAttribution):
    r"""BIG: integrated gradients with the closest point found across the boundary as the baseline.

    .. math:: (x - x_{adv}) \cdot \int_0^1 \nabla f_y(x_{adv} + t (x - x_{adv}))\, dt

    Args:
        model: the classifier.
        steps: points of the trapezoid rule.
        search: arguments of ``boundary_search``.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> BoundaryIntegratedGradients(model).attribute(torch.tensor([[0.6, 0.4]])).round(decimals=3)
    tensor([[0.1000, -0.0000]])
    """

    def __init__(self, model: nn.Module, *, steps: int = STEPS, **search: Any) -> None:
        super().__init__(model, **search)
        self.steps = steps

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return path_gradient(self.model, x, start, target, self.steps, batch_size)

    def has_convergence_delta(self) -> bool:
        return True
