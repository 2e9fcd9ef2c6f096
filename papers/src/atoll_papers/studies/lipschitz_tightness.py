"""How tight proven Lipschitz constants are: lower bounds for GloRo Nets and standard networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import TOO_FEW, Difference, claim_increase, claim_outcome
from atoll.studies.table import Column, Table
from atoll_papers.lipschitz_lower_bound import global_lower_bound, local_lower_bound
from atoll_papers.studies.gloro_table import TINY_GLORO

ORDERS = 2.0  # "several orders of magnitude": a factor of a hundred


@dataclass(frozen=True)
class TightnessSetting:
    """Recipes and points of a scale.

    Args:
        recipes: recipes of GloRo Nets by name of the data.
        seeds: number of seeds.
        points: number of test points that the search for lower bounds starts from.
        steps: steps of each ascent.
        overrides: overrides for every recipe.
    """

    recipes: Mapping[str, str]
    seeds: int
    points: int
    steps: int
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, TightnessSetting] = {
    "smoke": TightnessSetting({"Digits": "digits-gloro"}, 1, 4, 2, TINY_GLORO),
    "cpu": TightnessSetting(
        {"MNIST": "mnist-ablation/trades-convnet-l2"}, 3, 100, 100, ("data.limit=5000", "data.validation=0.02")
    ),
    # The thesis also has 100 pairs, and thousands of steps of Adam; our steps are normalized, so fewer are enough.
    "paper": TightnessSetting(
        {"MNIST": "mnist-gloro", "CIFAR-10": "gloro/cifar10-6c2f", "Tiny-ImageNet": "gloro/tiny-6c2f"}, 3, 100, 500
    ),
}


class LipschitzTightness(Study):
    """Upper bound and optimized lower bounds of the steepest difference of two logits."""

    name = "lipschitz-tightness"
    title = "Lipschitz constants: upper and lower bounds"
    reference = "Thesis, table 5.3"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        cells = []
        for data, recipe in setting.recipes.items():
            for seed in range(setting.seeds):
                standard = (*setting.overrides, "loss=Standard", "methods=[]")
                cells.append(Cell(f"{data}, standard", seed, recipe, standard))
                cells.append(Cell(f"{data}, GloRo", seed, recipe, setting.overrides))
        return cells

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        setting = SETTINGS[scale]
        x, _ = run.data.tensors("test", setting.points)
        device = default_device()
        model, x = run.model("last").to(device).double(), x.to(device).double()
        upper = run.certify(attack=False, checkpoint="last").lipschitz
        assert upper is not None
        lower = global_lower_bound(model, x, bounds=run.data.bounds, steps=setting.steps).largest
        local = local_lower_bound(model, x, run.threat.radius, bounds=run.data.bounds, steps=setting.steps).mean
        shares = {"share": 100 * lower / upper, "local share": 100 * local / upper}
        return {"upper": upper, "lower": lower, "local": local, **shares}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        names = {
            "upper": "global upper bound",
            "lower": "global lower bound",
            "local": "local lower bound",
            "share": "lower / upper, %",
            "local share": "local / upper, %",
        }
        rows = {row: [results.mean(row, name) for name in names] for row in results.rows}
        return {"Lipschitz constants": Table([Column(title) for title in names.values()], rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        pairs = [(f"{data}, GloRo", f"{data}, standard") for data in SETTINGS[results.scale].recipes]
        tighter = "The global bound of GloRo Nets is tighter than that of standard networks"
        return [
            smaller(results, pairs),
            claim_increase(tighter, results, pairs, "share"),
            claim_increase(f"{tighter}, relative to local lower bounds", results, pairs, "local share"),
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "l2 constants of the steepest difference of two logits, of networks that differ only in their loss: the"
            " layer-wise proven bound; the largest slope between any two inputs; and the mean of the largest slopes"
            " within the radius of a test point. Lower bounds are slopes between actual pairs of inputs."
        ]


def smaller(results: StudyResults, pairs: list[tuple[str, str]]) -> Claim:
    """By how many orders of magnitude the proven constant of the first row of each pair is below that of the second."""
    claim = "The proven constant of GloRo Nets is orders of magnitude smaller than that of standard networks"
    orders = {pair: Difference.of(results.paired(pair[1], pair[0], "upper", of=math.log10)) for pair in pairs}
    if any(math.isinf(each.low) for each in orders.values()):
        return Claim(claim, "not testable", TOO_FEW)
    low = min(each.low for each in orders.values())
    texts = "; ".join(f"{first} below {second} by {each.text(1)}" for (first, second), each in orders.items())
    return Claim(claim, claim_outcome(low > ORDERS, low > 0), f"in powers of ten, {texts} (supported above {ORDERS:g})")
