"""How much of a proven Lipschitz constant is real: lower bounds below it, of GloRo Nets and of standard ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Answer, Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import TOO_FEW, Difference, claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.lipschitz_lower_bound import tightness

ORDERS = 2.0  # "several orders of magnitude": a hundred times


@dataclass(frozen=True)
class Setting:
    """What a scale consists of.

    Args:
        recipes: of GloRo Nets, by the name of the data.
        seeds: how many.
        points: test points that the search for lower bounds starts from.
        steps: of each of its ascents.
        overrides: for every recipe.
    """

    recipes: Mapping[str, str]
    seeds: int
    points: int
    steps: int
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        {"Digits": "digits-gloro"}, 1, 10, 10, ("model.widths=[8, 8]", "model.hidden=16", "trainer.epochs=2")
    ),
    "cpu": Setting(
        {"MNIST": "mnist-ablation/trades-convnet-l2"}, 3, 100, 100, ("data.limit=5000", "data.validation=0.02")
    ),
    # The thesis has 100 pairs, too, and thousands of steps of Adam; ours are normalised and need fewer.
    "paper": Setting(
        {"MNIST": "mnist-gloro", "CIFAR-10": "gloro/cifar10-6c2f", "Tiny-ImageNet": "gloro/tiny-6c2f"}, 3, 100, 500
    ),
}


class LipschitzTightness(Study):
    """Upper bound, and lower bounds by optimisation, of the steepest difference of two logits."""

    name = "lipschitz-tightness"
    title = "Lipschitz constants: proven and found"
    shows = "Thesis, table 5.3"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        cells = []
        for data, recipe in setting.recipes.items():
            for seed in range(setting.seeds):
                standard = (*setting.overrides, "loss=Standard", "methods=[]")
                cells.append(Cell(f"{data}, standard", seed, recipe, standard))
                cells.append(Cell(f"{data}, GloRo", seed, recipe, setting.overrides))
        return cells

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        setting = SETTINGS[scale]
        x, _ = run.data.tensors("test", setting.points)
        device = default_device()
        model, x = run.model("last").to(device).double(), x.to(device).double()
        found = tightness(model, x, run.threat.radius, bounds=run.data.bounds, steps=setting.steps)
        shares = {"share": 100 * found.lower / found.upper, "local share": 100 * found.local / found.upper}
        return vars(found) | shares

    def conclude(self, found: Found) -> StudyReport:
        names = {
            "upper": "global upper bound",
            "lower": "global lower bound",
            "local": "local lower bound",
            "share": "lower / upper, %",
            "local share": "local / upper, %",
        }
        columns = [Column(title, digits=2) for title in names.values()]
        table = Table(columns, {row: [found.mean(row, name) for name in names] for row in found.rows})
        pairs = [(f"{data}, GloRo", f"{data}, standard") for data in SETTINGS[found.scale].recipes]
        verdicts = [
            smaller(found, pairs),
            claim_increase(
                "The global bound of GloRo Nets is tighter than that of standard nets", found, pairs, "share"
            ),
            claim_increase("So it is beside local lower bounds", found, pairs, "local share"),
        ]
        words = (
            "Constants (l2) of the steepest difference of two logits, of nets that differ in their loss only: proven,"
            " layer by layer; the largest found between two inputs anywhere; and the mean of the largest found within"
            " the radius of a test point. Lower bounds are those of real pairs of inputs."
        )
        return StudyReport({"Lipschitz constants": table}, verdicts, words=[words])


def smaller(found: Found, pairs: list[tuple[str, str]]) -> Claim:
    """By how many orders of magnitude the proven constant of the first row of each pair is below that of the second."""
    claim = "The proven constant of GloRo Nets is orders of magnitude smaller than that of standard nets"
    orders = {pair: Difference.of(found.paired(pair[1], pair[0], "upper", of=math.log10)) for pair in pairs}
    if any(math.isinf(each.low) for each in orders.values()):
        return Claim(claim, "not testable", TOO_FEW)
    lows = [each.low for each in orders.values()]
    answer: Answer = "held" if min(lows) > ORDERS else "held in part" if min(lows) > 0 else "did not hold"
    told = "; ".join(f"{first} below {second} by {each.text(1)}" for (first, second), each in orders.items())
    return Claim(claim, answer, f"in powers of ten, {told} (held from {ORDERS:g} on)")
