r"""Contrast stretching, and how far an input has to move until a plane in stretched inputs is crossed.

A coordinate of the output, :math:`\phi(x)`, has the slope ``gain`` for moves between ``low`` and ``high`` and is
constant outside.  For an input that is only held back by bounds the gain is 1, and low :math:`\le 0 \le` high.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.errors import check_range

DOUBLINGS = 10  # after these a plane counts as out of reach
UNIT = 1 / 16  # of thresholds: small, so that the learning rate of centroids suits them; a power of 2, so no rounding
WIDEST = 7 / 16  # of a plateau


class Stretch(nn.Module):
    r"""Contrast stretching: :math:`\phi(x) = \mathrm{clip}((x - l) / (h - l), 0, 1)`, for inputs in [0, 1].

    Pixels darker than the threshold l become black, and those lighter than h white.  A perturbation that is small in l2
    and spread over many pixels then changes only those that were gray: it pays for the way to the threshold before it
    changes any other.

    Args:
        t: in [0, 1/2): the thresholds are t and 1 - t; for 0 only the clipping is left.
        pixels: number of pixels if each learns its own two thresholds, which start at t and 1 - t and never lie more
            than 7/16 from black or white; 0 if t is fixed.

    >>> Stretch(0.1)(torch.tensor([0.05, 0.3, 0.5, 0.97]))
    tensor([0.0000, 0.2500, 0.5000, 1.0000])
    >>> Stretch(0.1, pixels=784).thresholds.shape
    torch.Size([2, 784])
    """

    thresholds: Tensor | None  # distances of l from 0 and of h from 1, in UNITs, ``(2, pixels)``

    def __init__(self, t: float, pixels: int = 0) -> None:
        super().__init__()
        check_range("[0, 0.5)", stretch=t)
        self.t = t
        self.thresholds = nn.Parameter(torch.full((2, pixels), t / UNIT)) if pixels else None

    @property
    def ends(self) -> tuple[Tensor | float, Tensor | float]:
        """l and h."""
        if self.thresholds is None:
            return self.t, 1 - self.t
        black, white = (self.thresholds * UNIT).clamp(0, WIDEST)
        return black, 1 - white

    @property
    def gain(self) -> Tensor:
        """The slope between the thresholds."""
        if self.thresholds is None:
            return torch.tensor(1 / (1 - 2 * self.t), dtype=torch.float64)
        low, high = self.ends
        return torch.as_tensor(1 / (high - low))

    @property
    def lipschitz(self) -> float:
        return float(self.gain.detach().max())

    def forward(self, x: Tensor) -> Tensor:
        gain = self.lipschitz if self.thresholds is None else self.gain
        return ((x - self.ends[0]) * gain).clamp(0, 1)

    def inverse(self, u: Tensor) -> Tensor:
        """The input between the thresholds that becomes u, or comes closest."""
        low, high = self.ends
        return u.clamp(0, 1) * (high - low) + low

    def slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The moves, from and to, that lead to where the output changes; 0 is outside of them at black and white."""
        low, high = self.ends
        return low - x, high - x

    def extra_repr(self) -> str:
        return f"t={self.t}" if self.thresholds is None else f"pixels={self.thresholds.shape[1]}"


def minimal_moves(v: Tensor, low: Tensor, high: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    r"""The moves that minimize :math:`\tfrac12 \delta^2 + v\, (\phi(x + \delta) - \phi(x))`, and the change of phi.

    On the slope that is a parabola, whose lowest point there is :math:`\mathrm{clip}(-gain \cdot v, low, high)`; off
    the slope the best move is none.

    >>> v, x = torch.tensor([1.0, 0.2, 0.02]), torch.full((3,), 0.95)
    >>> minimal_moves(v, 0.1 - x, 0.9 - x, torch.tensor(1.25))  # it takes 0.05 until anything happens
    (tensor([-0.8500, -0.2500, -0.0000]), tensor([-1.0000, -0.2500,  0.0000]))
    """
    move = torch.clamp(-gain * v, low, high)
    change = gain * (move - torch.clamp(torch.zeros_like(v), low, high))
    worth = move * move / 2 + v * change < 0
    return move * worth, change * worth


def multiplier(a: Tensor, margin: Tensor, low: Tensor, high: Tensor, gain: Tensor, *, steps: int = 20) -> Tensor:
    r"""The :math:`\lambda` whose ``minimal_moves`` of :math:`\lambda a` just lower :math:`a \cdot \phi` enough.

    By bisection, from below; large if no move is enough.  The distance is :math:`\sqrt{2 q(\lambda)}`,

    .. math:: q(\lambda) = \lambda \cdot margin + \sum_i \min_{\delta_i} \tfrac12 \delta_i^2
              + \lambda a_i (\phi(x_i + \delta_i) - \phi(x_i)),

    the dual of the problem, which bounds it from below whatever :math:`\lambda` is.

    Args:
        a: normals, ``(..., features)``.
        margin: by how much; not below 0, ``(...)``.
        low: of the slope, ``(..., features)``.
        high: of the slope.
        gain: its size, ``(features,)``.
        steps: of bisection.
    """

    def short(value: Tensor) -> Tensor:
        """Whether the moves of a multiplier do not reach the plane."""
        _, change = minimal_moves(value[..., None] * a, low, high, gain)
        return margin + (a * change).sum(-1) > 0

    # Where it would be if there were nothing but slope.  Close to the plane that is next to nothing even if the slope
    # is far away, so at least what moves the feature with the largest weight across the widest plateau.
    tiny = torch.finfo(a.dtype).tiny
    wait = torch.maximum(low, -high).clamp_min(0).amax(-1)
    steep = gain * a.abs()
    upper = margin / steep.square().sum(-1).clamp_min(tiny)
    upper = torch.maximum(upper, 2 * wait / steep.amax(-1).clamp_min(tiny))
    lower = torch.zeros_like(upper)
    for _ in range(DOUBLINGS):
        more = short(upper)
        if not more.any():
            break
        lower, upper = torch.where(more, upper, lower), torch.where(more, 2 * upper, upper)
    for _ in range(steps):
        middle = (lower + upper) / 2
        more = short(middle)
        lower, upper = torch.where(more, middle, lower), torch.where(more, upper, middle)
    return lower


def stretch_distance(x: Tensor, p: Tensor, c: Tensor, stretch: Stretch) -> Tensor:
    r"""How far x is, in l2, from inputs whose stretched version is as close to c as to p; negative beyond the plane.

    More precisely the bound from below that the dual gives.  It is finite even if no input is that close to c.

    The gradient is that of q at the best multiplier, which does not count itself (envelope theorem).  Beyond the plane
    it is the plain distance of the stretched input, divided by the Lipschitz constant.

    >>> x, p, c = torch.tensor([[0.95, 0.5]]), torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 0.5]])
    >>> stretch_distance(x, p, c, Stretch(0.1))  # from 0.95 to 0.5
    tensor([0.4500])
    """
    u, a, gain = stretch(x), 2 * (p - c), stretch.gain
    low, high = stretch.slope(x)
    margin = (u - c).square().sum(1) - (u - p).square().sum(1)
    with torch.no_grad():
        best = multiplier(a, margin.clamp_min(0), low, high, gain)
    # The moves depend on the thresholds, which may be learned; that they depend on a does not count.
    move, change = minimal_moves(best[:, None] * a.detach(), low, high, gain)
    q = best * (margin + (a * change).sum(1)) + move.square().sum(1) / 2
    # The square root of next to nothing has no gradient that one could use.
    inside = (2 * q.clamp_min(1e-8)).sqrt()
    return torch.where(margin > 0, inside, margin / (gain * a).norm(dim=1).clamp_min(1e-12))
