"""How close boundary searches come: the pipeline of the thesis, stage by stage, and the race."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from atoll.studies.base import Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import TOO_FEW, Difference, claim_increase
from atoll.studies.table import Column, Table
from atoll.threat import ThreatModel
from atoll_papers.pgd_cw_search import RADII, pgd_cw_search
from atoll_papers.studies.two_nets import NETS, two_nets

PIPELINES = ("PGDs", "PGDs + CW", "PGDs + CW + AutoPGD", "race")
STRATEGIES: Mapping[str, Strategy] = {
    PIPELINES[0]: partial(pgd_cw_search, with_cw=False),
    PIPELINES[1]: pgd_cw_search,
    PIPELINES[3]: multi_start_fab,
}
HALVINGS = 10  # of the way to what AutoPGD found, as those of the search at its tolerance of 0.001
LITTLE = 0.01  # of the distance: what counts as no improvement


@dataclass(frozen=True)
class Setting:
    """What a scale consists of.

    Args:
        recipe: of AT; the standard net differs in its loss only.
        seeds: how many.
        points: test points.
        steps: of AutoPGD at each radius.
        budget: of PGD and CW, in model calls; they end by themselves.
        overrides: for every recipe.
    """

    recipe: str
    seeds: int
    points: int
    steps: int = 100
    budget: float = math.inf
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        "digits-at",
        1,
        4,
        2,
        620,
        (
            *("model.class_path=MLP", "model.hidden=[16]", "data.limit=400", "trainer.epochs=2", "attack.steps=1"),
            *("trainer.batch_size=20", "trainer.test_steps=0"),
        ),
    ),
    "cpu": Setting("mnist-flat/at-base", 3, 100, overrides=("data.limit=1000", "data.validation=0.01")),
    "paper": Setting("mnist-at", 3, 1000),
}


class BoundarySearch(Study):
    """Mean distance of the boundary points found, success rate, and model calls per point."""

    name = "boundary-search"
    title = "Searches for the closest decision boundary"
    shows = "Thesis, table B.2 (which has a ResNet50 of ImageNet)"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return two_nets(setting.recipe, setting.seeds, setting.overrides)

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """Distances are compared at the points for which every pipeline found something."""
        assert run is not None
        setting, device = SETTINGS[scale], default_device()
        model = run.model("last").to(device)
        x = sample(run.data.test, setting.points, "boundary")[0].to(device)
        found = {
            name: boundary_search(
                model, x, strategy=strategy, budget=BUDGET if strategy is multi_start_fab else setting.budget
            )
            for name, strategy in STRATEGIES.items()
        }
        distance = {name: points.distance.double() for name, points in found.items()}
        distance[PIPELINES[2]] = with_autopgd(model, found[PIPELINES[1]], steps=setting.steps).double()
        common = torch.stack(list(distance.values())).isfinite().all(0)
        numbers: Numbers = {"common": int(common.sum())}
        for name in PIPELINES:
            numbers[f"{name}: distance"] = distance[name][common].mean().item() if common.any() else None
            numbers[f"{name}: success"] = 100 * distance[name].isfinite().double().mean().item()
            calls = found[name].calls.double().mean().item() if name in found else None
            numbers[f"{name}: calls"] = calls
        return numbers

    def conclude(self, found: Found) -> StudyReport:
        columns = [
            Column("mean distance", "low", 3),
            Column("success, %", "high", 1),
            Column("calls per point", "low", 0),
        ]
        kinds = ("distance", "success", "calls")
        rows = {
            f"{row}, {name}": [found.mean(row, f"{name}: {kind}") for kind in kinds]
            for row in found.rows
            for name in PIPELINES
        }
        words = (
            "Mean l2 distance of the closest point found with another prediction, at the test points for which all"
            " four found one; the share of points for which each did; model calls per point, forward and backward"
            " counted one each. PGDs: PGD at growing eps until a point falls; CW and AutoPGD (CE and DLR, at the same"
            " eps) then look for closer ones, and all ends with bisection. The race starts from examples across the"
            " boundary, too, and has 400 calls."
        )
        closer = claim_increase(
            "The race finds closer points than the thesis's pipeline (PGDs + CW)",
            _by_pipeline(found),
            [(f"{row}, {PIPELINES[3]}", f"{row}, {PIPELINES[1]}") for row in NETS],
            "distance",
            sign=-1,
        )
        return StudyReport({"Boundary search": Table(columns, rows)}, [adds_nothing(found), closer], words=[words])


def with_autopgd(model: Classifier, found: BoundaryPoints, *, steps: int) -> Tensor:
    """The distances after AutoPGD tried every radius below them."""
    x, y, distance = found.x, found.prediction, found.distance.clone()
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
                fell = other != y[rows]
                rows, adv, other = rows[fell], adv[fell], other[fell]
                _, x_outside, _ = bisect(model, x[rows], y[rows], adv, other, HALVINGS)
                distance[rows] = threat.distance(x_outside, x[rows]).minimum(distance[rows])
    return distance


def adds_nothing(found: Found) -> Claim:
    """Whether AutoPGD finds nothing that PGDs and CW do not: no more points, and distances less than 1 % shorter."""
    claim = "AutoPGD adds nothing to PGDs and CW"
    before, after = PIPELINES[1:3]
    shorter = {
        row: Difference.of(
            [
                100 * (1 - numbers[f"{after}: distance"] / numbers[f"{before}: distance"])
                for numbers in found.of(row)
                if numbers[f"{before}: distance"]
            ]
        )
        for row in NETS
    }
    more = [numbers[f"{after}: success"] - numbers[f"{before}: success"] for row in NETS for numbers in found.of(row)]
    if any(math.isinf(each.low) for each in shorter.values()):
        return Claim(claim, "not testable", TOO_FEW)
    words = (
        "distances are shorter by % "
        + "; ".join(f"{row} {each}" for row, each in shorter.items())
        + f"; successes are more by at most {max(more):.1f} % of the points"
    )
    if all(each.high < 100 * LITTLE for each in shorter.values()) and max(more) == 0:
        return Claim(claim, "held", words)
    means = all(each.value < 100 * LITTLE for each in shorter.values())
    return Claim(claim, "held in part" if means else "did not hold", words)


def _by_pipeline(found: Found) -> Found:
    """A row for each net and pipeline, so that pipelines can be compared seed by seed."""
    return Found(
        found.scale,
        {
            Cell(f"{cell.row}, {name}", cell.seed): {"distance": numbers[f"{name}: distance"]}
            for cell, numbers in found.numbers.items()
            for name in PIPELINES
        },
    )
