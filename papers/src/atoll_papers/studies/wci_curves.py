"""The Weight-Curvature Index over epochs: beside the robust gap, and taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import above, claim_unanimous
from atoll.studies.table import Column, Table
from atoll_papers.correlation import Fit, fit
from atoll_papers.studies.wci_runs import (
    GAPS,
    SIGNIFICANT,
    Array,
    curves,
    legend,
    plot_all,
    stacked,
    wci_cell,
    words_of,
)

MIXUP = "methods=[{class_path: MeasureWCI, init_args: {interval: 2, points: 256, gap: true}}, Mixup]"
DECAY = "optimizer.weight_decay=5e-3"  # ten times that of the others


TIMES = ("before", "after")


class WCICurves(Study):
    """WCI and the robust gap over epochs, for AT alone and with regularizers."""

    name = "wci-curves"
    title = "WCI and the robust gap over epochs"
    shows = "WCI, figures 1 and 7"

    def cells(self, scale: Scale) -> list[Cell]:
        if scale == "paper":
            crop = "RandomCrop, HorizontalFlip"
            rows: dict[str, tuple[str, ...]] = {
                "AT": (),
                "cutout": (f"data.augment=[{crop}, {{class_path: Cutout, init_args: {{size: 16}}}}]",),
                "mixup": ("methods=[{class_path: MeasureWCI, init_args: {gap: true}}, Mixup]",),
                "l2": (DECAY,),
            }
            sets = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
            return [
                wci_cell(f"{title}, {row}", seed, scale, "piecewise", *overrides, data=data)
                for data, title in sets.items()
                for row, overrides in rows.items()
                for seed in range(3)
                if row == "AT" or data != "svhn"
            ]
        rows = {"AT": (), "cutout": ("data.augment=[Cutout]",), "mixup": (MIXUP,), "l2": (DECAY,)}
        chosen = ("AT", "mixup") if scale == "smoke" else tuple(rows)
        seeds = range(1 if scale == "smoke" else 3)
        return [wci_cell(row, seed, scale, "piecewise", *rows[row]) for row in chosen for seed in seeds]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        return curves(run)

    def conclude(self, found: Found) -> StudyReport:
        columns = [Column("WCI, last", "low")]
        for title in GAPS.values():
            columns += [Column(f"gap in {title}, last", "low", 3), Column(f"r of WCI and gap in {title}")]
        rows = {}
        for row in found.rows:
            series = stacked(found, row, "wci", *GAPS)
            last = [_mean(series[:, k, -1]) if series.size else None for k in range(3)]
            r = [_mean(np.array([one.r for one in fits_of(series, k)])) for k in (1, 2)]
            rows[row] = [last[0], last[1], r[0], last[2], r[1]]
        words = [
            *words_of(found.scale),
            "r is the correlation over the epochs of a run. Both rise while a net is trained, so that any two such"
            " numbers have a large one; study `wci-correlation` looks for what time alone cannot make.",
        ]
        verdicts = [trend(found, number, title) for number, title in enumerate(GAPS.values(), 1)]
        tables = {"WCI and the robust generalization gap": Table(columns, rows)}
        return StudyReport(tables, verdicts, {"curves": plot_all(found)}, words)


def fits_of(series: Array, gap: int) -> list[Fit]:
    """A gap on WCI over the epochs of each seed; ``series`` is ``(seeds, [WCI, gaps], epochs)``."""
    return [fit(one[0], one[gap]) for one in series] if series.shape[-1] >= 3 else []


def trend(found: Found, gap: int, title: str) -> Claim:
    """The paper's test, in every run: a correlation above 0, with p below 0.05."""
    claim = f"WCI and the gap in {title} go together over the epochs, whatever the regularizer"
    fits = {row: fits_of(stacked(found, row, "wci", *GAPS), gap) for row in found.rows}
    if found.scale == "smoke" or min(map(len, fits.values())) < 2:
        return Claim(claim, "not testable", "that takes two seeds of each row at least, and more epochs")
    held = {row: sum(one.r > 0 and one.p < SIGNIFICANT for one in each) for row, each in fits.items()}
    words = "r > 0 and p < 0.05 in " + "; ".join(f"{held[row]} of {len(fits[row])} ({row})" for row in fits)
    return claim_unanimous(claim, sum(held.values()), sum(map(len, fits.values())), words)


class WCIParts(Study):
    """Both factors of the bound on WCI over epochs: Frobenius norm of all weights, root of the trace of all layers."""

    name = "wci-parts"
    title = "What moves WCI: the weights, or the curvature"
    shows = "WCI, figure 4"

    def cells(self, scale: Scale) -> list[Cell]:
        return [wci_cell("piecewise", seed, scale, "piecewise") for seed in range(1 if scale == "smoke" else 4)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        found = curves(run)
        drop = run.recipe["schedule"]["init_args"]["milestones"][0] * run.recipe["trainer"]["epochs"]
        before = sum(epoch <= drop for epoch in found["curves"]["epoch"])
        return (
            found
            | {"drop": drop}
            | {
                f"{part} {when}": value
                for part in ("weight_norm", "root_trace")
                for when, value in moves(found["curves"][f"wci_{part}"], before).items()
            }
        )

    def conclude(self, found: Found) -> StudyReport:
        columns = [
            Column(f"{part}, {when} the drop", digits=3) for part in ("norm", "root of the trace") for when in TIMES
        ]
        names = [f"{part} {when}" for part in ("weight_norm", "root_trace") for when in TIMES]
        rows = {row: [found.mean(row, name) for name in names] for row in found.rows}
        words = [
            *words_of(found.scale),
            "WCI is at most the Frobenius norm of all weights times the root of the trace of all layers (Eq. 6)."
            " Numbers are logarithms of how much each factor changes: from the first measurement to the first drop of"
            " the learning rate, and from there to the end; those of both factors add up to that of the bound.",
        ]
        verdicts = [
            self._verdict(found, "Before the learning rate drops, the norm moves WCI more than the trace", 1, TIMES[0]),
            self._verdict(found, "After the learning rate drops, the trace moves WCI more than the norm", -1, TIMES[1]),
        ]
        tables = {"Change of both factors of the bound, as logarithms": Table(columns, rows)}
        return StudyReport(tables, verdicts, {"parts": _figure(found)}, words)

    def _verdict(self, found: Found, claim: str, sign: int, when: str) -> Claim:
        apart = [
            abs(numbers[f"weight_norm {when}"]) - abs(numbers[f"root_trace {when}"])
            for numbers in found.of("piecewise")
        ]
        return above(claim, {"size of the norm's change minus that of the trace's": apart}, sign=sign)


def moves(values: list[float], before: int) -> dict[str, float]:
    """Logarithms of the change up to a measurement (the ``before``-th), and from it to the end.

    >>> moves([1.0, np.e, np.e**3], 2)
    {'before': 1.0, 'after': 2.0}
    """
    logs = np.log(values)
    return {"before": float(logs[before - 1] - logs[0]), "after": float(logs[-1] - logs[before - 1])}


def _mean(values: Array) -> Estimate | None:
    """Over seeds."""
    return Estimate.mean_of(torch.from_numpy(values)) if len(values) else None


def _figure(found: Found) -> Figure:
    """Both factors, each in units of its first value, and WCI."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    both: Any = stacked(found, "piecewise", "epoch", "wci_weight_norm", "wci_root_trace", "wci")
    for number, one in enumerate(both):
        for k, label in ((1, "Frobenius norm of the weights"), (2, "root of the trace")):
            left.plot(one[0], one[k] / one[k, 0], color=f"C{k}", label=label if number == 0 else None)
        right.plot(one[0], one[3], label=f"seed {number}")
    for axis, title in ((left, "factors of the bound, in units of their first values"), (right, "WCI")):
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("epoch")
        legend(axis)
        for numbers in found.of("piecewise")[:1]:
            axis.axvline(numbers["drop"], color="grey", linestyle=":")
    return figure
