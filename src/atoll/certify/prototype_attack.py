"""An attack that is specific to nearest-prototype classifiers."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.certify.polyhedra import Dual, ascend
from atoll.errors import InputError
from atoll.models.centroid import CentroidNet
from atoll.models.stretch import minimal_moves
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

POINTS = 32  # number of points to attack together


class PrototypeAttack(Attack):
    r"""Moves inputs by eps (l2) toward the regions of the closest prototypes of other classes.

    If inputs are stretched, gradients are zero at black and white pixels, so gradient attacks fail.  This attack uses
    the dual of the distance to a region (``polyhedra.distance_bounds``) instead: its multipliers say which pixels have
    the largest effect per distance, and the ``minimal_moves`` of the best multipliers almost reach the region.  The
    attack scales them so that the moves have length eps.  Costs at most two forward passes per prototype and no
    gradients.

    Args:
        threat: l2.
        targets: number of prototypes of other classes to try, closest region first.
        own: number of nearest prototypes of the true class to consider.
        steps: number of ascent steps.

    >>> model = CentroidNet((2,), 2, per_class=1)
    >>> _ = model.head.centroids.data.copy_(torch.tensor([[[0.0, 0.5]], [[1.0, 0.5]]]))
    >>> x, y = torch.tensor([[0.25, 0.5]]), torch.tensor([0])
    >>> PrototypeAttack(ThreatModel("l2", 0.26))(model, x, y)
    tensor([[0.5100, 0.5000]])
    """

    needs_gradients = False
    norms = ("l2",)

    def __init__(self, threat: ThreatModel, *, targets: int = 20, own: int = 24, steps: int = 100) -> None:
        super().__init__(threat)
        self.targets = targets
        self.own = own
        self.steps = steps

    @torch.no_grad()
    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        if not attackable(model):
            raise InputError(f"PrototypeAttack: expected a CentroidNet without encoder, got {type(model).__name__}")
        result = x.clone()
        for steps in (0, self.steps):  # single planes are cheap and enough for most points
            robust = (model(result).argmax(1) == y).nonzero().squeeze(1)
            for rows in robust.split(POINTS):
                result[rows] = self._move(model, x[rows], y[rows], steps)
        return result

    def _move(self, model: CentroidNet, x: Tensor, y: Tensor, steps: int) -> Tensor:
        """Return the inputs after the first move that changes the class, or unchanged if none does."""
        problem = self._problem(model, x.flatten(1).double(), y)
        goal = torch.full_like(problem.margin[:, :, 0], math.inf)
        _, multipliers = ascend(problem, goal, steps=steps)
        moves = self._of_length(problem, problem.slope(multipliers))
        result, robust = x.clone(), torch.ones_like(y, dtype=torch.bool)
        for move in moves.unbind(1):
            x_adv = self.threat.project((x.double() + move.view_as(x)).to(x.dtype), x)
            changed = robust & (model(x_adv).argmax(1) != y)
            result[changed] = x_adv[changed]
            robust &= ~changed
        return result

    def _problem(self, model: CentroidNet, z: Tensor, y: Tensor) -> Dual:
        c, per_class, head = model.head.centroids.double().flatten(0, 1), model.head.centroids.shape[1], model.head
        squares = torch.cdist(head.stretched(z), c).square()
        mine = torch.arange(len(c), device=c.device) // per_class == y[:, None]
        own = squares.masked_fill(~mine, math.inf).topk(min(self.own, per_class), largest=False).indices
        between = torch.cdist(c[own[:, 0]], c).clamp_min(torch.finfo(c.dtype).tiny)
        planes = (squares - squares.gather(1, own[:, :1])) / between
        targets = min(self.targets, len(c) - per_class)
        other = planes.masked_fill(mine, math.inf).topk(targets, largest=False).indices
        margin = squares.gather(1, other)[:, :, None] - squares.gather(1, own)[:, None]
        if head.stretch is not None:
            low, high = head.stretch.slope(z)
        else:
            bounds = model.bounds or (-math.inf, math.inf)
            low, high = bounds[0] - z, bounds[1] - z
        return Dual(c[own], c[other], margin, low[:, None], high[:, None], head.gain.double())

    def _of_length(self, problem: Dual, v: Tensor) -> Tensor:
        """Return the ``minimal_moves`` of the multiple of v for which they have length eps, found by bisection."""

        def moves(factor: Tensor) -> Tensor:
            return minimal_moves(factor[:, :, None] * v, problem.low, problem.high, problem.gain)[0]

        lower = torch.zeros_like(v[:, :, 0])
        upper = torch.full_like(lower, 16.0)
        for _ in range(20):
            middle = (lower + upper) / 2
            short = moves(middle).norm(dim=2) < self.threat.radius
            lower, upper = torch.where(short, middle, lower), torch.where(short, upper, middle)
        return moves(lower)


def attackable(model: nn.Module) -> TypeGuard[CentroidNet]:
    """Whether a model is a nearest-prototype classifier in input space."""
    return isinstance(model, CentroidNet) and model.is_nearest_prototype
