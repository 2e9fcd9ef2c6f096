"""Tightness of proven Lipschitz constants: upper and lower bounds for GloRo Nets and standard networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_above, claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.lipschitz_lower_bound import global_lower_bound, local_lower_bound
from atoll_papers.studies.gloro_table import TINY_GLORO
from atoll_papers.studies.measure import RecipeStudy, Setting, mean_table

ORDERS = 2.0  # "several orders of magnitude": a factor of a hundred


@dataclass(frozen=True)
class TightnessSetting(Setting):
    """Recipes of GloRo Nets by data set, points where the search starts, and steps of each ascent."""

    steps: int


SETTINGS: Mapping[Scale, TightnessSetting] = {
    "smoke": TightnessSetting({"Digits": ["digits-gloro"]}, steps=2, points=4, seeds=1, overrides=TINY_GLORO),
    "cpu": TightnessSetting(
        {"MNIST": ["mnist-ablation/trades-convnet-l2"]},
        steps=100,
        points=100,
        overrides=("data.limit=5000", "data.validation=0.02"),
    ),
    # The thesis also uses 100 pairs, but thousands of Adam steps; our steps are normalized, so fewer are enough.
    "paper": TightnessSetting(
        {"MNIST": ["mnist-gloro"], "CIFAR-10": ["gloro/cifar10-6c2f"], "Tiny-ImageNet": ["gloro/tiny-6c2f"]},
        steps=500,
        points=100,
    ),
}


class LipschitzTightness(RecipeStudy[TightnessSetting]):
    """Proven upper bound and optimized lower bounds of the steepest difference of two logits."""

    name = "lipschitz-tightness"
    title = "Lipschitz constants: upper and lower bounds"
    reference = "Thesis, table 5.3"
    settings = SETTINGS

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return [
            Cell(f"{data}, {net}", seed, recipe, (*setting.overrides, *own))
            for data, (recipe,) in setting.recipes.items()
            for seed in range(setting.seeds)
            for net, own in (("standard", ("loss=Standard", "methods=[]")), ("GloRo", ()))
        ]

    def measure_run(self, run: Run, cell: Cell, setting: TightnessSetting) -> Numbers:
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
        columns = {
            "upper": Column("global upper bound"),
            "lower": Column("global lower bound"),
            "local": Column("local lower bound"),
            "share": Column("lower / upper, %"),
            "local share": Column("local / upper, %"),
        }
        return {"Lipschitz constants": mean_table(results, columns)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        pairs = [(f"{data}, GloRo", f"{data}, standard") for data in SETTINGS[results.scale].recipes]
        tighter = "The global bound is tighter for GloRo Nets than for standard networks"
        return [
            smaller(results, pairs),
            claim_increase(tighter, results, pairs, "share"),
            claim_increase(f"{tighter}, relative to local lower bounds", results, pairs, "local share"),
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "l2 Lipschitz constants of the steepest difference of two logits, for networks that differ only in their"
            " loss. The global upper bound is proven layer by layer. The global lower bound is the largest slope found"
            " between any two inputs. The local lower bound is the largest slope found within the radius of a test"
            " point, averaged over points. Lower bounds are slopes between actual pairs of inputs."
        ]


def smaller(results: StudyResults, pairs: list[tuple[str, str]]) -> Claim:
    """Whether the proven constant is orders of magnitude smaller in the first row of each pair than in the second."""
    claim = f"GloRo Nets have a proven constant at least {ORDERS:g} orders of magnitude below standard networks"
    orders = {
        f"{first} below {second}": results.paired(second, first, "upper", of=math.log10) for first, second in pairs
    }
    return claim_above(claim, orders, ORDERS)
