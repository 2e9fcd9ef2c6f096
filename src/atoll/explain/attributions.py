"""Attributions: the contribution of each pixel to the logit of a class, with Captum's interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atoll.attacks.base import check_labels
from atoll.attacks.evaluate import automatic_batch_size
from atoll.errors import InputError, check_count
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
STANDARD = ("SM", "IxG", "IG", "SG", "BSM", "BIG")  # the columns of tables, in order
NAMES = (*STANDARD, "BNM")  # short names of all built-in attributions
STEPS = 20  # steps of integrated gradients (thesis, B.3)


class PointAttribution(GradientAttribution):  # type: ignore[misc]
    """Base class of attributions; subclasses implement ``explain`` and, for path attributions, ``start``.

    As in Captum, ``attribute(inputs, target=...)`` returns a tensor of the shape of the inputs.  Works with any
    ``nn.Module`` that maps inputs to logits.  The model is switched to evaluation mode, and its modes, buffers and
    gradients are restored.  The result for a point depends on the point and the seed, not on the batch (up to
    rounding).
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
        """Compute attributions of the logits of the target classes.

        Args:
            inputs: ``(points, ...)``.
            target: the class to explain, one for all inputs or one for each; the predicted classes if None.
            return_convergence_delta: also return, for each point, the sum of attributions minus the difference of the
                logits at the input and at the start of its path.  Only for path attributions.
            internal_batch_size: number of rows per forward pass; chosen to fit memory if None.
            boundary: the result of ``boundary_search`` for these inputs, for attributions that need it; several
                attributions can share it.
        """
        x = check_inputs(inputs)
        if return_convergence_delta and not self.has_convergence_delta():
            raise InputError(f"return_convergence_delta: not supported by {type(self).__name__}")
        check_count(1, internal_batch_size=internal_batch_size)
        with evaluation_mode(self.model):
            batch_size = internal_batch_size or automatic_batch_size(self.model, x)
            classes = resolve_target(self.model, x, target, batch_size)
            start = self.start(x, batch_size, boundary)
            attributions = self.explain(x, start, classes, batch_size)
            if not return_convergence_delta:
                return attributions
            return attributions, convergence_delta(self.model, x, attributions, start, classes, batch_size)

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        """Return where the paths to the inputs start; the inputs themselves if there are no paths."""
        return x

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        """Compute the attribution for valid inputs, with the model in evaluation mode."""
        raise NotImplementedError


@ATTRIBUTIONS.register("SM")
class Saliency(PointAttribution):
    r"""Saliency map (SM): the gradient of the logit, with sign (Simonyan et al., 2013; thesis, definition 4).

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> Saliency(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -1.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return _captum(CaptumSaliency(self.model), x, target, batch_size, abs=False)


@ATTRIBUTIONS.register("IxG")
class InputXGradient(PointAttribution):
    """Input times gradient (IxG) of the logit."""

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return _captum(CaptumInputXGradient(self.model), x, target, batch_size)


@ATTRIBUTIONS.register("IG")
class IntegratedGradients(PointAttribution):
    r"""Integrated gradients (IG) along the path from a baseline (Sundararajan et al., 2017; thesis, def. 5).

    .. math:: (x - b) \cdot \int_0^1 \nabla f_y(b + t (x - b))\, dt

    Does not use Captum's implementation: the weights of its ``riemann_trapezoid`` sum to 1 - 1/steps, so its
    attributions are 5 % too small with the 20 steps of the thesis, and not complete even for a linear model.  Ours are
    Captum's times 20/19.

    Args:
        model: the classifier.
        steps: number of points of the trapezoid rule.
        baseline: value of all pixels of the baseline; 0 for black.

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
    r"""SmoothGrad (SG): the mean gradient under Gaussian noise (Smilkov et al., 2017).

    .. math:: \frac 1 n \sum_i \nabla f_y(x + \delta_i), \quad \delta_i \sim N(0, \sigma^2 I)

    This is the saliency map of the smoothed model, whose logits are the mean logits under the same noise.  With much
    noise it changes slowly: for a one-layer network ReLU(Wx) and infinitely many samples (thesis, theorem 1),

    .. math:: \|A(x) - A(x')\| \le \|w_y\| \big(2 \Phi(\|x - x'\| / (2 \sigma)) - 1\big)

    Does not use Captum's ``NoiseTunnel``, which draws from the global generator, so that its result depends on the
    batch.  Here all inputs get the same noise, which depends only on the seed.  The attribution is therefore a function
    of the input, as smooth as the gradient.

    Args:
        model: the classifier.
        sigma: standard deviation of the noise.
        samples: number of noise samples per point.
        seed: seed of the noise.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> SmoothGrad(model, sigma=0.5).attribute(torch.tensor([[0.6, 0.4]])).round(decimals=3)
    tensor([[ 3., -1.]])
    """

    def __init__(self, model: nn.Module, *, sigma: float = 0.15, samples: int = 20, seed: object = 0) -> None:
        super().__init__(model)
        if not sigma > 0 or samples < 1:
            raise InputError(f"sigma, samples: expected sigma > 0 and samples >= 1, got {sigma}, {samples}")
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
    """Base class of attributions that use the closest known point across the decision boundary.

    Args:
        model: the classifier.
        search: arguments of ``boundary_search``, for calls without boundary points.
    """

    def __init__(self, model: nn.Module, **search: Any) -> None:
        super().__init__(model)
        self.search = search

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        if boundary is None:
            boundary = boundary_search(self.model, x, **{"batch_size": batch_size} | self.search)
        if boundary.x.shape != x.shape or not torch.equal(boundary.x, x):
            raise InputError("boundary: expected the boundary points of these inputs, got those of other inputs")
        if boundary.notes:
            raise InputError(boundary.notes[0])
        return boundary.x_outside


@ATTRIBUTIONS.register("BSM")
class BoundarySaliency(BoundaryAttribution):
    r"""Boundary saliency map (BSM): the gradient of the logit at the closest known point across the boundary.

    .. math:: \nabla f_y(x_{adv})

    Unlike ``BoundaryNormal``, it is not normal to the boundary (see the errata).

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> BoundarySaliency(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -1.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return mean_gradient(self.model, target, lambda point, _: start[point], x.new_ones(1), x, batch_size)


@ATTRIBUTIONS.register("BNM")
class BoundaryNormal(BoundaryAttribution):
    r"""Boundary normal map (BNM): the gradient of the margin at the closest known point across the boundary.

    .. math:: \nabla (f_y - \max_{i \ne y} f_i)(x_{adv})

    For the predicted class y it points from the boundary toward the input.  Adding the same function to all logits
    changes neither predictions nor BNM, but it changes BSM.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -1.0], [0.0, 1.0]]))
    >>> BoundaryNormal(model).attribute(torch.tensor([[0.6, 0.4]]))
    tensor([[ 3., -2.]])
    """

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        return -mean_gradient(self.model, target, lambda point, _: start[point], x.new_ones(1), x, batch_size, margin)


@ATTRIBUTIONS.register("BIG")
class BoundaryIntegratedGradients(BoundaryAttribution, IntegratedGradients):
    r"""Boundary integrated gradients (BIG): the baseline is the closest known point across the boundary.

    .. math:: (x - x_{adv}) \cdot \int_0^1 \nabla f_y(x_{adv} + t (x - x_{adv}))\, dt

    Args:
        model: the classifier.
        steps: number of points of the trapezoid rule.
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
    """Build an attribution by name.

    >>> attribution("SG", nn.Linear(2, 2), samples=5).samples
    5
    """
    member = ATTRIBUTIONS.resolve(name)
    method: PointAttribution = member.cls(model, **member.arguments, **options)
    return method


def pick(logits: Tensor, target: Tensor) -> Tensor:
    """Return the target logit of each row."""
    return logits.gather(1, target[:, None]).squeeze(1)


def logit(model: nn.Module, x: Tensor, target: Tensor, batch_size: int) -> Tensor:
    """Compute the target logit of each point."""
    with torch.no_grad():
        parts = zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True)
        return torch.cat([pick(model(part), classes) for part, classes in parts])


def convergence_delta(
    model: nn.Module, x: Tensor, attributions: Tensor, start: Tensor, target: Tensor, batch_size: int
) -> Tensor:
    """Return the sum of attributions minus the difference of the logits at the input and at the start, per point."""
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
    r"""Return a weighted mean of gradients of a logit at several places for each point.

    .. math:: \sum_k w_k \nabla f_y(\mathrm{place}_k)

    ``place`` maps indices of points and indices k to inputs; only ``batch_size`` of them are in memory at a time.
    ``like`` has the shape of the inputs.  ``score`` maps logits and targets to the quantity to differentiate.
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
    r"""Integrate the gradient along the path from a baseline b with the trapezoid rule and n steps.

    .. math:: (x - b) \cdot \sum_k w_k \nabla f_y(b + t_k (x - b)), \quad t_k = \frac k {n - 1}

    The weights are 1/(n - 1), and half of that at both ends; exact if the gradient is linear along the path.
    """
    check_count(2, steps=steps)
    t = torch.linspace(0, 1, steps, dtype=x.dtype, device=x.device)
    weights = torch.full_like(t, 1 / (steps - 1))
    weights[0] /= 2
    weights[-1] /= 2
    path = x - baseline

    def place(point: Tensor, k: Tensor) -> Tensor:
        return torch.addcmul(baseline[point], per_point(t[k], x), path[point])

    return path * mean_gradient(model, target, place, weights, x, batch_size)


def _captum(method: Any, x: Tensor, target: Tensor, batch_size: int, **options: Any) -> Tensor:
    """Run a Captum method in batches, on copies of the inputs because it changes their ``requires_grad``."""
    parts = zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True)
    maps = [method.attribute(part.clone().requires_grad_(), target=y, **options).detach() for part, y in parts]
    return torch.cat(maps)


def check_inputs(inputs: Tensor) -> Tensor:
    """Return detached inputs; raises an InputError unless they are a batch of finite floats."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2 or not len(inputs):
        got = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(f"inputs: expected a tensor of floats, (points, ...), got {got}")
    if not inputs.isfinite().all():
        raise InputError("inputs: expected finite numbers, got NaN or infinity")
    return inputs.detach()


def resolve_target(model: nn.Module, x: Tensor, target: Target, batch_size: int) -> Tensor:
    """Return one class per input; the predicted classes if ``target`` is None."""
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
