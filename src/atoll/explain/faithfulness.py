"""Faithfulness and stability of attributions: infidelity, completeness gap and local sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.attributions import (
    BoundaryAttribution,
    PointAttribution,
    Target,
    check_inputs,
    convergence_delta,
    logit,
    resolve_target,
)
from atoll.explain.boundary import BoundaryPoints, boundary_search, content_index
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import Bounds, Norm, ThreatModel, dot, per_point


@dataclass(frozen=True)
class Infidelity:
    """Infidelity (INFD) of each point, for the attribution itself and ``scaled`` by the best factor ``scale``."""

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
    r"""Estimate how badly an attribution predicts the effect of noise on the logit (Yeh et al., 2019; thesis, def. 8).

    .. math:: E_\epsilon\big[A \cdot \epsilon - (f_y(x + \epsilon) - f_y(x))\big]^2, \epsilon \sim N(0, \sigma^2 I)

    Attributions that are not gradients (IG, BIG, IxG) have a different unit, so the result also contains the smallest
    INFD of any multiple of the attribution.  The factor is fitted to the same samples, and INFD is corrected for that.

    Args:
        model: maps inputs to logits.
        inputs: ``(points, ...)``.
        attributions: A, of the same shape.
        target: y; the predicted classes if None.
        sigma: standard deviation of the noise.
        samples: number of noise samples per point.
        batch_size: number of rows per forward pass.
        seed: seed of the noise, which also depends on the values of the input.

    >>> model = nn.Linear(3, 2).double()
    >>> x = torch.rand(2, 3, dtype=torch.float64)
    >>> weights = model.weight.detach()[1].expand(2, 3)
    >>> result = infidelity(model, x, 2 * weights, 1)
    >>> bool((result.value > 0).all()), bool((result.scaled < 1e-20).all()), result.scale.round(decimals=6)
    (True, True, tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    options: dict[str, Any] = {"sigma": sigma, "samples": samples, "batch_size": batch_size, "seed": seed}
    return infidelities(model, inputs, [attributions], target, **options)[0]


def infidelities(
    model: nn.Module,
    inputs: Tensor,
    attributions: Sequence[Tensor],
    target: Target = None,
    *,
    sigma: float = 0.1,
    samples: int = 100,
    batch_size: int = 256,
    seed: object = 0,
) -> list[Infidelity]:
    """Estimate the infidelity of several attributions with the same passes of the model; see ``infidelity``."""
    x = check_inputs(inputs)
    for values in attributions:
        _same_shape(values, x)
    if not 0 < sigma < math.inf or samples < 3 or batch_size < 1:
        raise InputError(
            "sigma, samples, batch_size: expected a number > 0, at least 3, at least 1,"
            f" got {sigma}, {samples}, {batch_size}"
        )
    explained = x.new_empty(len(attributions), len(x), samples, dtype=torch.float64)
    changed, index = x.new_empty(len(x), samples, dtype=torch.float64), content_index(x)
    with evaluation_mode(model):
        classes = resolve_target(model, x, target, batch_size)
        clean = logit(model, x, classes, batch_size).double()
        for chunk in torch.split(torch.arange(changed.numel(), device=x.device), batch_size):
            point, draw = chunk // samples, chunk % samples
            noise = sigma * PointRNG(seed, "infidelity", index=index[point] + draw).normal(*x.shape[1:], dtype=x.dtype)
            for number, values in enumerate(attributions):
                explained[number, point, draw] = dot(values[point].double(), noise.double())
            after = logit(model, x[point] + noise, classes[point], batch_size).double()
            changed[point, draw] = after - clean[point]
    return [_summarize(each, changed) for each in explained]


def _summarize(explained: Tensor, changed: Tensor) -> Infidelity:
    """Compare the changes that an attribution explains with those of the logit, both ``(points, samples)``."""
    samples = changed.shape[1]
    scale = (explained * changed).sum(1) / explained.square().sum(1).clamp_min(1e-300)
    plain = (explained - changed).square()
    # Correct for one parameter that was fitted to the samples.
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
    r"""Return :math:`\sum_j A_j - (f_y(x) - f_y(b))` for each point, which is 0 for a complete attribution.

    >>> model, x = nn.Linear(3, 2), torch.rand(2, 3)
    >>> bool((completeness_gap(model, x, x * model.weight.detach()[1], 0 * x, 1).abs() < 1e-6).all())
    True
    """
    x, start = check_inputs(inputs), check_inputs(baseline)
    _same_shape(attributions, x)
    _same_shape(start, x)
    with evaluation_mode(model):
        classes = resolve_target(model, x, target, batch_size)
        return convergence_delta(model, x, attributions, start, classes, batch_size)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the l2 distance of two attributions for each point, such as SM and BSM, or IG and BIG (thesis, table 3.1).

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
    """Compute attributions; NaN for inputs without a boundary point if the method needs one."""
    if not isinstance(method, BoundaryAttribution):
        maps: Tensor = method.attribute(x, target, internal_batch_size=batch_size)
        return maps
    if boundary is None:
        boundary = boundary_search(method.model, x, **method.search)
    possible, result = boundary.success, torch.full_like(x, math.nan)
    if possible.any():
        result[possible] = method.attribute(
            x[possible], target[possible], boundary=boundary[possible], internal_batch_size=batch_size
        )
    return result


@dataclass(frozen=True)
class AttributionSensitivity:
    """The largest ratio for each point, and the input that attains it, which proves the lower bound."""

    value: Tensor
    at: Tensor


def attribution_lipschitz(
    method: PointAttribution,
    inputs: Tensor,
    target: Target = None,
    *,
    eps: float,
    norm: Norm = "l2",
    bounds: Bounds | None = (0.0, 1.0),
    starts: int = 4,
    steps: int = 20,
    seed: object = 0,
) -> AttributionSensitivity:
    r"""Estimate how fast an attribution changes near an input: a lower bound of its Lipschitz constant in a ball.

    .. math:: \max_{\|x' - x\| \le \epsilon} \frac{\|A(x') - A(x)\|}{\|x' - x\|}

    This is the smallest lambda for which the attribution is (lambda, eps)-locally robust (thesis, definition 12, with
    its premise corrected; see the errata).  Gradients of ReLU networks are constant almost everywhere, so the search
    does not use them: from several random starts at distances between eps / 100 and eps, it proposes random moves and
    accepts those that increase the ratio.  The result is a proven lower bound, but not an upper bound.

    Costs ``1 + starts (1 + steps)`` attributions.

    Args:
        method: the attribution method.
        inputs: ``(points, ...)``.
        target: the classes to explain; the predictions at the inputs if None.
        eps: radius of the ball.
        norm: norm of both distances.
        bounds: valid range of inputs.
        starts: number of random starts.
        steps: number of moves per start.
        seed: seed of starts and moves, which also depend on the values of the input.
    """
    x = check_inputs(inputs)
    threat = ThreatModel(norm, eps, bounds)
    threat.check(x)
    if threat.radius <= 0 or starts < 1 or steps < 0:
        raise InputError(f"eps, starts, steps: expected eps > 0, starts >= 1, steps >= 0, got {eps}, {starts}, {steps}")
    classes = resolve_target(method.model, x, target, len(x))
    here, index = explain_where_possible(method, x, classes), content_index(x)

    def ratio(there: Tensor) -> Tensor:
        change = threat.size(explain_where_possible(method, there, classes) - here)
        return torch.nan_to_num(change / threat.distance(there, x).clamp_min(1e-12), nan=0.0)

    best, at = torch.zeros_like(x.flatten(1)[:, 0]), x.clone()
    for number in range(starts):
        streams = PointRNG(seed, "lipschitz", number, index=index)
        reach = 10 ** (-2 * streams.uniform(dtype=x.dtype))
        place = threat.clamp(x + per_point(reach, x) * (threat.random_start(x, streams) - x))
        value, move = ratio(place), reach * threat.radius
        for _ in range(steps):
            noise = threat.steepest(streams.normal(*x.shape[1:], dtype=x.dtype), sparsity=0.0)
            candidate = threat.project(place + per_point(move, x) * noise, x)
            there = ratio(candidate)
            improved = there > value
            place, value = torch.where(per_point(improved, x), candidate, place), torch.where(improved, there, value)
            # As in evolution strategies: longer moves after a success, shorter moves after a failure.
            move = (move * torch.where(improved, 1.5, 0.85).to(x)).clamp(1e-4 * threat.radius, threat.radius)
        better = value > best
        best, at = torch.where(better, value, best), torch.where(per_point(better, x), place, at)
    return AttributionSensitivity(best, at)


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(f"attributions: expected the shape {tuple(b.shape)}, got {tuple(a.shape)}")
