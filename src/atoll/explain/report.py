"""Everything that is known about the explanations of some points: attributions, boundary, faithfulness, locality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from atoll.explain.attributions import STANDARD, SmoothGrad
from atoll.explain.boundary import BoundaryPoints, boundary_search
from atoll.explain.boundary_attributions import (
    BoundaryAttribution,
    BoundaryIntegratedGradients,
    BoundarySaliency,
)
from atoll.explain.faithfulness import Infidelity, completeness_gap, distance, explain_where_possible, infidelity
from atoll.explain.gradients import ATTRIBUTIONS, PointAttribution, checked, checked_target
from atoll.explain.lipschitz import attribution_lipschitz
from atoll.explain.locality import Locality, locality, usable
from atoll.explain.sanity import SanityCheck, sanity_check
from atoll.modules import evaluation_mode
from atoll.stats import Estimate
from atoll.threat import Bounds, Norm

PAIRS = (("SM", "BSM"), ("IG", "BIG"))  # attributions and their counterparts at the boundary (thesis, table 3.1)
# Lipschitz estimates of boundary attributions take a boundary search at every place they look at.
LIPSCHITZ: dict[str, Any] = {"starts": 2, "steps": 5}
CHECK_BUDGET = 100  # of the searches of checks

Report = Callable[[str, float, int], None]


@dataclass(frozen=True)
class AttributionMetrics:
    """One attribution at all points; what was not asked for, or has no meaning, is None.

    Args:
        attributions: of the inputs' shape; NaN at inputs without a boundary point where the method needs one.
        infidelity: INFD, plain and at the best scale.
        gap: completeness gap of each point, for attributions along paths.
        sanity: rank correlations under randomised layers.
        lipschitz: for each point, a lower bound.
        locality: of the points with usable boxes.
    """

    attributions: Tensor
    infidelity: Infidelity
    gap: Tensor | None
    sanity: SanityCheck | None
    lipschitz: Tensor | None
    locality: Locality | None

    def to_json(self) -> dict[str, Any]:
        undefined = int(self.attributions.flatten(1).isnan().any(1).sum())
        found: dict[str, Any] = {"undefined": undefined, "infidelity": self.infidelity.to_json()}
        if self.gap is not None:
            found["completeness_gap"] = Estimate.mean_of(self.gap.abs()).to_json()
        if self.sanity is not None:
            found["sanity"] = self.sanity.to_json()
        if self.lipschitz is not None:
            found["lipschitz_at_least"] = Estimate.mean_of(self.lipschitz).to_json()
        if self.locality is not None:
            found["locality"] = self.locality.to_json()
        return found


@dataclass(frozen=True)
class Explanation:
    """The explanations of some points, and what is known about them."""

    x: Tensor
    target: Tensor
    boundary: BoundaryPoints
    methods: dict[str, AttributionMetrics]

    @property
    def distances(self) -> dict[str, Tensor]:
        """How far attributions are from their counterparts at the boundary, for each point."""
        maps = {name: method.attributions for name, method in self.methods.items()}
        return {f"{a}-{b}": distance(maps[a], maps[b]) for a, b in PAIRS if a in maps and b in maps}

    def to_json(self) -> dict[str, Any]:
        return {
            "boundary": self.boundary.to_json(),
            "methods": {name: method.to_json() for name, method in self.methods.items()},
            "distances": {name: Estimate.mean_of(values).to_json() for name, values in self.distances.items()},
        }


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
    batch_size: int = 256,
    seed: object = 0,
    on_progress: Report | None = None,
) -> Explanation:
    """Attributions of the predicted classes, and how faithful they are; one boundary search serves all.

    Args:
        model: any module from inputs to logits.
        inputs: ``(points, ...)``.
        methods: names out of ``atoll ls attributions``.
        pool: examples that the boundary search starts from.
        boxes: of the objects, for locality; images whose box is unknown or too large are left out of it.
        norm: of the boundary search.
        budget: of the boundary search, in model calls per point.
        bounds: valid range of inputs.
        sigma: of the noise of INFD.
        samples: draws of it for each point.
        eps: radius (l2) of the ball of the Lipschitz estimates.
        check_points: how many points the sanity check and the Lipschitz estimates take, which cost most; 0 for none.
            Their boundary searches make do with 100 calls.
        batch_size: rows that go through the model together.
        seed: of all noise.
        on_progress: called now and then with what is done, how much of it, and of how much.

    >>> import torch
    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> x = torch.tensor([[0.6, 0.4], [0.1, 0.9]], dtype=torch.float64)
    >>> found = explain(model, x, methods=["SM", "BSM"], check_points=0)
    >>> found.methods["SM"].infidelity.value.max().item() < 1e-20, found.distances["SM-BSM"].tolist()
    (True, [0.0, 0.0])
    """
    x = checked(inputs)
    report = on_progress or (lambda what, done, total: None)
    search: dict[str, Any] = {"norm": norm, "budget": budget, "bounds": bounds, "seed": seed, "batch_size": batch_size}
    boundary = boundary_search(model, x, **search, pool=pool, on_progress=report)
    with evaluation_mode(model):
        target = checked_target(model, x, None, batch_size)
    few = slice(0, check_points)
    # The checks search boundaries again and again: with fewer calls, and without a pool, whose predictions would cost
    # more than the searches.
    search |= {"pool": x[few] if check_points else None, "budget": min(budget or CHECK_BUDGET, CHECK_BUDGET)}
    found = {}
    for number, name in enumerate(methods):
        report(name, number, len(methods))
        make = partial(_build, name, search=search, seed=seed)
        method, sanity, lipschitz = make(model), None, None
        maps = explain_where_possible(method, x, target, boundary, batch_size)
        if check_points:
            report(f"{name}: sanity check", number, len(methods))
            sanity = sanity_check(make, model, x[few], target[few], seed=seed)
            report(f"{name}: Lipschitz estimate", number, len(methods))
            lipschitz = attribution_lipschitz(
                method, x[few], target[few], eps=eps, bounds=bounds, seed=seed, **LIPSCHITZ
            ).value
        found[name] = AttributionMetrics(
            attributions=maps,
            infidelity=infidelity(
                model, x, maps, target, sigma=sigma, samples=samples, batch_size=batch_size, seed=seed
            ),
            gap=_gap(method, x, maps, boundary, target, batch_size),
            sanity=sanity,
            lipschitz=lipschitz,
            locality=_locality(maps, boxes),
        )
    report("done", len(methods), len(methods))
    return Explanation(x, target, boundary, found)


def _build(name: str, model: nn.Module, *, search: dict[str, Any], seed: object) -> PointAttribution:
    factory, options = ATTRIBUTIONS.resolve(name).cls, {}
    if factory in (BoundarySaliency, BoundaryIntegratedGradients):
        options = search
    elif factory is SmoothGrad:
        options = {"seed": seed}
    method: PointAttribution = factory(model, **options)
    return method


def _gap(
    method: PointAttribution, x: Tensor, maps: Tensor, boundary: BoundaryPoints, target: Tensor, batch_size: int
) -> Tensor | None:
    if not method.has_convergence_delta():
        return None
    start = boundary.across if isinstance(method, BoundaryAttribution) else method.start(x, batch_size, None)
    return completeness_gap(method.model, x, maps, start, target, batch_size=batch_size)


def _locality(maps: Tensor, boxes: Tensor | None) -> Locality | None:
    if boxes is None:
        return None
    rows = usable(boxes, tuple(maps.shape)) & ~maps.flatten(1).isnan().any(1).cpu()
    return locality(maps.cpu()[rows], boxes[rows]) if rows.any() else None
