"""Attributions of points together with their boundary points, faithfulness and locality."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from atoll.attacks.evaluate import automatic_batch_size
from atoll.explain.attributions import (
    ATTRIBUTIONS,
    STANDARD,
    BoundaryAttribution,
    PointAttribution,
    attribution,
    check_inputs,
)
from atoll.explain.boundary import BUDGET, BoundaryPoints, boundary_search
from atoll.explain.faithfulness import (
    Infidelity,
    attribution_lipschitz,
    completeness_gap,
    distance,
    explain_where_possible,
    infidelities,
)
from atoll.explain.locality import Locality, locality, usable
from atoll.explain.sanity import SanityCheck, sanity_check
from atoll.measure import OnProgress
from atoll.modules import evaluation_mode
from atoll.threat import Bounds, Norm

PAIRS = (("SM", "BSM"), ("IG", "BIG"))  # attributions and their counterparts at the boundary (thesis, table 3.1)
# Short, because Lipschitz estimates of boundary attributions need a boundary search at every step.
LIPSCHITZ: dict[str, Any] = {"starts": 2, "steps": 5}
COMPARISONS = 12  # of the sanity check; deep networks have hundreds of layers
CHECK_BUDGET = 100  # budget of boundary searches in checks
LARGEST_BATCH = 256


@dataclass(frozen=True)
class AttributionMetrics:
    """One attribution method at all points; None for metrics that were not requested or are not defined."""

    attributions: Tensor  # NaN for inputs without a boundary point if the method needs one
    infidelity: Infidelity
    gap: Tensor | None  # completeness gap of each point, for path attributions
    sanity: SanityCheck | None
    sensitivity: Tensor | None  # lower bound of the local Lipschitz constant of each point
    locality: Locality | None  # locality of the points with usable boxes


@dataclass(frozen=True)
class Explanation:
    """The explanations of a set of points."""

    x: Tensor
    target: Tensor
    boundary: BoundaryPoints
    methods: dict[str, AttributionMetrics]

    @property
    def distances(self) -> dict[str, Tensor]:
        """Distance of attributions from their counterparts at the boundary, for each point."""
        maps = {name: method.attributions for name, method in self.methods.items()}
        return {f"{a}-{b}": distance(maps[a], maps[b]) for a, b in PAIRS if a in maps and b in maps}


def explain(
    model: nn.Module,
    inputs: Tensor,
    *,
    methods: Sequence[str] = STANDARD,
    pool: Tensor | None = None,
    boxes: Tensor | None = None,
    norm: Norm = "l2",
    budget: int | None = None,
    bounds: Bounds | None = (0.0, 1.0),
    sigma: float = 0.1,
    samples: int = 100,
    eps: float = 0.1,
    check_points: int = 16,
    batch_size: int | None = None,
    seed: object = 0,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Compute attributions of the predicted classes and measure their faithfulness, with one boundary search for all.

    Args:
        model: maps inputs to logits.
        inputs: ``(points, ...)``.
        methods: names as in ``atoll ls attributions``, dotted paths, or files such as ``my_map.py:Mine``.
        pool: examples from which the boundary search starts.
        boxes: bounding boxes of the objects, for locality; images with an unknown or too large box are skipped.
        norm: norm of the boundary search.
        budget: model calls per point for the boundary search (default: 400).
        bounds: valid range of inputs.
        sigma: standard deviation of the noise of INFD.
        samples: number of noise samples per point.
        eps: l2 radius of the Lipschitz estimates.
        check_points: number of points for the sanity check and the local sensitivity, which cost the most; 0 skips
            both.  Their boundary searches are limited to 100 calls.
        batch_size: number of rows per forward pass (default: chosen to fit memory).
        seed: seed of all noise.
        on_progress: called with the name of the current task, the units done, and the total.

    >>> import torch
    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> x = torch.tensor([[0.6, 0.4], [0.1, 0.9]], dtype=torch.float64)
    >>> result = explain(model, x, methods=["SM", "BSM"], check_points=0)
    >>> result.methods["SM"].infidelity.value.max().item() < 1e-20, result.distances["SM-BSM"].tolist()
    (True, [0.0, 0.0])
    """
    x = check_inputs(inputs)
    report = on_progress or (lambda what, done, total: None)
    with evaluation_mode(model):
        batch_size = batch_size or automatic_batch_size(model, x, largest=LARGEST_BATCH)
    search: dict[str, Any] = {"norm": norm, "bounds": bounds, "seed": seed, "batch_size": batch_size}
    boundary = boundary_search(model, x, **search, budget=budget or BUDGET, pool=pool, on_progress=report)
    target, few = boundary.prediction, slice(0, check_points)
    # The checks repeat boundary searches many times, so they use fewer calls and no pool, whose predictions would cost
    # more than the searches.
    search |= {"pool": x[few] if check_points else None, "budget": min(budget or CHECK_BUDGET, CHECK_BUDGET)}
    make = {name: partial(_build, name, search=search, seed=seed) for name in methods}
    maps, metrics, count, total = {}, {}, len(methods), 2 * len(methods) + 1
    for number, name in enumerate(methods):
        report(name, number, total)
        maps[name] = explain_where_possible(make[name](model), x, target, boundary, batch_size)
    report("infidelity", count, total)
    faithfulness = infidelities(
        model, x, [*maps.values()], target, sigma=sigma, samples=samples, batch_size=batch_size, seed=seed
    )
    for number, (name, values) in enumerate(maps.items()):
        method, sanity, sensitivity = make[name](model), None, None
        if check_points:
            report(f"{name}: sanity check", count + 1 + number, total)
            sanity = sanity_check(make[name], model, x[few], target[few], comparisons=COMPARISONS, seed=seed)
            report(f"{name}: local sensitivity", count + 1 + number, total)
            sensitivity = attribution_lipschitz(
                method, x[few], target[few], eps=eps, bounds=bounds, seed=seed, **LIPSCHITZ
            ).value
        metrics[name] = AttributionMetrics(
            attributions=values,
            infidelity=faithfulness[number],
            gap=_gap(method, x, values, boundary, target, batch_size),
            sanity=sanity,
            sensitivity=sensitivity,
            locality=_locality(values, boxes),
        )
    report("done", total, total)
    return Explanation(x, target, boundary, metrics)


def _build(name: str, model: nn.Module, *, search: dict[str, Any], seed: object) -> PointAttribution:
    """Build an attribution with the arguments that it accepts: those of the boundary search, or a seed."""
    cls = ATTRIBUTIONS.resolve(name).cls
    if issubclass(cls, BoundaryAttribution):
        return attribution(name, model, **search)
    return attribution(name, model, **({"seed": seed} if "seed" in inspect.signature(cls).parameters else {}))


def _gap(
    method: PointAttribution, x: Tensor, maps: Tensor, boundary: BoundaryPoints, target: Tensor, batch_size: int
) -> Tensor | None:
    if not method.has_convergence_delta():
        return None
    start = boundary.x_outside if isinstance(method, BoundaryAttribution) else method.start(x, batch_size, None)
    return completeness_gap(method.model, x, maps, start, target, batch_size=batch_size)


def _locality(maps: Tensor, boxes: Tensor | None) -> Locality | None:
    if boxes is None:
        return None
    rows = usable(boxes, tuple(maps.shape)) & ~maps.flatten(1).isnan().any(1).cpu()
    return locality(maps.cpu()[rows], boxes[rows]) if rows.any() else None
