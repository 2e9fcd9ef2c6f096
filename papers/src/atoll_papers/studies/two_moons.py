"""Eigenvalues of the Hessian on Two Moons without TrH, with top-layer TrH and with full TrH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from atoll.attacks import PGD
from atoll.curvature import EmpiricalRisk
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_above
from atoll.studies.table import Column, Table
from atoll_papers.moments import moments

PARTS = {"": "whole network", "body.1.weight": "layer 1", "body.3.weight": "layer 2", "head.weight": "layer 3"}
COLORS = {"standard": "C0", "top": "C1", "full": "C2"}  # as in the paper
WHAT = {"sum": "sum of the eigenvalues (trace)", "std": "standard deviation of the eigenvalues"}
NEARLY = 0.9  # share of the reduction by full TrH


class TrHTwoMoons(Study):
    """Exact sum and spread of all eigenvalues, of the whole network and of each layer, over epochs."""

    name = "trh-two-moons"
    title = "Two Moons: the effect of top-layer TrH on the whole network"
    reference = "TrH, figures 2 and 5"

    def epochs(self, scale: Scale) -> tuple[int, ...]:
        return (0, 2) if scale == "smoke" else (0, 5, 10, 20, 40, 60, 80, 100)

    def cells(self, scale: Scale) -> list[Cell]:
        epochs = self.epochs(scale)
        fixed: tuple[str, ...] = (f"trainer.keep_epochs={list(epochs)}", f"trainer.epochs={epochs[-1]}")
        seeds = range(1 if scale == "smoke" else 5)
        if scale == "smoke":
            fixed += ("data.n=100", "model.hidden=[8, 8]")  # a small Hessian
        return [Cell(row, seed, f"moons-trh/{row}", fixed) for row in COLORS for seed in seeds]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Measure at the training points, in float64."""
        assert run is not None
        x, y = run.data.tensors("train")
        attack = PGD(run.threat, **run.recipe["attack"]["init_args"] | {"objective": "ce"})
        steps_per_epoch = len(y) // run.recipe["trainer"]["batch_size"]
        numbers: Numbers = {f"{part} {what}": [] for part in PARTS for what in WHAT}
        for epoch in self.epochs(scale):
            model = run.model(epoch * steps_per_epoch).double()
            problem = EmpiricalRisk.attacked(model, run.loss, x.double(), y, attack, micro_batch=len(y))
            for part, values in moments(problem).items():
                if part in PARTS:
                    numbers[f"{part} sum"].append(values.sum)
                    numbers[f"{part} std"].append(values.std)
        return numbers | {"PGD-20": 100 * run.attack("PGD-20", checkpoint="last").robust.value}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        tables = {}
        for what, title in WHAT.items():
            columns = [Column(part, "low", 3) for part in PARTS.values()]
            rows = {row: [_mean(results, row, f"{part} {what}", -1) for part in PARTS] for row in results.rows}
            if what == "sum":
                columns.append(Column("PGD-20, %", "high"))
                rows = {row: [*cells, results.mean(row, "PGD-20")] for row, cells in rows.items()}
            tables[f"{title[0].upper()}{title[1:]} after epoch {self.epochs(results.scale)[-1]}"] = Table(columns, rows)
        return tables

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        claim = (
            "Top-layer regularization reduces the trace of the whole network nearly as much as full regularization"
            f" (at least {NEARLY:.0%} of the reduction)"
        )
        last = {cell: {"trace": numbers[" sum"][-1]} for cell, numbers in results.numbers.items()}
        traces = StudyResults(results.scale, last)
        standard, top, full = (traces.by_seed(row, "trace") for row in COLORS)
        seeds = [seed for seed in standard if seed in top and seed in full]
        lower = {s: (100 * (1 - top[s] / standard[s]), 100 * (1 - full[s] / standard[s])) for s in seeds}
        values = {
            "reduction by top, % of standard": [ours for ours, _ in lower.values()],
            f"reduction by top minus {NEARLY:.0%} of reduction by full": [o - NEARLY * t for o, t in lower.values()],
        }
        return [claim_above(claim, values)]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        epochs = self.epochs(results.scale)
        figure = Figure(figsize=(11, 5), layout="constrained")
        axes: Any = figure.subplots(2, len(PARTS), sharex=True)
        for column, (part, title) in enumerate(PARTS.items()):
            for axis, what in zip(axes[:, column], WHAT, strict=True):
                for row in results.rows:
                    each = [_mean(results, row, f"{part} {what}", k) for k in range(len(epochs))]
                    known = [estimate for estimate in each if estimate is not None]
                    if len(known) == len(epochs):
                        values, errors = ([getattr(e, name) for e in known] for name in ("value", "standard_error"))
                        axis.errorbar(epochs, values, errors, color=COLORS[row], label=row, marker=".", capsize=2)
                axis.set_yscale("log")
                axis.set_title(f"{title}: {'sum' if what == 'sum' else 'standard deviation'}", fontsize=9)
            axes[1, column].set_xlabel("epoch")
        axes[0, 0].legend(fontsize=8)
        return {"eigenvalues": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "AT of an MLP 100-100 on 500 points (linf 0.02, one PGD step, SGD with momentum and a learning rate of 0.1)"
            " without TrH (standard), with the trace of the top layer (top, weight 0.5) and with the trace of all"
            " layers (full, weight 0.05). The eigenvalues of the Hessian of the loss at the training points are exact,"
            " in float64. The columns for layers refer to their weight matrices."
        ]


def _mean(results: StudyResults, row: str, name: str, epoch: int) -> Estimate | None:
    """Mean over seeds of a series at one epoch."""
    values = {cell: {name: numbers[name][epoch]} for cell, numbers in results.numbers.items() if cell.row == row}
    return StudyResults(results.scale, values).mean(row, name)
