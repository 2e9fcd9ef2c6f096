"""Attacks on certificates, independent of how they were proven: points, l2 attacks within the radius, and slopes.

A certificate is broken if the prediction changes at a distance of at most the radius.  Distances are those between the
numbers that the networks see, in float64.  Predictions are those of the certified object, and of the original module.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.certify import Certificate, Certifier

Shape = tuple[int, ...]
Function = Callable[[Tensor], Tensor]
CLOSE = 1 + 1e-12  # distances are computed in float64: those so close to the radius do not count
INSIDE = 1 - 1e-6


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
    """Inputs of all kinds: random, corners, zeros, huge, tiny, sparse, and next to decision boundaries."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, dtype=torch.float64)

    sizes = [1e-40, 1e-20, 1e-6, 1e-3, 30, 1e4, 1e10, 1e18, 1e30]
    if dtype == torch.float64:
        sizes += [1e-310, 1e-150, 1e150, 1e300]
    scales = torch.tensor(sizes, dtype=torch.float64)
    groups = [
        uniform(4), normal(4), 3 * normal(2), (uniform(3) > 0.5).double(), torch.zeros(1, *shape, dtype=torch.float64),
        normal(len(scales)) * scales.view(-1, *[1] * len(shape)), normal(2) * (uniform(2) > 0.7),
    ]  # fmt: skip
    x = torch.cat(groups).to(dtype)
    return torch.cat([x, *(boundary_points(function, x[:10], count=3, steps=steps) for steps in (4, 12, 60))])


@torch.no_grad()
def boundary_points(function: Function, x: Tensor, count: int, steps: int) -> Tensor:
    """Inputs on both sides of a decision boundary: bisection between inputs of different classes."""
    classes = function(x).argmax(1)
    first, second = (classes[:, None] != classes).triu().nonzero()[:count].T
    a, b = x[first], x[second]
    for _ in range(steps if len(a) else 0):
        middle = (a.double() / 2 + b.double() / 2).to(x.dtype)
        same = (function(middle).argmax(1) == classes[first]).view(-1, *[1] * (x.dim() - 1))
        a, b = torch.where(same, middle, a), torch.where(same, b, middle)
    return torch.cat([a, b])


# --- attacks


def find_breaks(
    certifier: Certifier, module: nn.Module, x: Tensor, *, factor: float = 1.0, seed: int = 0, steps: int = 8
) -> list[Break]:
    """Attack the certificates of inputs just inside their radii.

    Args:
        certifier: with the certified function as ``model``.
        module: the original module, which is evaluated too.
        factor: radii are multiplied by it; a sound certifier with a factor above 1 is unsound.
        seed: of random directions.
        steps: of gradient ascent.
    """
    certificate: Certificate = certifier(x)
    rows = (certificate.radius > 0).nonzero()[:, 0]
    radius = (factor * certificate.radius[rows]).clamp_max(torch.finfo(x.dtype).max / 8)
    attack = _Attack(certifier.model, module, x[rows], certificate.prediction[rows], radius, seed)
    if len(rows):
        attack.run(steps)
    return attack.breaks


class _Attack:
    def __init__(
        self, model: nn.Module, module: nn.Module, x: Tensor, prediction: Tensor, radius: Tensor, seed: int
    ) -> None:
        self.functions = {"certified object": model, "module": module}
        self.x, self.prediction, self.radius = x, prediction, radius.double()
        self.generator = torch.Generator().manual_seed(seed)
        self.smooth = _smooth(model, x)
        self.breaks: list[Break] = []

    def run(self, steps: int) -> None:
        """Random directions, straight towards every class, gradient ascent, then the last bits."""
        best = self.evaluate(self.gradients_of_all_classes())
        for _ in range(2):
            best = self.better(best, self.evaluate(self.random(4)))
        for start in (best, self.random(1)[:, 0]):
            y = start
            for step in range(steps):
                y = self.ascend(y, 1.5 * 0.7**step)
                best = self.better(best, self.evaluate(y[:, None]))
        for _ in range(3):
            best = self.better(best, self.evaluate(self.neighbors(best, 4)))

    def shaped(self, values: Tensor) -> Tensor:
        """Numbers for each row, ready to multiply inputs."""
        return values.view(-1, *[1] * (self.x.dim() - 1))

    def random(self, count: int) -> Tensor:
        noise = torch.randn(len(self.x), count, *self.x.shape[1:], generator=self.generator, dtype=torch.float64)
        if count > 1:  # one of them along an axis
            index = noise[:, 0].flatten(1).abs().argmax(1, keepdim=True)
            flat = torch.zeros_like(noise[:, 0].flatten(1))
            noise[:, 0] = flat.scatter(1, index, noise[:, 0].flatten(1).gather(1, index)).view_as(noise[:, 0])
        return torch.stack([self.project(self.x.double() + 1e30 * noise[:, i]) for i in range(count)], 1)

    def project(self, y: Tensor) -> Tensor:
        """Onto the sphere just inside the radius, in float64."""
        offset = y - self.x.double()
        length = distances(torch.zeros_like(offset), offset)
        factor = torch.where(length > 0, INSIDE * self.radius / length, 0.0)
        return self.x.double() + offset * self.shaped(factor)

    def gradient(self, y: Tensor, other: Tensor | None = None) -> Tensor:
        """The direction in which the largest other logit, or that of a class, gains most; zeros if there is none."""
        y = y.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.smooth(y)
            rows = torch.arange(len(y))
            own = torch.zeros_like(logits, dtype=torch.bool)
            own[rows, self.prediction] = True
            if other is None:
                other = logits.detach().masked_fill(own, -math.inf).argmax(1)
            margin = logits[rows, other] - logits[rows, self.prediction]
            (gradient,) = torch.autograd.grad(margin.sum(), y)
        gradient = gradient.double().nan_to_num(0, 0, 0)
        length = distances(torch.zeros_like(gradient), gradient)
        return gradient / self.shaped(torch.where(length > 0, length, 1.0))

    def gradients_of_all_classes(self) -> Tensor:
        """Where the logits are linear around the input, the nearest input of each other class is in this direction."""
        classes = self.smooth(self.x.double()).shape[1]
        x, scale = self.x.double(), self.shaped(self.radius)
        steps = []
        for other in range(classes):
            direction = self.gradient(x, torch.full((len(x),), other))
            steps += [self.project(x + scale * direction), x + 0.5 * INSIDE * scale * direction]
        return torch.stack(steps, 1)

    def ascend(self, y: Tensor, size: float) -> Tensor:
        return self.project(y + size * self.shaped(self.radius) * self.gradient(y))

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
        y = candidates.flatten(0, 1).to(self.x.dtype)
        x, radius = self.x.repeat_interleave(count, 0), self.radius.repeat_interleave(count)
        prediction = self.prediction.repeat_interleave(count)
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
        margin = torch.stack(margins).amin(0).masked_fill(~inside, math.inf).view(-1, count)
        return candidates[torch.arange(len(candidates)), margin.argmin(1)]

    def better(self, a: Tensor, b: Tensor) -> Tensor:
        """The one of two candidates of each row with the smaller margin."""
        return self.evaluate(torch.stack([a, b], 1))


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
    quotients = (change[:, :, None] - change[:, None]).abs() / distances(x[:-1], x[1:]).view(-1, 1, 1)
    return torch.maximum(norms, quotients.nan_to_num(0).amax(0))
