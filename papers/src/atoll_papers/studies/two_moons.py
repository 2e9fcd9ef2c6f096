"""Eigenvalues of the Hessian on Two Moons without TrH, with top-layer TrH, with full TrH."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from atoll.attacks import PGD
from atoll.config import build_part
from atoll.curvature import EmpiricalRisk
from atoll.losses import Loss
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.table import Column, Table
from atoll_papers.moments import moments

PARTS = {"": "whole net", "body.1.weight": "layer 1", "body.3.weight": "layer 2", "head.weight": "layer 3"}
COLOURS = {"standard": "C0", "top": "C1", "full": "C2"}  # as in the paper
WHAT = {"sum": "sum of the eigenvalues (trace)", "std": "standard deviation of the eigenvalues"}
NEARLY = 0.9  # of the full reduction


class TrHTwoMoons(Study):
    """Sum and spread of all eigenvalues, exact, for the whole net and each layer, over epochs."""

    name = "trh-two-moons"
    title = "Two Moons: what top-layer TrH does to the whole net"
    shows = "TrH, figures 2 and 5"

    def epochs(self, scale: Scale) -> tuple[int, ...]:
        return (0, 2) if scale == "smoke" else (0, 5, 10, 20, 40, 60, 80, 100)

    def cells(self, scale: Scale) -> list[Cell]:
        epochs = self.epochs(scale)
        fixed: tuple[str, ...] = (f"trainer.keep_epochs={list(epochs)}", f"trainer.epochs={epochs[-1]}")
        seeds = range(1 if scale == "smoke" else 5)
        if scale == "smoke":
            fixed += ("model.hidden=[20, 20]",)  # a Hessian that takes no time
        return [Cell(row, seed, f"moons-trh/{row}", fixed) for row in COLOURS for seed in seeds]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """At the training points, in float64."""
        assert run is not None
        loss: Loss = build_part(Loss, run.recipe["loss"], "loss", trust=False)
        x, y = run.data.tensors("train")
        attack = PGD(run.threat, "ce", **run.recipe["attack"]["init_args"])
        steps_per_epoch = len(y) // run.recipe["trainer"]["batch_size"]
        found: Numbers = {f"{part} {what}": [] for part in PARTS for what in WHAT}
        for epoch in self.epochs(scale):
            model = run.model(epoch * steps_per_epoch).double()
            problem = EmpiricalRisk.attacked(model, loss, x.double(), y, attack, micro_batch=len(y))
            for part, values in moments(problem).items():
                if part in PARTS:
                    found[f"{part} sum"].append(values.sum)
                    found[f"{part} std"].append(values.std)
        return found | {"PGD-20": 100 * run.attack("PGD-20", checkpoint="last").robust.value}

    def conclude(self, found: Found) -> StudyReport:
        epochs = self.epochs(found.scale)
        tables = {}
        for what, title in WHAT.items():
            columns = [Column(part, "low", 3) for part in PARTS.values()]
            rows = {row: [_mean(found, row, f"{part} {what}", -1) for part in PARTS] for row in found.rows}
            if what == "sum":
                columns.append(Column("PGD-20, %", "high"))
                rows = {row: [*cells, found.mean(row, "PGD-20")] for row, cells in rows.items()}
            tables[f"{title[0].upper()}{title[1:]} after epoch {epochs[-1]}"] = Table(columns, rows)
        words = (
            "AT of an MLP 100-100 on 500 points (linf 0.02, one PGD step, SGD 0.1 with momentum) without TrH, with the"
            " trace of the top layer (weight 0.5) and with that of all layers (0.05). Eigenvalues of the Hessian of the"
            " loss at the training points, exact, in float64; a layer is its weight matrix."
        )
        return StudyReport(tables, [_verdict(found)], {"eigenvalues": _figure(found, epochs)}, [words])


def _mean(found: Found, row: str, name: str, epoch: int) -> Estimate | None:
    """Of one epoch of a series."""
    picked = {cell: {name: numbers[name][epoch]} for cell, numbers in found.numbers.items() if cell.row == row}
    return Found(found.scale, picked).mean(row, name)


def _verdict(found: Found) -> Claim:
    claim = "Top-layer regularization lowers the whole net's trace nearly as well as full"
    if any(not found.of(row) for row in COLOURS) or found.scale == "smoke":
        return Claim(claim, "not testable", "there is not enough to compare")
    last = Found(found.scale, {cell: {"trace": numbers[" sum"][-1]} for cell, numbers in found.numbers.items()})
    standard, top, full = (statistics.median(last.values(row, "trace")) for row in COLOURS)
    apart = last.paired("standard", "top", "trace")
    lower = sum(each > 0 for each in apart)
    words = (
        f"at the end top is below standard in {lower} of {len(apart)} seeds, by"
        f" {100 * (1 - top / standard):.0f} % in the median against {100 * (1 - full / standard):.0f} % for full"
        f' ("nearly" is taken as {NEARLY:.0%} of the reduction)'
    )
    if top < standard and standard - top >= NEARLY * (standard - full):
        return Claim(claim, "held", words)
    return Claim(claim, "held in part" if 0 < lower == len(apart) else "did not hold", words)


def _figure(found: Found, epochs: tuple[int, ...]) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes: Any = figure.subplots(2, len(PARTS), sharex=True)
    for column, (part, title) in enumerate(PARTS.items()):
        for axis, what in zip(axes[:, column], WHAT, strict=True):
            for row in found.rows:
                each = [_mean(found, row, f"{part} {what}", k) for k in range(len(epochs))]
                known = [estimate for estimate in each if estimate is not None]
                if len(known) == len(epochs):
                    values, errors = ([getattr(e, name) for e in known] for name in ("value", "standard_error"))
                    axis.errorbar(epochs, values, errors, color=COLOURS[row], label=row, marker=".", capsize=2)
            axis.set_yscale("log")
            axis.set_title(f"{title}: {'sum' if what == 'sum' else 'standard deviation'}", fontsize=9)
        axes[1, column].set_xlabel("epoch")
    axes[0, 0].legend(fontsize=8)
    return figure
