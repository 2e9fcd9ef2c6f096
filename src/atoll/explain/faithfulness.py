"""Whether an attribution says what the model does: infidelity, completeness, and distances between attributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.attributions import (
    BoundaryAttribution,
    PointAttribution,
    Target,
    checked,
    checked_target,
    convergence_delta,
    logit,
)
from atoll.explain.boundary import BoundaryPoints, boundary_search, content_index
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import dot


@dataclass(frozen=True)
class Infidelity:
    """INFD of each point, as the attribution is and at its best scale.

    Args:
        value: INFD.
        standard_error: of each value.
        scale: the factor that makes INFD smallest.
        scaled: INFD of the attribution times this factor.
        scaled_standard_error: of each of these.
    """

    value: Tensor
    standard_error: Tensor
    scale: Tensor
    scaled: Tensor
    scaled_standard_error: Tensor


def infidelity(
    model: nn.Module,
    inputs: Tensor,
    attributions: Tensor,
    target: Target = None,
    *,
    sigma: float = 0.1,
    samples: int = 100,
    batch_size: int = 256,
    seed: object = 0,
) -> Infidelity:
    r"""How far the attribution is from explaining what noise does to the logit (Yeh et al., 2019; thesis, def. 8).

    .. math:: E_\epsilon\big[A \cdot \epsilon - (f_y(x + \epsilon) - f_y(x))\big]^2, \epsilon \sim N(0, \sigma^2 I)

    Attributions that are not gradients (IG, BIG, IxG) have another unit, so the smallest INFD that a multiple of the
    attribution has is also given.  It is fitted to the same draws, and corrected for that.

    Args:
        model: any module from inputs to logits.
        inputs: ``(points, ...)``.
        attributions: A, of the same shape.
        target: y; the predicted classes if None.
        sigma: of the noise.
        samples: draws for each point.
        batch_size: rows that go through the model together.
        seed: of the noise, which depends on the input's numbers.

    >>> model = nn.Linear(3, 2).double()
    >>> x = torch.rand(2, 3, dtype=torch.float64)
    >>> weights = model.weight.detach()[1].expand(2, 3)
    >>> result = infidelity(model, x, 2 * weights, 1)
    >>> bool((result.value > 0).all()), bool((result.scaled < 1e-20).all()), result.scale.round(decimals=6)
    (True, True, tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    x = checked(inputs)
    _same_shape(attributions, x)
    if not 0 < sigma < math.inf or samples < 3 or batch_size < 1:
        raise InputError(
            "sigma, samples, batch_size: expected a number > 0, at least 3, at least 1,"
            f" got {sigma}, {samples}, {batch_size}"
        )
    explained = x.new_empty(len(x), samples, dtype=torch.float64)
    changed, index = torch.empty_like(explained), content_index(x)
    with evaluation_mode(model):
        classes = checked_target(model, x, target, batch_size)
        clean = logit(model, x, classes, batch_size).double()
        for chunk in torch.split(torch.arange(explained.numel(), device=x.device), batch_size):
            point, draw = chunk // samples, chunk % samples
            noise = sigma * PointRNG(seed, "infidelity", index=index[point] + draw).normal(*x.shape[1:], dtype=x.dtype)
            explained[point, draw] = dot(attributions[point].double(), noise.double())
            after = logit(model, x[point] + noise, classes[point], batch_size).double()
            changed[point, draw] = after - clean[point]
    scale = (explained * changed).sum(1) / explained.square().sum(1).clamp_min(1e-300)
    plain = (explained - changed).square()
    # One parameter was fitted to the draws.
    fitted = (scale[:, None] * explained - changed).square() * samples / (samples - 1)
    root = math.sqrt(samples)
    return Infidelity(plain.mean(1), plain.std(1) / root, scale, fitted.mean(1), fitted.std(1) / root)


def completeness_gap(
    model: nn.Module,
    inputs: Tensor,
    attributions: Tensor,
    baseline: Tensor,
    target: Target = None,
    *,
    batch_size: int = 256,
) -> Tensor:
    r"""For each point :math:`\sum_j A_j - (f_y(x) - f_y(b))`, which is 0 for a complete attribution.

    >>> model, x = nn.Linear(3, 2), torch.rand(2, 3)
    >>> bool((completeness_gap(model, x, x * model.weight.detach()[1], 0 * x, 1).abs() < 1e-6).all())
    True
    """
    x, start = checked(inputs), checked(baseline)
    _same_shape(attributions, x)
    _same_shape(start, x)
    with evaluation_mode(model):
        classes = checked_target(model, x, target, batch_size)
        return convergence_delta(model, x, attributions, start, classes, batch_size)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """The l2 distance of two attributions for each point: SM to BSM, IG to BIG (thesis, table 3.1).

    >>> distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))
    tensor([5.])
    """
    _same_shape(a, b)
    norms: Tensor = torch.linalg.vector_norm((a - b).flatten(1), dim=1)
    return norms


def explain_where_possible(
    method: PointAttribution,
    x: Tensor,
    target: Tensor,
    boundary: BoundaryPoints | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Attributions, NaN at inputs that have no boundary point where the method needs one."""
    if not isinstance(method, BoundaryAttribution):
        maps: Tensor = method.attribute(x, target, internal_batch_size=batch_size)
        return maps
    if boundary is None:
        boundary = boundary_search(method.model, x, **method.search)
    possible, whole = boundary.success, torch.full_like(x, math.nan)
    if possible.any():
        whole[possible] = method.attribute(
            x[possible], target[possible], boundary=boundary[possible], internal_batch_size=batch_size
        )
    return whole


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(f"attributions: expected the shape {tuple(b.shape)}, got {tuple(a.shape)}")
