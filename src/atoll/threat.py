"""The threat model: what an attacker may do to an input.

One object knows the norm, the radius and the valid range of inputs, and implements projection, random start,
steepest step, distance and rounding for them.  Attacks, training and evaluation never handle a norm themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from atoll.errors import LARGEST_COUNT, InputError, shorten
from atoll.rng import PointRNG

Norm = Literal["linf", "l2", "l1"]
AttackNorm = Literal["linf", "l2", "l1", "l0"]
Bounds = tuple[float, float]

# Newton steps on accelerators.  FAB never needed more in our measurements.  With too few, a change is too short.
NEWTON_STEPS = 6


def number(value: float | str, name: str = "value") -> float:
    """Parse a number or a fraction such as ``"8/255"``.

    >>> number("8/255") == 8 / 255
    True
    """
    try:
        if not isinstance(value, str):
            return float(value)
        numerator, slash, denominator = value.replace(" ", "").partition("/")
        result = float(Fraction(int(numerator), int(denominator))) if slash else float(numerator)
        if not math.isnan(result):
            return result
        raise ValueError
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, ZeroDivisionError):
        raise InputError(f"{name}: expected a number or a fraction like 8/255, got {shorten(value)}") from None


def per_point(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``(batch,)`` to ``(batch, 1, ..., 1)`` so that it broadcasts against a batch of inputs."""
    return values.view(-1, *[1] * (like.dim() - 1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of each row of ``a`` with the same row of ``b``.

    >>> dot(torch.ones(2, 3), torch.arange(6.0).view(2, 3))
    tensor([ 3., 12.])
    """
    return (a * b).flatten(1).sum(1)


@dataclass(frozen=True)
class ThreatModel:
    r"""Perturbations :math:`\|x' - x\|_p \le \epsilon` with :math:`x'` inside the bounds.

    Args:
        norm: ``"linf"``, ``"l2"``, ``"l1"`` or, for attacks only, ``"l0"``: the number of components that change.  A
            pixel of a color image has three components.
        eps: radius in input units (pixels in [0, 1]); a number or a fraction such as ``"8/255"``.  A whole number for
            l0.
        bounds: valid range of inputs; None for unbounded inputs (Two Moons).

    >>> threat = ThreatModel("linf", "8/255")
    >>> x = torch.tensor([[0.0, 0.5]])
    >>> (threat.project(x + 1, x) * 255).round()
    tensor([[  8., 136.]])
    """

    norm: AttackNorm = "linf"
    eps: float | str = "8/255"
    bounds: Bounds | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.norm not in get_args(AttackNorm):
            raise InputError(f"norm: expected linf, l2, l1 or l0, got {self.norm!r}")
        if not 0 <= self.radius < math.inf:
            raise InputError(f"eps: expected a finite number >= 0, got {shorten(self.eps)}")
        if self.norm == "l0" and self.radius % 1:
            raise InputError(f"eps: expected a whole number of components for l0, got {self.eps!r}")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise InputError(f"bounds: expected lower < upper, got {self.bounds!r}")

    @property
    def radius(self) -> float:
        """``eps`` as a number."""
        return number(self.eps, "eps")

    def check_radius(self, shape: tuple[int, ...] | None = None) -> None:
        """Raise an InputError if eps exceeds the distance between any two inputs of this shape, so that all are alike.

        >>> ThreatModel("linf", 8).check_radius((3, 32, 32))
        Traceback (most recent call last):
        atoll.errors.InputError: eps: expected at most 1 for inputs in [0, 1], got 8
        """
        limit, inputs = float(LARGEST_COUNT), ""
        if self.bounds is not None and shape is not None:
            width, size = self.bounds[1] - self.bounds[0], math.prod(shape)
            limit = {"linf": width, "l2": width * math.sqrt(size), "l1": width * size, "l0": float(size)}[self.norm]
            inputs = f" for inputs in [{self.bounds[0]:g}, {self.bounds[1]:g}]"
        if self.radius > limit:
            raise InputError(f"eps: expected at most {limit:.10g}{inputs}, got {shorten(self.eps)}")

    def check(self, x: Tensor) -> None:
        """Raise an InputError unless all inputs are finite and inside the bounds."""
        if not x.numel() or not self.outside(x):
            return
        low, high = (float(value) for value in torch.aminmax(x))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputError("inputs: expected finite numbers, got NaN or infinity")
        assert self.bounds is not None
        raise InputError(
            f"inputs: expected values in [{self.bounds[0]:g}, {self.bounds[1]:g}], got [{low:g}, {high:g}]"
            "; move normalization inside the model"
        )

    def outside(self, x: Tensor) -> Tensor:
        """Return whether any input is not finite or outside the bounds, without waiting for the device.

        >>> ThreatModel().outside(torch.tensor([[0.0, 1.5]]))
        tensor(True)
        """
        low, high = torch.aminmax(x)
        lowest, highest = self.bounds or (-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
        return ~((low >= lowest) & (high <= highest))

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the norm of ``a - b`` for each point."""
        return self.size(a - b)

    def size(self, delta: Tensor) -> Tensor:
        """Return the norm of each perturbation."""
        flat = delta.flatten(1)
        if self.norm == "linf" and delta.device.type == "cpu":
            return torch.maximum(flat.amax(1), -flat.amin(1))  # several times faster than vector_norm
        norm: Tensor = torch.linalg.vector_norm(flat, {"linf": math.inf, "l2": 2, "l1": 1, "l0": 0}[self.norm], dim=1)
        return norm

    def contains(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Return whether each point is inside the ball around ``x`` (up to rounding) and the bounds.

        >>> x = torch.tensor([[0.5], [0.95]])
        >>> ThreatModel("linf", 0.1).contains(x + 0.1, x)
        tensor([ True, False])
        """
        inside = self.distance(x_adv, x) <= self.radius * (1 + 1e-5) + 1e-7
        if self.bounds is not None:
            inside &= ((x_adv >= self.bounds[0]) & (x_adv <= self.bounds[1])).flatten(1).all(1)
        return inside

    def clamp(self, x: Tensor) -> Tensor:
        """Clip to the bounds, in place."""
        return x if self.bounds is None else x.clamp_(*self.bounds)

    def project(self, x_adv: Tensor, x: Tensor, radius: Tensor | None = None) -> Tensor:
        """Project onto the ball and the bounds: exactly for linf and l1; for l2, first the ball, then the bounds.

        Clipping to bounds that contain ``x`` moves every coordinate toward ``x``, so the result stays in the ball.

        Args:
            x_adv: the points to project.
            x: the centers of the balls.
            radius: one radius per point, ``(batch,)``; eps by default.
        """
        self.require_convex("project")
        if self.norm == "linf":
            # Allocate one tensor and do the rest in place: allocating costs more than the arithmetic.
            largest = self.radius if radius is None else per_point(radius, x)
            return self.clamp((x_adv - x).clamp_(-largest, largest).add_(x))  # type: ignore[arg-type]
        if self.norm == "l2":
            delta = x_adv - x
            # Shrinking by a few ulps keeps the result inside after rounding.
            length = (self.radius if radius is None else radius) * (1 - 1e-6)
            scale = (length / self.size(delta).clamp_min(1e-30)).clamp_max(1)
            return self.clamp(delta.mul_(per_point(scale, delta)).add_(x))
        return self._project_l1(x_adv, x, self.radius if radius is None else radius[:, None].double())

    def require_convex(self, name: str) -> Norm:
        """Return the norm; raises an InputError for l0, whose ball is not convex."""
        if self.norm == "l0":
            raise InputError(f"{name}: expected linf, l2 or l1, got l0")
        return self.norm

    def _project_l1(self, x_adv: Tensor, x: Tensor, radius: float | Tensor) -> Tensor:
        """Project exactly onto the intersection of l1 ball and box.

        The solution moves coordinate i by ``clip(|v_i| - t, 0, room_i)`` with one threshold ``t >= 0``.  The sum over
        all coordinates is piecewise linear and decreasing in t, with kinks at ``|v_i|`` and ``|v_i| - room_i``, so we
        sort the kinks and interpolate (Croce & Hein, 2021).
        """
        change = (x_adv - x).flatten(1)
        # Sort only the coordinates that move; a sparse perturbation has few.  An accelerator sorts all of them, because
        # the program would have to wait for their number.
        moving = max(1, int(change.count_nonzero(1).max())) if x.device.type == "cpu" else change.shape[1]
        place = change.abs().topk(moving, dim=1).indices
        v, flat = change.gather(1, place).double(), x.flatten(1).gather(1, place).double()
        size = v.abs()
        if self.bounds is None:
            room = torch.full_like(size, math.inf)
        else:
            room = torch.where(v > 0, self.bounds[1] - flat, flat - self.bounds[0])
        radius = radius * (1 - 1e-6)
        inner = (size - room).clamp_min_(0)  # below this threshold the coordinate is at the bound
        kinks, order = torch.cat([size, inner], dim=1).sort(dim=1)
        # Slope of the total: each coordinate contributes -1 between its inner and its outer kink.
        step = torch.cat([torch.ones_like(size), -torch.ones_like(inner)], dim=1).gather(1, order)
        active = -step.cumsum(1)  # number of coordinates between their two kinks, right after each kink
        drop = active[:, :-1] * kinks.diff(dim=1)  # decrease of the total from one kink to the next
        total = torch.minimum(size, room).sum(1, keepdim=True)
        after = torch.cat([total, total - drop.cumsum(1)], dim=1)
        # The last kink whose total still exceeds the radius; interpolate from there.
        last = ((after > radius).sum(1, keepdim=True) - 1).clamp_min(0)
        slope = active.gather(1, last).clamp_min(1)
        threshold = kinks.gather(1, last) + (after.gather(1, last) - radius) / slope
        threshold = torch.where(total > radius, threshold, torch.zeros_like(threshold))
        move = torch.minimum((size - threshold).clamp_min_(0), room)
        moved = (flat + v.sign() * move).to(x.dtype)
        return self.clamp(x.flatten(1).scatter(1, place, moved)).view_as(x)

    def random_start(self, x: Tensor, streams: PointRNG) -> Tensor:
        """Draw a uniform point from the ball around each input and clip it to the bounds."""
        self.require_convex("random_start")
        shape = x.shape[1:]
        if self.norm == "linf":
            return self.clamp(streams.uniform(*shape, dtype=x.dtype).mul_(2).sub_(1).mul_(self.radius).add_(x))
        size = shape.numel()
        if self.norm == "l2":
            direction = streams.normal(*shape, dtype=x.dtype)
        else:  # uniform on the l1 sphere: signed exponentials, normalized
            direction = streams.rademacher(*shape, dtype=x.dtype) * -streams.uniform(*shape, dtype=x.dtype).log()
        norm = self.size(direction).clamp_min_(1e-30)
        length = self.radius * (1 - 1e-6) * streams.uniform(dtype=x.dtype) ** (1 / size)
        return self.clamp(x + direction * per_point(length / norm, x))

    def steepest(self, gradient: Tensor, sparsity: float = 0.99) -> Tensor:
        """Return the direction of unit norm in which a linear loss rises fastest, per point.

        For l1 that is a single coordinate.  As in SLIDE (Tramer & Boneh, 2019), the step is instead spread evenly over
        the largest ``1 - sparsity`` share of the coordinates, which needs far fewer steps.  A zero gradient gives a
        zero step.
        """
        self.require_convex("steepest")
        if self.norm == "linf":
            return gradient.sign()
        flat = gradient.flatten(1)
        if self.norm == "l2":
            norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
            return torch.where(norm > 0, flat / norm.clamp_min(1e-30), 0.0).view_as(gradient)
        keep = max(1, round(flat.shape[1] * (1 - sparsity)))
        top = flat.abs().topk(keep, dim=1).indices
        return torch.zeros_like(flat).scatter_(1, top, flat.gather(1, top).sign() / keep).view_as(gradient)

    def to_hyperplane(self, x: Tensor, w: Tensor, rise: Tensor) -> Tensor:
        r"""Return the change d of smallest norm with :math:`w \cdot d =` ``rise`` and x + d within the bounds.

        If the bounds do not allow it, return the change that comes closest.  linf moves all coordinates by the same
        amount until they reach their bounds, l2 by amounts proportional to :math:`|w_i|`, and l1 moves one coordinate
        after the other, largest :math:`|w_i|` first (Croce & Hein, 2020, section 2.2).

        Args:
            x: points, ``(batch, ...)``.
            w: normals of the hyperplanes, of the same shape.
            rise: required change of w . x, ``(batch,)``.
        """
        self.require_convex("to_hyperplane")
        flat, goal = w.flatten(1), rise.abs()[:, None]
        size, direction = flat.abs(), flat.sign().mul_(rise.sign()[:, None])
        if self.bounds is None:
            room = torch.full_like(size, math.inf)
        else:
            # The distance to the bound ahead, in few passes over memory, which dominate the cost.
            low, high = self.bounds
            room = torch.sub((low + high) / 2, x.flatten(1)).add_(direction, alpha=(high - low) / 2).abs_()
        if self.norm == "l1":
            move = _fill_in_turn(size, room, goal)
        elif self.norm == "l2":
            move = _fill_together(size * size, room.div_(size.clamp_min(1e-30)), goal).mul_(size)
        else:
            move = _fill_together(size, room, goal)
        return direction.mul_(move).view_as(x)

    def round(self, x_adv: Tensor, x: Tensor, levels: int = 255) -> Tensor:
        """Round to an 8-bit image that is still inside the ball around ``x``.

        Rounds each pixel to the nearest level, or toward ``x`` if that would leave the ball (linf: those pixels only;
        otherwise the whole image).
        """
        toward = torch.where(x_adv > x, torch.floor(x_adv * levels), torch.ceil(x_adv * levels))
        # If x is not an 8-bit image, rounding toward x may overshoot it; such a pixel becomes the pixel of x.
        toward = torch.where((toward / levels - x) * (x_adv - x) <= 0, x * levels, toward) / levels
        nearest = (x_adv * levels).round() / levels
        if self.norm == "linf":
            inside = (nearest - x).abs() <= self.radius
        else:
            inside = per_point(self.distance(nearest, x) <= self.radius, x)
        return self.clamp(torch.where(inside, nearest, toward))


def _fill_together(speed: Tensor, full: Tensor, goal: Tensor) -> Tensor:
    """Clip ``full`` to the level at which sum(speed * min(level, full)) = goal, if there is one; in place."""
    scratch = torch.empty_like(full)  # reused, because allocating costs more than the arithmetic
    level = goal / torch.sign(full, out=scratch).mul_(speed).sum(1, keepdim=True).clamp_min_(1e-20)
    enough = 8 * torch.finfo(goal.dtype).eps * goal
    if full.device.type == "cpu":
        _raise_level(level, speed, full, goal, enough, scratch)
    else:  # the program would have to wait for the device to know whether all rows are done
        for _ in range(NEWTON_STEPS):
            level += _newton_step(level, speed, full, goal, enough, scratch)
    return torch.minimum(full, level, out=full)


def _raise_level(level: Tensor, speed: Tensor, full: Tensor, goal: Tensor, enough: Tensor, scratch: Tensor) -> None:
    """Solve for the level with Newton's method, in place.

    The sum is concave and piecewise linear in the level, so the iterates rise and reach the right piece after a few
    steps, without sorting.
    """
    while True:
        step = _newton_step(level, speed, full, goal, enough, scratch)
        left = (step > 0).squeeze(1).nonzero().squeeze(1)
        if not len(left):
            return
        level += step
        if 2 * len(left) < len(goal):  # continue with the remaining rows only
            part = level[left]
            _raise_level(part, speed[left], full[left], goal[left], enough[left], scratch[: len(left)])
            level[left] = part
            return


def _newton_step(level: Tensor, speed: Tensor, full: Tensor, goal: Tensor, enough: Tensor, scratch: Tensor) -> Tensor:
    """Return how much the level of each row must rise; 0 if at most ``enough`` is missing or all are full."""
    short = goal - torch.minimum(full, level, out=scratch).mul_(speed).sum(1, keepdim=True)
    rate = torch.sub(full, level, out=scratch).gt_(0).mul_(speed).sum(1, keepdim=True)
    return (short / rate).masked_fill_((short <= enough) | (rate <= 0), 0.0)


def _fill_in_turn(size: Tensor, room: Tensor, goal: Tensor) -> Tensor:
    """Return moves with sum(size * move) = goal that use up the room of larger sizes before smaller ones."""
    move, left = torch.zeros_like(size), torch.arange(len(goal), device=goal.device)
    # Usually enough, and much faster than sorting all coordinates.  An accelerator sorts them faster than it answers.
    count = 64 if goal.device.type == "cpu" else size.shape[1]
    while len(left):
        weight, order = size[left].topk(min(count, size.shape[1]), dim=1)
        space = room[left].gather(1, order)
        gained = torch.where(weight > 0, weight * space, 0.0).cumsum(1)
        before = torch.cat([torch.zeros_like(gained[:, :1]), gained[:, :-1]], dim=1)
        share = torch.minimum((goal[left] - before).clamp_min_(0) / weight.clamp_min(1e-30), space)
        move[left] = torch.zeros_like(size[left]).scatter_(1, order, share)
        left = left[(gained[:, -1:] < goal[left]).squeeze(1)] if count < size.shape[1] else left[:0]
        count *= 4
    return move
