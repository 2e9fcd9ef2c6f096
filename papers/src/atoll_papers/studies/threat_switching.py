"""How often the most threatening class changes during training, by number of classes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import RecipeStudy, Setting, mean_table, series

DEFINITIONS = {"runner_up_switching": "second-highest logit", "threat_switching": "class that limits the radius"}
SETTINGS: Mapping[Scale, Setting] = {  # rows in order of the number of classes
    "smoke": Setting(
        {"3 classes": ["mnist-classes/3"], "10 classes": ["mnist-classes/10"]},
        seeds=1,
        overrides=(
            *("data.data=Digits", "data.limit=100", "model={class_path: MLP, init_args: {hidden: [8]}}"),
            *("trainer.epochs=3", "trainer.batch_size=50", "trainer.power_iterations=1"),
        ),
    ),
    "cpu": Setting({f"{classes} classes": [f"mnist-classes/{classes}"] for classes in (3, 5, 10)}),
    "paper": Setting(
        {
            "10 classes": ["gloro-ablation/cifar10-trades-liresnet-l12"],
            "100 classes": ["gloro-ablation/cifar100-trades-liresnet-l12"],
            "200 classes": ["gloro-ablation/tiny-trades-liresnet-l12"],
        },
        overrides=("methods=[EpsRamp, Lookahead, MeasureThreats]",),
    ),
}


class ThreatSwitching(RecipeStudy[Setting]):
    """Share of training points whose threatening class differs from the previous epoch, by two definitions."""

    name = "threat-switching"
    title = "How often the threatening class changes"
    reference = "Thesis, figure 5.4"
    settings = SETTINGS

    def measure_run(self, run: Run, cell: Cell, setting: Setting) -> Numbers:
        numbers: Numbers = {}
        for metric, title in DEFINITIONS.items():
            both = zip(*series(run, "epoch", metric).values(), strict=True)
            epochs = {int(epoch): 100 * share for epoch, share in both}  # a resumed run may repeat epochs
            early = [value for epoch, value in epochs.items() if epoch <= max(epochs) / 2]
            numbers |= {
                "epochs": list(epochs),
                f"{title}: switching": list(epochs.values()),
                f"{title}: mean": statistics.fmean(epochs.values()),
                f"{title}: first half": statistics.fmean(early or epochs.values()),
            }
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            f"{title}: {name}": Column(f"{title}, {name}")
            for title in DEFINITIONS.values()
            for name in ("mean", "first half")
        }
        return {"Points whose threatening class changes, %": mean_table(results, columns)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        pairs = [(more, fewer) for fewer, more in itertools.pairwise(SETTINGS[results.scale].recipes)]
        claim = "With more classes, the threatening class changes more often"
        return [
            claim_increase(f"{claim} ({title})", results, pairs, f"{title}: mean") for title in DEFINITIONS.values()
        ]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        figure = Figure(figsize=(11, 3.5), layout="constrained")
        axes: Any = figure.subplots(1, len(DEFINITIONS), sharey=True)
        for axis, title in zip(axes, DEFINITIONS.values(), strict=True):
            for number, row in enumerate(results.rows):
                for seed, numbers in enumerate(results.of(row)):
                    label = row if seed == 0 else None
                    axis.plot(numbers["epochs"], numbers[f"{title}: switching"], color=f"C{number}", label=label)
            axis.set_xlabel("epoch")
            axis.set_title(title, fontsize=9)
        axes[0].set_ylabel("threatening class changed, %")
        axes[0].legend(fontsize=8)
        return {"switching": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        text = (
            "LiResNets trained with GloRo-TRADES. Share of training points in % whose threatening class differs from"
            " the previous epoch, averaged over epochs. In the thesis, the threatening class is the class with the"
            " second-highest logit. The class that limits the certified radius can be a different one, because logits"
            " change at different rates."
        )
        if results.scale == "cpu":
            text += " Rows with fewer classes use the first classes of MNIST and the same number of training points."
        return [text]
