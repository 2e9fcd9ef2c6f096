"""Whether an attribution says what the model does, and how stable it is: infidelity, completeness, sensitivity."""

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
from atoll.threat import Bounds, Norm, ThreatModel, dot, per_point


@dataclass(frozen=True)
class Infidelity:
    """INFD of each point, of the attribution as it is and ``scaled``: times the ``scale`` that makes INFD smallest."""

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


@dataclass(frozen=True)
class AttributionSensitivity:
    """For each point the largest ratio, and where: pairs that prove that the constant is not smaller."""

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
    r"""How much an attribution can change near an input: a lower bound of its Lipschitz constant in a ball.

    .. math:: \max_{\|x' - x\| \le \epsilon} \frac{\|A(x') - A(x)\|}{\|x' - x\|}

    That is the smallest lambda for which the attribution is (lambda, eps)-locally robust (thesis, definition 12, with
    its premise corrected: see the errata).  Gradients of ReLU nets are constant almost everywhere, so the ascent takes
    none: from several random starts at distances between eps and eps / 100 it moves at random, and stays where the
    ratio is larger.  Any point it finds is a proof that the constant is not smaller; that it is no larger is not known.

    Costs ``1 + starts (1 + steps)`` attributions.

    Args:
        method: the attribution, of its model.
        inputs: ``(points, ...)``.
        target: the classes of interest; those predicted at the inputs if None.
        eps: radius of the ball.
        norm: of both distances.
        bounds: valid range of inputs.
        starts: random starts.
        steps: moves from each of them.
        seed: of starts and moves, which depend on the input's numbers.
    """
    x = checked(inputs)
    threat = ThreatModel(norm, eps, bounds)
    threat.check(x)
    if threat.radius <= 0 or starts < 1 or steps < 0:
        raise InputError(f"eps, starts, steps: expected more than 0, at least 1 and 0, got {eps}, {starts}, {steps}")
    classes = checked_target(method.model, x, target, len(x))
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
            risen = there > value
            place, value = torch.where(per_point(risen, x), candidate, place), torch.where(risen, there, value)
            # As in evolution strategies: longer moves after a success, shorter ones after a failure.
            move = (move * torch.where(risen, 1.5, 0.85).to(x)).clamp(1e-4 * threat.radius, threat.radius)
        better = value > best
        best, at = torch.where(better, value, best), torch.where(per_point(better, x), place, at)
    return AttributionSensitivity(best, at)


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(f"attributions: expected the shape {tuple(b.shape)}, got {tuple(a.shape)}")
