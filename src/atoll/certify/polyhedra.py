"""Proven lower bounds of the distance to a polyhedron, within a box or for stretched inputs, from the dual problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.certify.bounds import UNIT_ROUNDOFF, gamma
from atoll.models.stretch import minimal_moves, multiplier

STEPS = 200  # maximum number of ascent steps
CHECK = 20  # number of steps between checks whether the goal is reached


def distance_bounds(
    own: Tensor,
    other: Tensor,
    margin: Tensor,
    low: Tensor,
    high: Tensor,
    goal: Tensor,
    *,
    gain: Tensor | None = None,
    steps: int = STEPS,
) -> Tensor:
    r"""Return lower bounds of the length of a move after which c is at least as close as all p.

    With :math:`s_p = \|z - c\|^2 - \|z - p\|^2`, these are the moves with :math:`2 (p - c) \cdot \Delta + s_p \le 0`
    for all p, where :math:`\Delta` is the effect of the move :math:`\delta`: the move itself or, for stretched inputs,
    the change described in ``stretch_distance``.  For any :math:`\lambda \ge 0` and
    :math:`v = 2 \sum_p \lambda_p (p - c)`,

    .. math:: \tfrac12 \|\delta\|^2 \ge q(\lambda) = \lambda \cdot s
              + \sum_i \min_{\delta_i} \tfrac12 \delta_i^2 + v_i \Delta_i.

    Therefore :math:`\sqrt{2 q}` is a bound for every :math:`\lambda`.  Bisection finds the best multiplier of a single
    p; accelerated gradient ascent (Nesterov, 1983; restarts: O'Donoghue & Candes, 2015) then uses the others.  It stops
    when all pairs of a point have reached the goal.

    Rounding: q is computed to within :math:`\gamma\, (\lambda \cdot |s| + 3 g^2 V^2)`, where g is the largest gain and
    :math:`V = 2 \sum_p \lambda_p (\|p\| + \|c\|) \ge \|v\|`.  v is a sum over the p with an error of at most
    :math:`\gamma V`; the minimum changes with v at most at the rate :math:`\|\Delta\| \le g^2 \|v\|`; and it is itself
    a sum over the features of at most :math:`1.5\, g^2 \|v\|^2`.  If low and high, numbers of size 1, have rounding
    errors, the error of a minimum is at most that error times its slope there, :math:`1 + g |v_i|`.

    Args:
        own: the p of each point, ``(batch, own, features)``, float64.
        other: the c, ``(batch, other, features)``.
        margin: s or a lower bound of it, ``(batch, other, own)``.
        low: moves have no further effect below it, ``(batch, features)``.
        high: moves have no further effect above it.
        goal: sufficient distance, ``(batch, other)``.
        gain: effect of a move in between, ``(features,)``; None for 1.
        steps: maximum number of ascent steps.

    >>> own, other = torch.zeros(1, 1, 2).double(), torch.tensor([[[2.0, 0.0]]]).double()
    >>> free = torch.full((1, 2), torch.inf).double()
    >>> s = torch.tensor([[[4.0]]]).double()  # at z = p = (0, 0): the plane in the middle is at distance 1
    >>> distance_bounds(own, other, s, -free, free, torch.tensor([[5.0]]))
    tensor([[1.0000]], dtype=torch.float64)
    """
    gain = own.new_ones(1) if gain is None else gain
    return ascend(Dual(own, other, margin, low[:, None], high[:, None], gain), goal, steps=steps)[0]


def ascend(problem: Dual, goal: Tensor, *, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Return the bounds of ``distance_bounds`` and the final multipliers."""
    point = ahead = problem.best_single()
    margin, reached = problem.margin, point.clone()
    best = torch.zeros_like(margin[:, :, 0])
    left = torch.arange(len(margin), device=margin.device)  # points that have not reached their goal
    pace, rate = torch.ones_like(margin[:, :, :1]), problem.rate()
    for step in range(steps + 1):
        if step % CHECK == 0 or step == steps:
            best[left] = torch.maximum(best[left], problem.bound(point))
            reached[left] = point
            rows = (best[left] < goal[left]).any(1).nonzero().squeeze(1)
            if not len(rows):
                break
            if len(rows) < len(left):
                left, problem = left[rows], problem.take(rows)
                point, ahead, pace, rate = (v[rows] for v in (point, ahead, pace, rate))
        gradient = problem.gradient(ahead)
        moved = (ahead + rate * gradient).clamp_min(0)
        # Drop momentum that points downhill.
        good = ((moved - point) * gradient).sum(2, keepdim=True) >= 0
        following = torch.where(good, (1 + (1 + 4 * pace**2).sqrt()) / 2, 1.0)
        ahead = moved + torch.where(good, (pace - 1) / following, 0.0) * (moved - point)
        point, pace = moved, following
    return best, reached


@dataclass(frozen=True)
class Dual:
    """The dual function q of ``distance_bounds``; multipliers are ``(batch, other, own)``."""

    own: Tensor
    other: Tensor
    margin: Tensor
    low: Tensor
    high: Tensor
    gain: Tensor

    def take(self, rows: Tensor) -> Dual:
        own, other, margin, low, high = (v[rows] for v in (self.own, self.other, self.margin, self.low, self.high))
        return Dual(own, other, margin, low, high, self.gain)

    def best_single(self) -> Tensor:
        """Return multipliers that are nonzero only for the p whose plane is farthest away."""
        between = torch.cdist(self.other, self.own).clamp_min(torch.finfo(self.own.dtype).tiny)
        best = (self.margin / between).argmax(2, keepdim=True)
        p = self.own.gather(1, best.expand(-1, -1, self.own.shape[2]))
        margin = self.margin.gather(2, best)
        value = multiplier(2 * (p - self.other), margin.squeeze(2).clamp_min(0), self.low, self.high, self.gain)
        return torch.zeros_like(self.margin).scatter(2, best, value[:, :, None])

    def slope(self, multipliers: Tensor) -> Tensor:
        """Return v of ``distance_bounds``."""
        return 2 * (multipliers @ self.own - multipliers.sum(2, keepdim=True) * self.other)

    def gradient(self, multipliers: Tensor) -> Tensor:
        _, change = minimal_moves(self.slope(multipliers), self.low, self.high, self.gain)
        return 2 * (change @ self.own.mT - (change * self.other).sum(2, keepdim=True)) + self.margin

    def rate(self) -> Tensor:
        """Return the step size, one over Gershgorin's bound of the eigenvalues of the Gram matrix of 2 g (p - c)."""
        own, other = self.gain * self.own, self.gain * self.other
        cross = other @ own.mT  # batch, other, own
        gram = (own @ own.mT)[:, None] - cross[..., None] - cross[:, :, None]
        gram = 4 * (gram + other.square().sum(2)[..., None, None])
        return 1 / gram.abs().sum(3).amax(2, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)

    def bound(self, multipliers: Tensor) -> Tensor:
        v = self.slope(multipliers)
        move, change = minimal_moves(v, self.low, self.high, self.gain)
        value = (multipliers * self.margin).sum(2) + (move * move / 2 + v * change).sum(2)
        lengths = self.own.norm(dim=2)[:, None] + self.other.norm(dim=2)[..., None]
        reach = 2 * self.gain.max() * (multipliers * lengths).sum(2)
        count, features = self.own.shape[1:]
        ends = features + math.sqrt(features) * reach  # by Cauchy-Schwarz
        terms = count + features + 16
        size = (multipliers * self.margin.abs()).sum(2) + 3 * reach.square() + ends
        error = gamma(terms, UNIT_ROUNDOFF[torch.float64]) * size
        distance: Tensor = (2 * (value - 2 * error).clamp_min(0)).sqrt() * (1 - 1e-12)
        return distance
