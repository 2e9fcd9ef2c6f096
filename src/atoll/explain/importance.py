"""Importance of single features and alignment of models (thesis, definitions 1 and 2), by Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_range
from atoll.explain.attributions import Target, check_inputs, resolve_target
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, content_hash
from atoll.stats import Estimate
from atoll.threat import Bounds

Neighborhood = Literal["pointwise", "local", "global"]
Output = Literal["probability", "logit"]


@dataclass(frozen=True)
class Importance:
    """The importance of every feature of every input, with its standard error, which is 0 if it is exact."""

    x: Tensor
    value: Tensor
    standard_error: Tensor

    def important(self, rho: float) -> Tensor:
        """Return which features are rho-important."""
        return self.value >= rho

    def uncertain(self, rho: float, errors: float = 2.0) -> Tensor:
        """Return which features are uncertain, because they are within a number of standard errors of rho."""
        return (self.value - rho).abs() < errors * self.standard_error


def rho_importance(
    model: nn.Module,
    inputs: Tensor,
    target: Target = None,
    *,
    neighborhood: Neighborhood = "local",
    sigma: float = 0.1,
    output: Output = "probability",
    samples: int = 100,
    bounds: Bounds = (0.0, 1.0),
    batch_size: int = 1024,
    seed: object = 0,
) -> Importance:
    r"""Estimate how each feature correlates with the output while all others are fixed (definition 1).

    .. math:: E_{\epsilon \sim N}\big[(x_j + \epsilon)\, f_y(x_1, \dots, x_j + \epsilon, \dots, x_d)\big]

    Only for small inputs, because it takes a forward pass for every feature and sample.

    Args:
        model: maps inputs to logits.
        inputs: ``(points, ...)``.
        target: y; the predicted classes if None.
        neighborhood: the distribution N: ``pointwise`` (no noise, exact), ``local`` (normal with standard deviation
            sigma) or ``global`` (the feature is uniform within the bounds).
        sigma: standard deviation of the local noise.
        output: f is the probability of y, which is comparable between models, or its logit.
        samples: number of noise samples per feature.
        bounds: bounds of the global distribution.
        batch_size: number of rows per forward pass.
        seed: seed of the noise, which also depends on the values of the input and on the feature.

    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> x = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    >>> rho_importance(model, x, 0, neighborhood="pointwise", output="logit").value  # x_j f_0(x)
    tensor([[0.5000, 0.2500]], dtype=torch.float64)
    """
    x = check_inputs(inputs)
    if neighborhood not in ("pointwise", "local", "global"):
        raise InputError(f"neighborhood: expected pointwise, local or global, got {neighborhood!r}")
    if output not in ("probability", "logit"):
        raise InputError(f"output: expected probability or logit, got {output!r}")
    if samples < 2 or batch_size < 1:
        raise InputError(f"samples, batch_size: expected at least 2 and 1, got {samples}, {batch_size}")
    check_range("(0, inf)", sigma=sigma)
    value, error = torch.empty_like(x), torch.zeros_like(x)
    with evaluation_mode(model), torch.no_grad():
        classes = resolve_target(model, x, target, batch_size)
        for row, point in enumerate(x):
            features = torch.arange(point.numel(), device=x.device)
            streams = PointRNG(seed, "importance", neighborhood, content_hash(point), index=features)
            drawn = point.flatten()[:, None]
            if neighborhood == "local":
                drawn = drawn + sigma * streams.normal(samples, dtype=x.dtype)
            elif neighborhood == "global":
                drawn = bounds[0] + (bounds[1] - bounds[0]) * streams.uniform(samples, dtype=x.dtype)
            outcome = drawn * _outputs(model, point, drawn, int(classes[row]), output, batch_size)
            value[row] = outcome.mean(1).view_as(point)
            if neighborhood != "pointwise":
                error[row] = (outcome.std(1) / math.sqrt(samples)).view_as(point)
    return Importance(x, value, error)


def _outputs(model: nn.Module, point: Tensor, drawn: Tensor, y: int, output: Output, batch_size: int) -> Tensor:
    """Return the output for every feature and every value of it."""
    outputs = []
    for chunk in torch.split(torch.arange(drawn.numel(), device=point.device), batch_size):
        feature = chunk // drawn.shape[1]
        rows = point.flatten().repeat(len(chunk), 1).scatter(1, feature[:, None], drawn.flatten()[chunk, None])
        logits = model(rows.view(-1, *point.shape))
        outputs.append((logits if output == "logit" else logits.softmax(1))[:, y])
    return torch.cat(outputs).view_as(drawn)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two vectors for each point, 1 if both are zero; in [0, 1] for non-negative inputs."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    sizes = torch.stack([a.norm(dim=1), b.norm(dim=1)])
    return torch.where((sizes == 0).all(0), 1.0, (a * b).sum(1) / sizes.prod(0).clamp_min(1e-300))


@dataclass(frozen=True)
class Alignment:
    """Similarity of the important features of two functions, for each point."""

    similarity: Tensor

    @property
    def mean(self) -> Estimate:
        return Estimate.mean_of(self.similarity)

    def aligned(self, lambda_: float) -> bool:
        """Whether the mean is at least lambda."""
        return self.mean.value >= lambda_


def alignment(
    x: Tensor, important: Tensor, reference: Tensor, *, similarity: Callable[[Tensor, Tensor], Tensor] = cosine
) -> Alignment:
    r"""Compare the important features of f with those of a reference f* (definition 2).

    .. math:: \mathrm{similarity}(x \cdot 1[x_j\ \text{important to}\ f^*],\ x \cdot 1[x_j\ \text{important to}\ f])

    f is :math:`(\rho, \lambda)`-aligned with f* if the mean of this over the data is at least lambda.

    Args:
        x: inputs.
        important: which features are rho-important to f (``Importance.important``).
        reference: the same for f*, such as another model or a mask of the object.
        similarity: similarity of two vectors, in [0, 1].

    >>> x = torch.tensor([[3.0, 4.0, 0.0]])
    >>> yes, no = torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])
    >>> str(alignment(x, yes, yes).mean.value), round(float(alignment(x, yes, no).similarity), 2)
    ('1.0', 0.6)
    """
    for name, mask in (("important", important), ("reference", reference)):
        if mask.shape != x.shape or mask.dtype != torch.bool:
            raise InputError(f"{name}: expected a mask of shape {tuple(x.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    return Alignment(similarity(x * reference, x * important))
