"""The Weight-Curvature Index over epochs, compared with the robust gap and split into its factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import TOO_FEW, claim_above, claim_share
from atoll.studies.table import Column, Table
from atoll_papers.correlation import Fit, fit
from atoll_papers.studies.measure import mean_table
from atoll_papers.studies.wci_runs import (
    GAPS,
    SIGNIFICANT,
    Array,
    curves,
    describe_setting,
    legend,
    plot_all,
    stacked,
    wci_cell,
)

CUTOUT = "data.augment=[Cutout]"
CUTOUT_16 = "data.augment=[RandomCrop, HorizontalFlip, {class_path: Cutout, init_args: {size: 16}}]"
MIXUP = "methods=[{class_path: MeasureWCI, init_args: {interval: 2, points: 256, gap: true}}, Mixup]"
PAPER_MIXUP = "methods=[{class_path: MeasureWCI, init_args: {gap: true}}, Mixup]"
DECAY = "optimizer.weight_decay=5e-3"  # ten times the weight decay of the others
TIMES = ("before", "after")
FACTORS = {"weight_norm": "norm", "root_trace": "root of the trace"}


class WCICurves(Study):
    """WCI and the robust gap over epochs, for AT alone and with regularizers."""

    name = "wci-curves"
    title = "WCI and the robust gap over epochs"
    reference = "WCI, figures 1 and 7"

    def cells(self, scale: Scale) -> list[Cell]:
        cutout, mixup = (CUTOUT_16, PAPER_MIXUP) if scale == "paper" else (CUTOUT, MIXUP)
        rows = {"AT": [], "cutout": [cutout], "mixup": [mixup], "l2": [DECAY]}
        if scale == "paper":
            sets = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
            return [
                wci_cell(f"{title}, {row}", seed, scale, "piecewise", *overrides, data=data)
                for data, title in sets.items()
                for row, overrides in rows.items()
                for seed in range(3)
                if row == "AT" or data != "svhn"
            ]
        selected = ("AT", "mixup") if scale == "smoke" else tuple(rows)
        seeds = range(1 if scale == "smoke" else 3)
        return [wci_cell(row, seed, scale, "piecewise", *rows[row]) for row in selected for seed in seeds]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        return curves(run)

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = [Column("WCI, last", "low")]
        for title in GAPS.values():
            columns += [Column(f"gap in {title}, last", "low", 3), Column(f"r of WCI and gap in {title}")]
        rows = {}
        for row in results.rows:
            series = stacked(results, row, "wci", *GAPS)
            last = [_mean(series[:, k, -1]) if series.size else None for k in range(3)]
            r = [_mean(np.array([one.r for one in fits_of(series, k)])) for k in (1, 2)]
            rows[row] = [last[0], last[1], r[0], last[2], r[1]]
        return {"WCI and the robust generalization gap": Table(columns, rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [trend(results, number, title) for number, title in enumerate(GAPS.values(), 1)]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"curves": plot_all(results)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *describe_setting(results.scale),
            "r is the correlation over the epochs of a run. Both WCI and the gap rise during training, and any two"
            " numbers that rise together have a large correlation. The study `wci-correlation` tests for correlations"
            " that time alone cannot explain.",
        ]


def fits_of(series: Array, gap: int) -> list[Fit]:
    """Regression of a gap on WCI over the epochs of each seed; ``series`` is ``(seeds, [WCI, gaps], epochs)``."""
    return [fit(one[0], one[gap]) for one in series] if series.shape[-1] >= 3 else []


def trend(results: StudyResults, gap: int, title: str) -> Claim:
    """Whether most runs pass the paper's test: a positive correlation with p below 0.05."""
    claim = f"WCI and the gap in {title} correlate over the epochs of most runs (the paper's test)"
    fits = {row: fits_of(stacked(results, row, "wci", *GAPS), gap) for row in results.rows}
    if min(map(len, fits.values())) < 2:
        return Claim(claim, "not testable", f"{TOO_FEW}, and at least three epochs")
    counts = {row: sum(one.r > 0 and one.p < SIGNIFICANT for one in each) for row, each in fits.items()}
    message = "; ".join(f"{row}: {counts[row]} of {len(fits[row])}" for row in fits)
    return claim_share(claim, sum(counts.values()), sum(map(len, fits.values())), message)


class WCIParts(Study):
    """Both factors of the bound on WCI over epochs: Frobenius norm of all weights and root of the total trace."""

    name = "wci-parts"
    title = "What changes WCI: the weights or the curvature"
    reference = "WCI, figure 4"

    def cells(self, scale: Scale) -> list[Cell]:
        return [wci_cell("piecewise", seed, scale, "piecewise") for seed in range(1 if scale == "smoke" else 4)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        numbers = curves(run)
        drop = run.recipe["schedule"]["init_args"]["milestones"][0] * run.recipe["trainer"]["epochs"]
        before = sum(epoch <= drop for epoch in numbers["curves"]["epoch"])
        changes = {
            f"{part} {when}": value
            for part in FACTORS
            for when, value in log_changes(numbers["curves"][f"wci_{part}"], before).items()
        }
        return numbers | {"drop": drop} | changes

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            f"{part} {when}": Column(f"{title}, {when} the drop", digits=3)
            for part, title in FACTORS.items()
            for when in TIMES
        }
        return {"Change of both factors of the bound, as logarithms": mean_table(results, columns)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        before = "Before the learning rate drops, the norm changes WCI more than the trace"
        after = "After the learning rate drops, the trace changes WCI more than the norm"
        return [_larger_change(results, before, 1, TIMES[0]), _larger_change(results, after, -1, TIMES[1])]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Both factors relative to their first values, and WCI."""
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        both: Any = stacked(results, "piecewise", "epoch", "wci_weight_norm", "wci_root_trace", "wci")
        for number, one in enumerate(both):
            for k, label in ((1, "Frobenius norm of the weights"), (2, "root of the trace")):
                left.plot(one[0], one[k] / one[k, 0], color=f"C{k}", label=label if number == 0 else None)
            right.plot(one[0], one[3], label=f"seed {number}")
        for axis, title in ((left, "factors of the bound, relative to their first values"), (right, "WCI")):
            axis.set_yscale("log")
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("epoch")
            legend(axis)
            for numbers in results.of("piecewise")[:1]:
                axis.axvline(numbers["drop"], color="grey", linestyle=":")
        return {"parts": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *describe_setting(results.scale),
            "WCI is at most the Frobenius norm of all weights times the root of the trace of all layers (Eq. 6). The"
            " table shows the logarithm of the change of each factor, from the first measurement to the first drop of"
            " the learning rate, and from there to the end. The two factors add up to the change of the bound.",
        ]


def _larger_change(results: StudyResults, claim: str, sign: int, when: str) -> Claim:
    differences = [
        abs(numbers[f"weight_norm {when}"]) - abs(numbers[f"root_trace {when}"]) for numbers in results.of("piecewise")
    ]
    return claim_above(claim, {"absolute change of the norm minus the trace": differences}, sign=sign)


def log_changes(values: list[float], before: int) -> dict[str, float]:
    """Logarithms of the change up to the ``before``-th measurement, and from there to the end.

    >>> log_changes([1.0, np.e, np.e**3], 2)
    {'before': 1.0, 'after': 2.0}
    """
    logs = np.log(values)
    return {"before": float(logs[before - 1] - logs[0]), "after": float(logs[-1] - logs[before - 1])}


def _mean(values: Array) -> Estimate | None:
    """Mean over seeds."""
    return Estimate.mean_of(torch.from_numpy(values)) if len(values) else None
