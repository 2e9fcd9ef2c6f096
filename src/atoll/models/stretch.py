r"""Contrast stretching, and the distance of an input from a plane in the space of stretched inputs.

A coordinate of the output, :math:`\phi(x)`, has the slope ``gain`` for moves between ``low`` and ``high`` and is
constant outside.  If inputs are limited only by their bounds, the gain is 1, and low :math:`\le 0 \le` high.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.errors import check_range

DOUBLINGS = 10  # a plane counts as unreachable after this number of doublings
UNIT = 1 / 16  # unit of thresholds: small, so that the learning rate of centroids fits; a power of 2, so it is exact
WIDEST = 7 / 16  # largest width of a plateau


class Stretch(nn.Module):
    r"""Contrast stretching: :math:`\phi(x) = \mathrm{clip}((x - l) / (h - l), 0, 1)`, for inputs in [0, 1].

    Pixels below the threshold l become black, and pixels above h become white.  A small l2 perturbation that is spread
    over many pixels then changes only gray ones, because other pixels must first reach the threshold.

    Args:
        t: a number in [0, 1/2).  The thresholds are t and 1 - t; 0 for clipping only.
        pixels: number of pixels, to learn two thresholds for each; they start at t and 1 - t, at most 7/16 away from
            black or white.  0 for fixed thresholds.

    >>> Stretch(0.1)(torch.tensor([0.05, 0.3, 0.5, 0.97]))
    tensor([0.0000, 0.2500, 0.5000, 1.0000])
    >>> Stretch(0.1, pixels=784).thresholds.shape
    torch.Size([2, 784])
    """

    thresholds: Tensor | None  # distances of l from 0 and of h from 1, in multiples of UNIT, ``(2, pixels)``

    def __init__(self, t: float, pixels: int = 0) -> None:
        super().__init__()
        check_range("[0, 0.5)", stretch=t)
        self.t = t
        self.thresholds = nn.Parameter(torch.full((2, pixels), t / UNIT)) if pixels else None

    @property
    def ends(self) -> tuple[Tensor | float, Tensor | float]:
        """The thresholds l and h."""
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
        """Return the input between the thresholds that is mapped to u, or closest to it."""
        low, high = self.ends
        return u.clamp(0, 1) * (high - low) + low

    def slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the interval of moves for which the output changes; it excludes 0 for black and white pixels."""
        low, high = self.ends
        return low - x, high - x

    def extra_repr(self) -> str:
        return f"t={self.t}" if self.thresholds is None else f"pixels={self.thresholds.shape[1]}"


def minimal_moves(v: Tensor, low: Tensor, high: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    r"""Minimize :math:`\tfrac12 \delta^2 + v\, (\phi(x + \delta) - \phi(x))`; return the moves and the changes of phi.

    On the slope this is a parabola with its minimum at :math:`\mathrm{clip}(-gain \cdot v, low, high)`; off the slope
    the best move is zero.

    >>> v, x = torch.tensor([1.0, 0.2, 0.02]), torch.full((3,), 0.95)
    >>> minimal_moves(v, 0.1 - x, 0.9 - x, torch.tensor(1.25))  # moves below 0.05 have no effect
    (tensor([-0.8500, -0.2500, -0.0000]), tensor([-1.0000, -0.2500,  0.0000]))
    """
    move = torch.clamp(-gain * v, low, high)
    change = gain * (move - torch.clamp(torch.zeros_like(v), low, high))
    worth = move * move / 2 + v * change < 0
    return move * worth, change * worth


def multiplier(a: Tensor, margin: Tensor, low: Tensor, high: Tensor, gain: Tensor, *, steps: int = 20) -> Tensor:
    r"""Return the :math:`\lambda` for which ``minimal_moves`` of :math:`\lambda a` just reach the plane.

    They decrease :math:`a \cdot \phi` by the margin.  The value is found by bisection, from below, and is large if no
    move is sufficient.  The distance is :math:`\sqrt{2 q(\lambda)}`,

    .. math:: q(\lambda) = \lambda \cdot margin + \sum_i \min_{\delta_i} \tfrac12 \delta_i^2
              + \lambda a_i (\phi(x_i + \delta_i) - \phi(x_i)),

    the dual of the problem, which is a lower bound for every :math:`\lambda`.

    Args:
        a: normals, ``(..., features)``.
        margin: required decrease, at least 0, ``(...)``.
        low: start of the slope, ``(..., features)``.
        high: end of the slope.
        gain: size of the slope, ``(features,)``.
        steps: number of bisections.
    """

    def short(value: Tensor) -> Tensor:
        """Whether the moves of a multiplier do not reach the plane."""
        _, change = minimal_moves(value[..., None] * a, low, high, gain)
        return margin + (a * change).sum(-1) > 0

    # Start with the solution without plateaus.  Close to the plane it is almost zero even if the slope is far away, so
    # use at least the value that moves the feature with the largest weight across the widest plateau.
    tiny = torch.finfo(a.dtype).tiny
    plateau = torch.maximum(low, -high).clamp_min(0).amax(-1)
    steep = gain * a.abs()
    upper = margin / steep.square().sum(-1).clamp_min(tiny)
    upper = torch.maximum(upper, 2 * plateau / steep.amax(-1).clamp_min(tiny))
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
    r"""Return a lower bound of the l2 distance of x from inputs that are, stretched, as close to c as to p.

    The bound comes from the dual problem and is finite even if there is no such input.  Beyond the plane, it is the
    negative distance of the stretched input from the plane, divided by the Lipschitz constant.

    It has the gradient of q at the best multiplier, which is held constant (envelope theorem).

    >>> x, p, c = torch.tensor([[0.95, 0.5]]), torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 0.5]])
    >>> stretch_distance(x, p, c, Stretch(0.1))  # from 0.95 to 0.5
    tensor([0.4500])
    """
    u, a, gain = stretch(x), 2 * (p - c), stretch.gain
    low, high = stretch.slope(x)
    margin = (u - c).square().sum(1) - (u - p).square().sum(1)
    with torch.no_grad():
        best = multiplier(a, margin.clamp_min(0), low, high, gain)
    # Differentiate the moves with respect to the thresholds, which may be learned, but not with respect to a.
    move, change = minimal_moves(best[:, None] * a.detach(), low, high, gain)
    q = best * (margin + (a * change).sum(1)) + move.square().sum(1) / 2
    # The gradient of the square root is not useful close to zero.
    inside = (2 * q.clamp_min(1e-8)).sqrt()
    return torch.where(margin > 0, inside, margin / (gain * a).norm(dim=1).clamp_min(1e-12))
