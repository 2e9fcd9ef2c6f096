"""Attacks on certificates, independent of how they were proven: points, l2 attacks within the radius, and slopes.

A certificate is broken if the prediction changes at a distance of at most the radius.  Distances are those between the
numbers that the networks see, in float64.  Predictions are those of the certified object, and of the original module.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.certify import Certificate, Certifier
from atoll.errors import CaptureError, InputError

Shape = tuple[int, ...]
Result = TypeVar("Result")
Function = Callable[[Tensor], Tensor]
CLOSE = 1 + 1e-12  # distances are computed in float64: those so close to the radius do not count
INSIDE = 1 - 1e-6
FAR = 2.0**100
NOISE = 1e-9  # rounding of logits in float64, relative to the largest
LARGEST_CLASS = 10
ALONE = 6  # inputs that are evaluated in a batch of one


@dataclass(frozen=True)
class Refusal:
    message: str


def attempt(call: Callable[[], Result]) -> Result | Refusal:
    """The result of a call, or the sentence that refuses it."""
    try:
        return call()
    except (InputError, CaptureError) as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return Refusal(message)


@dataclass(frozen=True)
class Break:
    """A false certificate.

    Args:
        x: the certified input.
        y: an input with another prediction.
        radius: of the certificate.
        distance: between the two, not larger than the radius.
        prediction: the certified one.
        other: that of ``y``.
        function: which of the two functions predicts it.
    """

    x: Tensor
    y: Tensor
    radius: float
    distance: float
    prediction: int
    other: int
    function: str

    def __str__(self) -> str:
        return (
            f"{self.function}: {self.prediction} became {self.other} at {self.distance:.9g}, certified to"
            f" {self.radius:.9g}; x = {self.x.flatten().tolist()}, y = {self.y.flatten().tolist()}"
        )


def distances(x: Tensor, y: Tensor) -> Tensor:
    """l2 distances of rows in float64, without underflow or overflow of squares.

    >>> distances(torch.zeros(1, 2), torch.tensor([[3e-30, 4e-30]]))
    tensor([5.0000e-30], dtype=torch.float64)
    """
    difference = (y.double() - x.double()).flatten(1)
    largest = difference.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    return (difference / scale).norm(dim=1) * scale[:, 0]


def in_double(module: nn.Module) -> nn.Module:
    """A copy of a module in float64: the function without most of its rounding."""
    return copy.deepcopy(module).double().eval()


# --- points


def points(function: Function, shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    """Inputs of all kinds: random, corners, sparse, huge, tiny, next to decision boundaries and to overflow."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, dtype=torch.float64)

    sizes = [1e-40, 1e-20, 1e-6, 1e-3, 30, 1e4, 1e10, 1e18, 1e30]
    if dtype == torch.float64:
        sizes += [1e-310, 1e-150, 1e150, 1e300]
    scales = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * len(shape))
    corners, zeros, sparse = (uniform(3) > 0.5).double(), 0 * uniform(1), normal(2) * (uniform(2) > 0.7)
    x = torch.cat([uniform(4), normal(4), 3 * normal(2), corners, zeros, normal(len(sizes)) * scales, sparse]).to(dtype)
    near = [boundary_points(function, x[:10], count=3, steps=steps) for steps in (4, 12, 60)]
    return torch.cat([x, *near, overflow_points(function, x[:6])])


@torch.no_grad()
def boundary_points(function: Function, x: Tensor, count: int, steps: int) -> Tensor:
    """Inputs on both sides of a decision boundary: bisection between inputs of different classes."""
    classes = function(x).argmax(1)
    first, second = (classes[:, None] != classes).triu().nonzero()[:count].T
    a, b = x[first], x[second]
    for _ in range(steps if len(a) else 0):
        middle = (a.double() / 2 + b.double() / 2).to(x.dtype)
        same = _per_row(function(middle).argmax(1) == classes[first], x)
        a, b = torch.where(same, middle, a), torch.where(same, b, middle)
    return torch.cat([a, b])


@torch.no_grad()
def overflow_points(function: Function, x: Tensor) -> Tensor:
    """Multiples of inputs that are just small enough for finite logits, and somewhat smaller ones."""
    limit = 120.0 if x.dtype == torch.float32 else 1000.0

    def finite(exponent: Tensor) -> Tensor:
        return function(x * _per_row(exponent.exp2(), x)).isfinite().all(1)

    low = torch.full((len(x),), -limit, dtype=x.dtype)
    high = torch.full((len(x),), limit, dtype=x.dtype)
    rows = finite(low) & ~finite(high)
    for _ in range(16):
        middle = (low + high) / 2
        good = finite(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    largest = (x * _per_row(low.exp2(), x))[rows]
    return torch.cat([largest, 0.8 * largest, 0.5 * largest, 0.2 * largest])


def _per_row(values: Tensor, x: Tensor) -> Tensor:
    """One value for each input, in a shape that broadcasts."""
    return values.view(-1, *[1] * (x.dim() - 1))


# --- attacks


def find_breaks(
    certifier: Certifier,
    module: nn.Module | None,
    x: Tensor,
    *,
    factor: float = 1.0,
    bounds: tuple[float, float] | None = None,
    seed: int = 0,
    steps: int = 8,
) -> list[Break]:
    """Attack the certificates of inputs just inside their radii.

    Args:
        certifier: with the certified function as ``model``.
        module: the original module, which is evaluated too; if None, only predictions of the certifier count.
        factor: radii are multiplied by it; a sound certifier with a factor above 1 is unsound.
        bounds: valid range of inputs, if certificates are about valid inputs only.
        seed: of random directions.
        steps: of gradient ascent.
    """
    certificate: Certificate = certifier(x)
    rows = (certificate.radius > 0).nonzero()[:, 0]
    radius = (factor * certificate.radius[rows]).clamp_max(torch.finfo(x.dtype).max / 8)
    functions: dict[str, Function] = {"certified object": certifier.model, "module": module}
    if module is None:
        functions = {"certifier": lambda y: _one_hot(certifier(y).prediction)}
    attack = _Attack(certifier.model, functions, x[rows], certificate.prediction[rows], radius, bounds, seed)
    if len(rows):
        attack.run(steps)
    return attack.breaks


class _Attack:
    def __init__(
        self,
        model: nn.Module,
        functions: dict[str, Function],
        x: Tensor,
        prediction: Tensor,
        radius: Tensor,
        bounds: tuple[float, float] | None,
        seed: int,
    ) -> None:
        self.functions = functions
        self.x, self.prediction, self.radius = x, prediction, radius.double()
        self.bounds = bounds
        self.generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode(False):
            self.smooth = _smooth(model, x.clone())
        self.breaks: list[Break] = []

    def run(self, steps: int) -> None:
        """Random directions, straight towards every class, gradient ascent, then the last bits."""
        best = self.evaluate(torch.cat([self.gradients_of_all_classes(), self.random(6), self.straight(8)], 1))
        for start in (best, self.random(1)[:, 0]):
            y = start
            for step in range(steps):
                y = self.ascend(y, 1.5 * 0.7**step)
                best = self.better(best, self.evaluate(y[:, None]))
        for _ in range(3):
            best = self.better(best, self.evaluate(self.neighbors(best, 4)))
        self.evaluate_alone(best)

    def random(self, count: int) -> Tensor:
        """In random directions."""
        noise = torch.randn(count, *self.x.shape, generator=self.generator, dtype=torch.float64)
        return torch.stack([self.project(self.x.double() + FAR * direction) for direction in noise], 1)

    def straight(self, count: int) -> Tensor:
        """Outwards, inwards, and along some axes outwards, where numbers grow."""
        x = self.x.double()
        sign = torch.where(x < 0, -1.0, 1.0)
        axes = torch.randperm(x[0].numel(), generator=self.generator)[:count]
        masks = F.one_hot(axes, x[0].numel()).view(-1, *x.shape[1:])
        ends = [x * FAR, -x * FAR, sign * FAR, *(x + FAR * sign * mask for mask in masks)]
        return torch.stack([self.project(end) for end in ends], 1)

    def project(self, y: Tensor) -> Tensor:
        """Onto the sphere just inside the radius, in float64."""
        offset = (y - self.x.double()).nan_to_num()
        length = distances(torch.zeros_like(offset), offset)
        factor = torch.where(length > 0, INSIDE * self.radius / length, 0.0)
        return self.x.double() + offset * _per_row(factor, offset)

    @torch.inference_mode(False)
    def gradient(self, y: Tensor, other: Tensor | None = None) -> Tensor:
        """The direction in which the largest other logit, or that of a class, gains most; zeros if there is none."""
        y = y.detach().clone().requires_grad_()
        with torch.enable_grad():
            logits = self.smooth(y)
            rows = torch.arange(len(y))
            own = torch.zeros_like(logits, dtype=torch.bool)
            own[rows, self.prediction] = True
            if other is None:
                other = logits.detach().masked_fill(own, -math.inf).argmax(1)
            margin = logits[rows, other.clone()] - logits[rows, self.prediction.clone()]
            if not margin.requires_grad:
                return torch.zeros_like(y)
            (gradient,) = torch.autograd.grad(margin.sum(), y)
        gradient = gradient.double().nan_to_num(0, 0, 0)
        length = distances(torch.zeros_like(gradient), gradient)
        return gradient / _per_row(torch.where(length > 0, length, 1.0), y)

    def gradients_of_all_classes(self) -> Tensor:
        """Where the logits are linear around the input, the nearest input of each other class is in this direction."""
        classes = self.smooth(self.x.double()).shape[1]
        x, scale = self.x.double(), _per_row(self.radius, self.x)
        steps = []
        for other in range(classes):
            direction = self.gradient(x, torch.full((len(x),), other))
            steps += [self.project(x + scale * direction), x + 0.5 * INSIDE * scale * direction]
        return torch.stack(steps, 1)

    def ascend(self, y: Tensor, size: float) -> Tensor:
        return self.project(y + size * _per_row(self.radius, self.x) * self.gradient(y))

    def neighbors(self, y: Tensor, count: int) -> Tensor:
        """Inputs that differ in the last bits, for errors of rounding."""
        eps = torch.finfo(self.x.dtype).eps
        noise = torch.randint(-2, 3, (len(y), count, *y.shape[1:]), generator=self.generator)
        near = y[:, None] * (1 + noise * eps)
        return torch.stack([self.project(near[:, i]) for i in range(count)], 1)

    @torch.no_grad()
    def evaluate(self, candidates: Tensor) -> Tensor:
        """Record breaks among candidates (rows, count, ...); returns the best of each row, in float64."""
        count = candidates.shape[1]
        x, radius = self.x.repeat_interleave(count, 0), self.radius.repeat_interleave(count)
        prediction = self.prediction.repeat_interleave(count)
        y = candidates.flatten(0, 1).to(self.x.dtype)
        if self.bounds is not None:
            y = y.clamp(*self.bounds)
        outside = _per_row(distances(x, y) * CLOSE > radius, x)
        y = torch.where(outside, torch.nextafter(y, x), y)
        margin = self.margins(x, y, prediction, radius).view(-1, count)
        best = margin.argmin(1)
        return y.view_as(candidates)[torch.arange(len(best)), best].double()

    @torch.no_grad()
    def evaluate_alone(self, y: Tensor) -> None:
        """Record breaks among candidates in batches of one, whose arithmetic may differ."""
        y = y.to(self.x.dtype)
        margin = self.margins(self.x, y, self.prediction, self.radius)
        for row in margin.argsort()[:ALONE].tolist():
            for end in (self.x, y):
                self.margins(*(v[row, None] for v in (self.x, end, self.prediction, self.radius)))

    def margins(self, x: Tensor, y: Tensor, prediction: Tensor, radius: Tensor) -> Tensor:
        """The smaller of the margins of both functions at y, infinity outside of the radius; records breaks."""
        distance = distances(x, y)
        inside = distance * CLOSE <= radius
        margins = []
        for name, function in self.functions.items():
            logits = function(y)
            other = logits.argmax(1)
            margins.append(_margin(logits.double(), prediction))
            for row in (inside & (other != prediction)).nonzero()[:, 0].tolist():
                numbers = float(radius[row]), float(distance[row]), int(prediction[row]), int(other[row])
                self.breaks.append(Break(x[row], y[row], *numbers, name))
        return torch.stack(margins).amin(0).masked_fill(~inside, math.inf)

    def better(self, a: Tensor, b: Tensor) -> Tensor:
        """The one of two candidates of each row with the smaller margin."""
        return self.evaluate(torch.stack([a, b], 1))


def _one_hot(prediction: Tensor) -> Tensor:
    """Logits that only tell a class."""
    return F.one_hot(prediction, LARGEST_CLASS).float()


def _margin(logits: Tensor, prediction: Tensor) -> Tensor:
    own = logits.gather(1, prediction[:, None])
    rest = logits.scatter(1, prediction[:, None], -math.inf).amax(1)
    return (own[:, 0] - rest).nan_to_num(-math.inf, math.inf, -math.inf)


def _smooth(model: nn.Module, x: Tensor) -> Function:
    """The function in float64 for gradients, or as it is if some part of it has a precision of its own."""
    double = in_double(getattr(model, "graph_module", model))
    try:
        double(x[:1].double())
    except RuntimeError:
        return lambda y: model(y.to(x.dtype))
    return double


# --- slopes


def largest_slopes(function: Function, x: Tensor) -> Tensor:
    """The largest slope of every difference of two logits, (classes, classes): from gradients, and between inputs."""
    y = x.clone().requires_grad_()
    with torch.enable_grad():
        logits = function(y)
        gradients = [torch.autograd.grad(logits[:, i].sum(), y, retain_graph=True)[0] for i in range(logits.shape[1])]
    jacobian = torch.stack(gradients, 1).flatten(2)
    norms = (jacobian[:, :, None] - jacobian[:, None]).norm(dim=3).amax(0)
    logits = logits.detach()
    change = logits[1:] - logits[:-1]
    difference = (change[:, :, None] - change[:, None]).abs() - NOISE * logits.abs().max()
    quotients = difference.clamp_min(0) / distances(x[:-1], x[1:]).view(-1, 1, 1)
    return torch.maximum(norms, quotients.nan_to_num(0).amax(0))
