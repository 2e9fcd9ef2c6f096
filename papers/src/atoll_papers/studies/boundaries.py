"""Compares boundary searches: the pipeline of the thesis, stage by stage, and the multi-start search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from atoll.attacks import APGD
from atoll.data.base import sample
from atoll.distributed import default_device
from atoll.explain.boundary import BUDGET, BoundaryPoints, Strategy, bisect, boundary_search, multi_start_fab
from atoll.models import Classifier
from atoll.modules import evaluation_mode
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_above, claim_increase
from atoll.studies.table import Column, Table
from atoll.threat import ThreatModel
from atoll_papers.pgd_cw_search import RADII, pgd_cw_search
from atoll_papers.studies.measure import NETS, RecipeStudy, Setting, mean_table, standard_and_at

PIPELINES = ("PGDs", "PGDs + CW", "PGDs + CW + AutoPGD", "multi-start")
STRATEGIES: Mapping[str, Strategy] = {
    PIPELINES[0]: partial(pgd_cw_search, with_cw=False),
    PIPELINES[1]: pgd_cw_search,
    PIPELINES[3]: multi_start_fab,
}
HALVINGS = 10  # bisections after AutoPGD, the same number as in the search with its tolerance of 0.001
LITTLE = 1.0  # smaller improvements do not count, in % of the distance or percentage points of success


@dataclass(frozen=True)
class BoundarySetting(Setting):
    """Steps of AutoPGD at each radius, and the budget of PGD and CW in model calls per point."""

    points: int = 1000
    steps: int = 100
    budget: float = math.inf


SETTINGS: Mapping[Scale, BoundarySetting] = {
    "smoke": BoundarySetting(
        standard_and_at("digits-at"),
        points=4,
        steps=2,
        budget=620,
        seeds=1,
        overrides=(
            *("model.class_path=MLP", "model.hidden=[16]", "data.limit=400", "trainer.epochs=2", "attack.steps=1"),
            *("trainer.batch_size=20", "trainer.test_steps=0"),
        ),
    ),
    "cpu": BoundarySetting(
        standard_and_at("mnist-flat/at-base"), points=100, overrides=("data.limit=1000", "data.validation=0.01")
    ),
    "paper": BoundarySetting(standard_and_at("mnist-at")),
}


class BoundarySearch(RecipeStudy[BoundarySetting]):
    """Mean distance of boundary points, success rate and model calls per point."""

    name = "boundary-search"
    title = "Searches for the closest decision boundary"
    reference = "Thesis, table B.2 (with small MNIST networks instead of an ImageNet ResNet50, at all scales)"
    settings = SETTINGS

    def measure_run(self, run: Run, cell: Cell, setting: BoundarySetting) -> Numbers:
        """Compare distances at the points for which every pipeline finds a boundary point."""
        device = default_device()
        model = run.model("last").to(device)
        x = sample(run.data.test, setting.points, "boundary")[0].to(device)
        searches = {
            name: boundary_search(
                model, x, strategy=strategy, budget=BUDGET if strategy is multi_start_fab else setting.budget
            )
            for name, strategy in STRATEGIES.items()
        }
        distance = {name: points.distance.double() for name, points in searches.items()}
        distance[PIPELINES[2]] = with_autopgd(model, searches[PIPELINES[1]], steps=setting.steps).double()
        common = torch.stack(list(distance.values())).isfinite().all(0)
        numbers: Numbers = {"common": int(common.sum())}
        for name in PIPELINES:
            numbers[f"{name}: distance"] = distance[name][common].mean().item() if common.any() else None
            numbers[f"{name}: success"] = 100 * distance[name].isfinite().double().mean().item()
            numbers[f"{name}: calls"] = searches[name].calls.double().mean().item() if name in searches else None
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            "distance": Column("mean distance", "low", 3),
            "success": Column("success, %", "high", 1),
            "calls": Column("calls per point", "low", 0),
        }
        rows = [f"{row}, {name}" for row in results.rows for name in PIPELINES]
        return {"Boundary search": mean_table(_by_pipeline(results), columns, rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        pairs = [(f"{row}, {PIPELINES[3]}", f"{row}, {PIPELINES[1]}") for row in NETS]
        closer = "The multi-start search finds closer points than the thesis's pipeline (PGDs + CW)"
        return [
            adds_nothing(results),
            claim_increase(closer, _by_pipeline(results), pairs, "distance", sign=-1),
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "The distance is the mean l2 distance to the closest point with another prediction, over the test points"
            " for which all four pipelines find one. Success is the share of points for which a pipeline finds one."
            ' Calls count forward and backward passes as one each. "PGDs" runs PGD at growing eps until it succeeds.'
            " CW and AutoPGD (CE and DLR, at the same eps) then look for closer points, and bisection refines them. The"
            " multi-start search also starts from other examples and has 400 calls."
        ]


def with_autopgd(model: Classifier, points: BoundaryPoints, *, steps: int) -> Tensor:
    """Distances after running AutoPGD at every smaller radius."""
    x, y, distance = points.x, points.prediction, points.distance.clone()
    with evaluation_mode(model):
        for eps in RADII:
            threat = ThreatModel("l2", eps)
            for objective in ("ce", "dlr"):
                rows = (distance > threat.radius).nonzero().squeeze(1)
                if not len(rows):
                    continue
                attack = APGD(threat, objective, steps=steps)
                adv = attack(model, x[rows], y[rows], seed="boundary", index=rows)
                with torch.no_grad():
                    other = model(adv).argmax(1)
                broken = other != y[rows]
                rows, adv, other = rows[broken], adv[broken], other[broken]
                _, x_outside, _ = bisect(model, x[rows], y[rows], adv, other, HALVINGS)
                distance[rows] = threat.distance(x_outside, x[rows]).minimum(distance[rows])
    return distance


def adds_nothing(results: StudyResults) -> Claim:
    """Whether AutoPGD shortens distances by less than 1 % and finds boundary points for less than 1 % more inputs.

    It starts from the points of PGDs and CW, so it cannot do worse, and one side of the equivalence test is enough.
    """
    distances = [f"{name}: distance" for name in PIPELINES[1:3]]
    values = {
        f"{row}, % shorter": [
            100 * (1 - n[after] / n[before]) for n in results.of(row) for before, after in [distances] if n[before]
        ]
        for row in NETS
    }
    before, after = (f"{name}: success" for name in PIPELINES[1:3])
    values |= {f"{row}, % more points": [n[after] - n[before] for n in results.of(row)] for row in NETS}
    claim = f"AutoPGD adds nothing to PGDs and CW (less than {LITTLE:g} %)"
    return claim_above(claim, values, LITTLE, sign=-1)


def _by_pipeline(results: StudyResults) -> StudyResults:
    """Results with one row per network and pipeline, so that pipelines can be compared."""
    return StudyResults(
        results.scale,
        {
            Cell(f"{cell.row}, {name}", cell.seed): {
                kind: numbers[f"{name}: {kind}"] for kind in ("distance", "success", "calls")
            }
            for cell, numbers in results.numbers.items()
            for name in PIPELINES
        },
    )
