"""Attributions by name: what a classifier looks at, pixel by pixel."""

from __future__ import annotations

from typing import Any

import torch
from captum.attr import InputXGradient as CaptumInputXGradient
from captum.attr import Saliency as CaptumSaliency
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.boundary import BoundaryPoints
from atoll.explain.gradients import ATTRIBUTIONS, PointAttribution, mean_gradient
from atoll.explain.path import STEPS, path_gradient
from atoll.rng import PointRNG


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
    >>> found, delta = IntegratedGradients(model).attribute(torch.tensor([[0.5, 0.5]]), return_convergence_delta=True)
    >>> found, bool(delta.abs() < 1e-6)
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

    Not Captum's ``NoiseTunnel``: that draws from the global generator, so its result would depend on the batch.  Here
    all inputs see the same noise, which depends on the seed alone: so the attribution is a function of the input, and
    as smooth as the gradient is.

    Args:
        model: the classifier.
        sigma: standard deviation of the noise.
        samples: draws for each point.
        seed: of the noise.
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


def _captum(method: Any, x: Tensor, target: Tensor, batch_size: int, **options: Any) -> Tensor:
    """A method of Captum's, a batch at a time, on inputs of its own: it sets and unsets their ``requires_grad``."""
    found: list[Tensor] = []
    for part, classes in zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True):
        found.append(method.attribute(part.clone().requires_grad_(), target=classes, **options).detach())
    return torch.cat(found)


# The columns of the tables, in order.
STANDARD = ("SM", "IxG", "IG", "SG", "BSM", "BIG")


def attribution(name: str, model: nn.Module, **options: Any) -> PointAttribution:
    """An attribution by its name in the tables.

    >>> attribution("SG", nn.Linear(2, 2), samples=5).samples
    5
    """
    member = ATTRIBUTIONS.resolve(name)
    method: PointAttribution = member.cls(model, **member.arguments, **options)
    return method
