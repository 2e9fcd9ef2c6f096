"""Whether attributions change when layers are randomized: SM, IG and BIG of standard and robust networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from atoll.explain.sanity import PASSES_BELOW
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_above
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import NETS, RecipeStudy, Setting, standard_and_at

METHODS = ("SM", "IG", "BIG")
SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        standard_and_at("digits-at"),
        points=2,
        seeds=1,
        overrides=("model.class_path=MLP", "model.hidden=[8]", "data.limit=100", "trainer.epochs=1", "attack.steps=1"),
    ),
    "cpu": Setting(
        standard_and_at("mnist-flat/at-base"), points=50, overrides=("data.limit=1000", "data.validation=0.01")
    ),
    "paper": Setting(standard_and_at("mnist-at"), points=1000, seeds=5),
}


class SanityStudy(RecipeStudy[Setting]):
    """Rank correlations with the attributions of the trained network as layers are randomized from the top."""

    name = "sanity-check"
    title = "Attributions of networks with randomized layers"
    reference = "Thesis, figure 2.4 (with small MNIST networks instead of an ImageNet ResNet50, at all scales)"
    settings = SETTINGS

    def measure_run(self, run: Run, cell: Cell, setting: Setting) -> Numbers:
        points = setting.points
        result = run.explain(methods=METHODS, points=points, checks=points, seed=cell.seed, checkpoint="last")
        numbers: Numbers = {}
        for name, method in result.methods.items():
            means = [mean.value for _, mean in method.sanity_layers]
            numbers |= {f"{name} curve": means, f"{name} first": means[0], f"{name} all": means[-1]}
            numbers["layers"] = [layer for layer, _ in method.sanity_layers]
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = [Column("top layer random"), Column("all layers random", "low")]
        rows = {
            f"{row}, {name}": [results.mean(row, f"{name} {when}") for when in ("first", "all")]
            for row in results.rows
            for name in METHODS
        }
        return {"Rank correlation": Table(columns, rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [depends_on_parameters(results, name) for name in METHODS]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        figure = Figure(figsize=(5 * len(NETS), 3.5), layout="constrained")
        axes: Any = figure.subplots(1, len(NETS), sharey=True)
        for axis, row in zip(axes, NETS, strict=True):
            for number, name in enumerate(METHODS):
                for seed, numbers in enumerate(results.of(row)):
                    curve = [1.0, *numbers[f"{name} curve"]]
                    axis.plot(range(len(curve)), curve, ".-", color=f"C{number}", label=name if seed == 0 else None)
            axis.set_title(row, fontsize=10)
            axis.set_xlabel("random layers, from the top")
            axis.set_ylabel("rank correlation")
            if axis.has_data():
                axis.legend(fontsize=8)
        return {"correlations": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Spearman's rank correlation of the absolute attributions before and after randomization, over the pixels"
            " that are nonzero in at least one of them, averaged over points. Random parameters are normally"
            " distributed with the same norm as the trained ones. An attribution passes if the correlation is below"
            f" {PASSES_BELOW:g} when all layers are random."
        ]


def depends_on_parameters(results: StudyResults, name: str) -> Claim:
    """Whether the correlation is low in every network when all layers are random."""
    claim = f"{name} depends on the parameters of the network (rank correlation below {PASSES_BELOW:g})"
    return claim_above(claim, {row: results.values(row, f"{name} all") for row in NETS}, PASSES_BELOW, sign=-1)
