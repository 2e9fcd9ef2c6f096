"""How often the most threatening class changes during training, by number of classes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table

_METHODS = "methods=[EpsRamp, Lookahead, MeasureThreats]"


@dataclass(frozen=True)
class SwitchingSetting:
    """Recipes of a scale.

    Args:
        recipes: recipes by number of classes, the fewest first.
        seeds: number of seeds.
        overrides: overrides for every recipe.
    """

    recipes: Mapping[int, str]
    seeds: int
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, SwitchingSetting] = {
    "smoke": SwitchingSetting(
        {3: "mnist-classes/3", 10: "mnist-classes/10"},
        1,
        (
            *("data.data=Digits", "data.limit=100", "model={class_path: MLP, init_args: {hidden: [8]}}"),
            *("trainer.epochs=3", "trainer.batch_size=50", "trainer.power_iterations=1"),
        ),
    ),
    "cpu": SwitchingSetting({3: "mnist-classes/3", 5: "mnist-classes/5", 10: "mnist-classes/10"}, 3),
    "paper": SwitchingSetting(
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
    """Share of training points whose threatening class differs from the epoch before."""

    name = "threat-switching"
    title = "How often the threatening class changes"
    reference = "Thesis, figure 5.4"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return [
            Cell(_row(classes), seed, recipe, setting.overrides)
            for classes, recipe in setting.recipes.items()
            for seed in range(setting.seeds)
        ]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        key = "threat_switching"
        records = [record for record in run.metrics if record["kind"] == "epoch" and key in record]
        epochs = {int(record["epoch"]): 100 * record[key] for record in records}  # a resumed run may repeat epochs
        early = [value for epoch, value in epochs.items() if epoch <= max(epochs) / 2]
        return {
            "epochs": list(epochs),
            "switching": list(epochs.values()),
            "mean": statistics.fmean(epochs.values()),
            "first half": statistics.fmean(early or epochs.values()),
        }

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = [Column("all epochs"), Column("first half")]
        rows = {row: [results.mean(row, name) for name in ("mean", "first half")] for row in results.rows}
        return {"Points whose threatening class changes, %": Table(columns, rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        counts = list(SETTINGS[results.scale].recipes)
        pairs = [(_row(more), _row(fewer)) for fewer, more in itertools.pairwise(counts)]
        return [claim_increase("With more classes, the threatening class changes more often", results, pairs, "mean")]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"switching": _figure(results)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        text = (
            "GloRo-TRADES of LiResNets: share of training points in % whose threatening class, the one that limits the"
            " certified radius, differs from the epoch before; mean over epochs."
        )
        if results.scale == "cpu":
            text += " Fewer classes are the first ones of MNIST, with the same number of training points."
        return [text]


def _row(classes: int) -> str:
    return f"{classes} classes"


def _figure(results: StudyResults) -> Figure:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axis = figure.subplots()
    for number, row in enumerate(results.rows):
        for seed, numbers in enumerate(results.of(row)):
            label = row if seed == 0 else None
            axis.plot(numbers["epochs"], numbers["switching"], color=f"C{number}", label=label)
    axis.set_xlabel("epoch")
    axis.set_ylabel("threatening class changed, %")
    axis.legend(fontsize=8)
    return figure
