"""How often the class that threatens a prediction most changes during training, by the number of classes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table

_METHODS = "methods=[EpsRamp, Lookahead, MeasureThreats]"


@dataclass(frozen=True)
class Setting:
    """What a scale consists of.

    Args:
        recipes: by the number of classes, the fewest first.
        seeds: how many.
        overrides: for every recipe.
    """

    recipes: Mapping[int, str]
    seeds: int
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        {3: "mnist-classes/3", 10: "mnist-classes/10"},
        1,
        (
            *("data.data=Digits", "data.limit=200", "model.depth=1", "model.width=4", "model.features=8"),
            *("trainer.epochs=3", "trainer.batch_size=40"),
        ),
    ),
    "cpu": Setting({3: "mnist-classes/3", 5: "mnist-classes/5", 10: "mnist-classes/10"}, 3),
    "paper": Setting(
        {
            10: "gloro-ablation/cifar10-trades-liresnet-l12",
            100: "gloro-ablation/cifar100-trades-liresnet-l12",
            200: "gloro-ablation/tiny-trades-liresnet-l12",
        },
        3,
        (_METHODS,),
    ),
}


class ThreatSwitching(Study):
    """The share of training points whose threatening class is another one than an epoch before."""

    name = "threat-switching"
    title = "How often the threatening class changes"
    shows = "Thesis, figure 5.4"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return [
            Cell(_row(classes), seed, recipe, setting.overrides)
            for classes, recipe in setting.recipes.items()
            for seed in range(setting.seeds)
        ]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        key = "threat_switching"
        records = [record for record in run.metrics if record["kind"] == "epoch" and key in record]
        epochs = {int(record["epoch"]): 100 * record[key] for record in records}  # a resumed run repeats some
        early = [value for epoch, value in epochs.items() if epoch <= max(epochs) / 2]
        return {
            "epochs": list(epochs),
            "switching": list(epochs.values()),
            "mean": statistics.fmean(epochs.values()),
            "first half": statistics.fmean(early or epochs.values()),
        }

    def conclude(self, found: Found) -> StudyReport:
        columns = [Column("all epochs"), Column("first half")]
        rows = {row: [found.mean(row, name) for name in ("mean", "first half")] for row in found.rows}
        counts = list(SETTINGS[found.scale].recipes)
        pairs = [(_row(more), _row(fewer)) for fewer, more in itertools.pairwise(counts)]
        verdict = claim_increase("The more classes, the more often the threatening class changes", found, pairs, "mean")
        words = (
            "GloRo-TRADES of LiResNets: the share of training points in % whose threatening class, the one that ends"
            " the certified radius, is another one than an epoch before; mean over epochs."
        )
        if found.scale == "cpu":
            words += " Here fewer classes are the first ones of MNIST, with as many training points."
        tables = {"Points whose threatening class changes, %": Table(columns, rows)}
        return StudyReport(tables, [verdict], {"switching": _figure(found)}, [words])


def _row(classes: int) -> str:
    return f"{classes} classes"


def _figure(found: Found) -> Figure:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axis = figure.subplots()
    for number, row in enumerate(found.rows):
        for seed, numbers in enumerate(found.of(row)):
            label = row if seed == 0 else None
            axis.plot(numbers["epochs"], numbers["switching"], color=f"C{number}", label=label)
    axis.set_xlabel("epoch")
    axis.set_ylabel("threatening class changed, %")
    axis.legend(fontsize=8)
    return figure
