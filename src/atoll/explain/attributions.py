"""Attributions: what a classifier looks at, pixel by pixel, by name or as classes with Captum's interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atoll.attacks.base import check_labels
from atoll.attacks.evaluate import automatic_batch_size
from atoll.errors import InputError, check_range
from atoll.explain.boundary import BoundaryPoints, boundary_search
from atoll.losses.objectives import margin
from atoll.modules import evaluation_mode
from atoll.registry import Registry
from atoll.rng import PointRNG
from atoll.threat import per_point

with warnings.catch_warnings():  # in notebooks without ipywidgets, Captum's import of tqdm would print a warning
    warnings.simplefilter("ignore")
    from captum.attr import GradientAttribution
    from captum.attr import InputXGradient as CaptumInputXGradient
    from captum.attr import Saliency as CaptumSaliency

Target = int | Sequence[int] | Tensor | None

ATTRIBUTIONS = Registry("attribution", "attributions", "atoll.explain.attributions.PointAttribution", "atoll.explain")
STANDARD = ("SM", "IxG", "IG", "SG", "BSM", "BIG")  # the columns of the tables, in order
NAMES = (*STANDARD, "BNM")  # all of Atoll's, by their short names
STEPS = 20  # thesis, B.3


class PointAttribution(GradientAttribution):  # type: ignore[misc]
    """Base of all attributions; a subclass implements ``explain``, and ``start`` if its paths start somewhere.

    Captum's interface: ``attribute(inputs, target=...)`` gives a tensor of the inputs' shape.  The model may be any
    ``nn.Module`` from inputs to logits; it is used in evaluation mode, and modes, buffers and gradients are left as
    they were.  What comes out for a point depends on the point and the seed, not on the batch (up to rounding).
    """

    registry: ClassVar[Registry] = ATTRIBUTIONS

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model

    def attribute(
        self,
        inputs: Tensor,
        target: Target = None,
        *,
        return_convergence_delta: bool = False,
        internal_batch_size: int | None = None,
        boundary: BoundaryPoints | None = None,
    ) -> Any:
        """Attributions of the logits of some classes.

        Args:
            inputs: ``(points, ...)``.
            target: the class of interest, one for all or one for each; the predicted ones if None.
            return_convergence_delta: return a pair: the attributions, and for each point their sum minus the
                difference of the logits at the input and at the start of its path.  Only for attributions with paths.
            internal_batch_size: rows that go through the model together; if None, as many as fit comfortably into
                memory.
            boundary: the result of ``boundary_search`` for these inputs, for attributions that need it; several
                can share it.
        """
        x = checked(inputs)
        if return_convergence_delta and not self.has_convergence_delta():
            raise InputError(f"return_convergence_delta: {type(self).__name__} is not meant to be complete")
        check_range("[1, inf)", internal_batch_size=internal_batch_size)
        with evaluation_mode(self.model):
            batch_size = internal_batch_size or automatic_batch_size(self.model, x)
            classes = checked_target(self.model, x, target, batch_size)
            start = self.start(x, batch_size, boundary)
            attributions = self.explain(x, start, classes, batch_size)
            if not return_convergence_delta:
                return attributions
            return attributions, convergence_delta(self.model, x, attributions, start, classes, batch_size)

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        """Where the paths to the inputs start: at themselves if there are none."""
        return x

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        """The attribution itself, on a model in evaluation mode and valid inputs."""
        raise NotImplementedError


@ATTRIBUTIONS.register("SM")
class Saliency(PointAttribution):
    r"""SM: the gradient of the logit, with its sign (Simonyan et al., 2013; thesis, definition 4).

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> Saliency(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -1.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return _captum(CaptumSaliency(self.model), x, target, batch_size, abs=False)


@ATTRIBUTIONS.register("IxG")
class InputXGradient(PointAttribution):
    """IxG: the input times the gradient of the logit."""

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return _captum(CaptumInputXGradient(self.model), x, target, batch_size)


@ATTRIBUTIONS.register("IG")
class IntegratedGradients(PointAttribution):
    r"""IG: the mean gradient on the way from a baseline, times the way (Sundararajan et al., 2017; thesis, def. 5).

    .. math:: (x - b) \cdot \int_0^1 \nabla f_y(b + t (x - b))\, dt

    Not Captum's own: the weights of its ``riemann_trapezoid`` sum to 1 - 1/steps, so its attributions are 5 % too small
    at the 20 points of the thesis, and not complete even for a linear model.  Ours are its attributions times 20/19.

    Args:
        model: the classifier.
        steps: points of the trapezoid rule.
        baseline: the number that the baseline consists of; 0 for black.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> maps, delta = IntegratedGradients(model).attribute(torch.tensor([[0.5, 0.5]]), return_convergence_delta=True)
    >>> maps, bool(delta.abs() < 1e-6)
    (tensor([[ 1.5000, -0.5000]]), True)
    """

    def __init__(self, model: nn.Module, *, steps: int = STEPS, baseline: float = 0.0) -> None:
        super().__init__(model)
        self.steps = steps
        self.baseline = baseline

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return path_gradient(self.model, x, start, target, self.steps, batch_size)

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        return torch.full_like(x, self.baseline)

    def has_convergence_delta(self) -> bool:
        return True


@ATTRIBUTIONS.register("SG")
class SmoothGrad(PointAttribution):
    r"""SG: the mean gradient under Gaussian noise (Smilkov et al., 2017).

    .. math:: \frac 1 n \sum_i \nabla f_y(x + \delta_i), \quad \delta_i \sim N(0, \sigma^2 I)

    That is the saliency map of the smoothed model, whose logits are the mean logits under the same noise.  It changes
    slowly where the noise is large: for a one-layer net ReLU(Wx) and infinitely many draws (thesis, theorem 1)

    .. math:: \|A(x) - A(x')\| \le \|w_y\| \big(2 \Phi(\|x - x'\| / (2 \sigma)) - 1\big)

    Not Captum's ``NoiseTunnel``: that draws from the global generator, so its result would depend on the batch.  Here
    all inputs see the same noise, which depends on the seed alone: so the attribution is a function of the input, and
    as smooth as the gradient is.

    Args:
        model: the classifier.
        sigma: standard deviation of the noise.
        samples: draws for each point.
        seed: of the noise.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> SmoothGrad(model, sigma=0.5).attribute(torch.tensor([[0.6, 0.4]])).round(decimals=3)
    tensor([[ 3., -1.]])
    """

    def __init__(self, model: nn.Module, *, sigma: float = 0.15, samples: int = 20, seed: object = 0) -> None:
        super().__init__(model)
        if not sigma > 0 or samples < 1:
            raise InputError(f"sigma, samples: expected more than 0 and at least 1, got {sigma}, {samples}")
        self.sigma = sigma
        self.samples = samples
        self.seed = seed

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        def place(point: Tensor, k: Tensor) -> Tensor:
            noise = PointRNG(self.seed, "SmoothGrad", index=k).normal(*x.shape[1:], dtype=x.dtype)
            return noise.mul_(self.sigma).add_(x[point])

        weights = x.new_full((self.samples,), 1 / self.samples)
        return mean_gradient(self.model, target, place, weights, x, batch_size)


class BoundaryAttribution(PointAttribution):
    """Base of those that start at the closest known points across the boundary.

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
        if boundary.notes:
            raise InputError(boundary.notes[0])
        return boundary.x_outside


@ATTRIBUTIONS.register("BSM")
class BoundarySaliency(BoundaryAttribution):
    r"""BSM: the gradient of the logit at the closest known point across the boundary.

    .. math:: \nabla f_y(x_{adv})

    This is not normal to the boundary (see the errata); ``BoundaryNormal`` is.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> BoundarySaliency(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -1.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return mean_gradient(self.model, target, lambda point, _: start[point], x.new_ones(1), x, batch_size)


@ATTRIBUTIONS.register("BNM")
class BoundaryNormal(BoundaryAttribution):
    r"""BNM: the normal of the boundary: the gradient of the margin at the closest known point across it.

    .. math:: \nabla (f_y - \max_{i \ne y} f_i)(x_{adv})

    For the predicted class y it points from the boundary to the input's side.  Adding one function to all logits does
    not change it, as it changes no prediction; BSM changes.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> BoundaryNormal(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -2.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return -mean_gradient(self.model, target, lambda point, _: start[point], x.new_ones(1), x, batch_size, margin)


@ATTRIBUTIONS.register("BIG")
class BoundaryIntegratedGradients(BoundaryAttribution, IntegratedGradients):
    r"""BIG: integrated gradients with the closest known point across the boundary as the baseline.

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


def attribution(name: str, model: nn.Module, **options: Any) -> PointAttribution:
    """An attribution by its name in the tables.

    >>> attribution("SG", nn.Linear(2, 2), samples=5).samples
    5
    """
    member = ATTRIBUTIONS.resolve(name)
    method: PointAttribution = member.cls(model, **member.arguments, **options)
    return method


def pick(logits: Tensor, target: Tensor) -> Tensor:
    """Each row's logit of its target."""
    return logits.gather(1, target[:, None]).squeeze(1)


def logit(model: nn.Module, x: Tensor, target: Tensor, batch_size: int) -> Tensor:
    """The logit of each point's target."""
    with torch.no_grad():
        parts = zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True)
        return torch.cat([pick(model(part), classes) for part, classes in parts])


def convergence_delta(
    model: nn.Module, x: Tensor, attributions: Tensor, start: Tensor, target: Tensor, batch_size: int
) -> Tensor:
    """For each point the sum of its attributions minus the difference of the logits at the input and at the start."""
    end, begin = (logit(model, point, target, batch_size) for point in (x, start))
    return attributions.flatten(1).sum(1) - (end - begin)


def mean_gradient(
    model: nn.Module,
    target: Tensor,
    place: Callable[[Tensor, Tensor], Tensor],
    weights: Tensor,
    like: Tensor,
    batch_size: int,
    score: Callable[[Tensor, Tensor], Tensor] = pick,
) -> Tensor:
    r"""The weighted mean of a logit's gradients at several places for each point.

    .. math:: \sum_k w_k \nabla f_y(\mathrm{place}_k)

    ``place`` takes numbers of points and numbers k; only ``batch_size`` places are in memory at a time.  ``like`` has
    the shape of the inputs.  ``score`` takes logits and targets, for gradients of something other than the logit.
    """
    total, number = torch.zeros_like(like), torch.arange(len(target) * len(weights), device=like.device)
    for chunk in torch.split(number, batch_size):
        point, k = chunk // len(weights), chunk % len(weights)
        inputs = place(point, k).detach().requires_grad_()
        with torch.enable_grad():
            value = score(model(inputs), target[point])
            (weighted,) = torch.autograd.grad(value, inputs, weights[k].to(value))
        total.index_add_(0, point, weighted)
    return total


def path_gradient(model: nn.Module, x: Tensor, baseline: Tensor, target: Tensor, steps: int, batch_size: int) -> Tensor:
    r"""The way from a baseline b times the mean gradient at n steps of it, by the trapezoid rule.

    .. math:: (x - b) \cdot \sum_k w_k \nabla f_y(b + t_k (x - b)), \quad t_k = \frac k {n - 1}

    with weights 1/(n - 1), half of that at both ends; exact where the gradient is linear on the way.
    """
    check_range("[2, inf)", steps=steps)
    t = torch.linspace(0, 1, steps, dtype=x.dtype, device=x.device)
    weights = torch.full_like(t, 1 / (steps - 1))
    weights[[0, -1]] /= 2
    way = x - baseline

    def place(point: Tensor, k: Tensor) -> Tensor:
        return torch.addcmul(baseline[point], per_point(t[k], x), way[point])

    return way * mean_gradient(model, target, place, weights, x, batch_size)


def _captum(method: Any, x: Tensor, target: Tensor, batch_size: int, **options: Any) -> Tensor:
    """A method of Captum's, a batch at a time, on inputs of its own: it sets and unsets their ``requires_grad``."""
    parts = zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True)
    maps = [method.attribute(part.clone().requires_grad_(), target=y, **options).detach() for part, y in parts]
    return torch.cat(maps)


def checked(inputs: Tensor) -> Tensor:
    """Inputs that make sense, without their history."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2 or not len(inputs):
        got = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(f"inputs: expected a tensor of floats, (points, ...), got {got}")
    if not inputs.isfinite().all():
        raise InputError("inputs: expected finite numbers, got NaN or infinity")
    return inputs.detach()


def checked_target(model: nn.Module, x: Tensor, target: Target, batch_size: int) -> Tensor:
    """One class for each input; the predicted one if none is given."""
    with evaluation_mode(model), torch.no_grad():
        if target is None:
            logits = torch.cat([model(part) for part in torch.split(x, batch_size)])
            check_labels(logits, logits.new_zeros(len(logits), dtype=torch.int64))
            return logits.argmax(1)
        first = model(x[:1])
    classes = torch.as_tensor(target, device=x.device)
    classes = classes.expand(len(x)) if classes.dim() == 0 else classes
    if classes.shape != (len(x),) or classes.dtype != torch.int64:
        raise InputError(f"target: expected a class, or one for each of {len(x)} inputs, got {target!r}")
    check_labels(first, classes)
    return classes
