"""Whether WCI and the robust gap correlate, over epochs as in the paper, and beyond what time alone explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_above, claim_share, pseudo_values
from atoll.studies.table import Column, Table, Value
from atoll_papers.correlation import Fit, analyze, fit
from atoll_papers.studies.wci_runs import GAPS, SIGNIFICANT, Array, curves, describe_setting, legend, stacked, wci_cell

CHANGES, BETWEEN = "changes from one measurement to the next", "deviations of seeds from their mean at each epoch"
LAST = "last epoch, all runs and schedules"
POOLED = "all seeds and epochs"
PREDICTORS = {"wci": "WCI", "wci_weight_norm": "weight norm", "wci_root_trace": "root of the trace"}
LARGEST = 1 - 1e-12  # Fisher's z of 1 is infinite
COLUMNS = ("pairs", "Pearson r", "95 % interval", "p", "slope", "95 % interval", "R²")


class WCICorrelation(Study):
    """Correlations over the epochs of one schedule, and over the runs of all schedules."""

    name = "wci-correlation"
    title = "Correlation of WCI and the robust gap"
    reference = "WCI, figures 5 and 6"

    def cells(self, scale: Scale) -> list[Cell]:
        if scale == "smoke":
            return [wci_cell("piecewise", seed, scale, "piecewise") for seed in range(2)]
        seeds = {"piecewise": 6, "cosine": 3}  # six in the paper
        cells = [wci_cell(row, seed, scale, row) for row, count in seeds.items() for seed in range(count)]
        return cells + [wci_cell("rule, τ = 10", seed, scale, "rule", "methods.0.threshold=10") for seed in range(3)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        return curves(run)

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        against = {f"Gap in {title} over WCI": _table(correlations(results, gap)) for gap, title in GAPS.items()}
        return against | {
            f"Share of the variance of the gap in {title} explained by a single number (R²)": self.predictors(
                results, gap
            )
            for gap, title in GAPS.items()
        }

    def predictors(self, results: StudyResults, gap: str) -> Table:
        """R² of WCI and of its factors."""
        runs, ends = stacked(results, "piecewise", *PREDICTORS, gap), _whole(last_epochs(results, gap))
        rows: dict[str, list[Value]] = {}
        for k, name in enumerate(PREDICTORS.values()):
            over_epochs = explained_over_epochs(runs, k)
            rows[name] = [
                Estimate.mean_of(torch.tensor(over_epochs, dtype=torch.float64)) if over_epochs else None,
                Estimate(explained_at_the_end(ends, k)) if len(ends) >= 3 else None,
            ]
        return Table([Column("over the epochs of a run"), Column("over the last epochs of all runs")], rows)

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [
            claim
            for gap, title in GAPS.items()
            for claim in (
                *tracking(results, gap, title),
                *better_than_factors(stacked(results, "piecewise", *PREDICTORS, gap), last_epochs(results, gap), title),
            )
        ]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Gap over WCI with a line per seed; correlation across seeds and spread of WCI by epoch."""
        figure = Figure(figsize=(13, 6), layout="constrained")
        axes: Any = figure.subplots(2, 3)
        for place, (gap, title) in zip(axes, GAPS.items(), strict=True):
            both = stacked(results, "piecewise", "epoch", "wci", gap)
            for number, (_, index, gaps) in enumerate(both):
                place[0].plot(index, gaps, ".", color=f"C{number}", label=f"seed {number}")
                if len(index) >= 3:
                    line = fit(index, gaps)
                    ends = np.array([index.min(), index.max()])
                    place[0].plot(ends, line.intercept + line.slope * ends, color=f"C{number}", linewidth=1)
            place[0].set_title(f"gap in {title} over WCI", fontsize=9)
            if len(both) < 3:  # nothing to correlate
                place[1].axis("off")
                place[2].axis("off")
                continue
            across = [fit(index, gaps) for index, gaps in zip(both[:, 1].T, both[:, 2].T, strict=True)]
            epochs, ends = both[0, 0], np.array([one.r_interval for one in across])
            place[1].plot(epochs, [one.r for one in across])
            place[1].fill_between(epochs, ends[:, 0], ends[:, 1], alpha=0.2)
            place[1].set_title(f"r across seeds, gap in {title}, with 95 % interval", fontsize=9)
            place[2].plot(epochs, both[:, 1].std(0, ddof=1), label="WCI")
            twin = place[2].twinx()
            twin.plot(epochs, both[:, 2].mean(0), color="C1", label="gap")
            place[2].set_title(f"standard deviation of WCI (blue), gap in {title} (orange)", fontsize=9)
        legend(axes[0, 0])
        return {"correlation": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *describe_setting(results.scale),
            "Correlations are over the epochs of the piecewise runs, as in the paper. WCI and the gap both rise during"
            " training, and neighboring epochs are similar. Any two numbers that behave like this have a large r and a"
            " small p. Time alone cannot explain the last three rows. Only the pairs in the last row come from separate"
            " runs; all other intervals in the tables are too narrow. The claims use intervals over seeds, from the"
            " jackknife of Fisher's z for the last three rows and of R² for the last epochs.",
        ]


def correlations(results: StudyResults, gap: str) -> dict[str, Fit]:
    """The paper's correlations over epochs and three that time alone cannot explain, if there is enough data."""
    both = stacked(results, "piecewise", "wci", gap)  # (seeds, 2, epochs)
    fits: dict[str, Fit] = {}
    if len(both) and both.shape[-1] >= 3:
        over_time = analyze(*({f"seed {k}": list(row) for k, row in enumerate(part)} for part in both.swapaxes(0, 1)))
        fits |= {**over_time.seeds, POOLED: over_time.pooled}
    cases = {CHANGES: both, BETWEEN: both, LAST: _whole(last_epochs(results, gap))[:, [0, -1]]}
    return fits | {name: one for name, of in BEYOND_TIME.items() if (one := of(cases[name])) is not None}


def last_epochs(results: StudyResults, gap: str) -> list[Array]:
    """Predictors and gap at the end of the runs of all schedules, ``(runs, [predictors, gap], 1)`` for each seed.

    Runs with the same seed differ only in the schedule, so only seeds are independent.
    """
    by_seed: dict[int, list[list[list[float]]]] = {}
    for row in results.rows:
        curves = {cell.seed: n["curves"] for cell, n in results.numbers.items() if cell.row == row}
        longest = max((len(curve["epoch"]) for curve in curves.values()), default=0)
        for seed, curve in curves.items():
            if len(curve["epoch"]) == longest:
                by_seed.setdefault(seed, []).append([curve[name][-1:] for name in (*PREDICTORS, gap)])
    return [np.array(runs, dtype=np.float64) for runs in by_seed.values()]


def _whole(seeds: Sequence[Array]) -> Array:
    return np.concatenate(seeds) if seeds else np.empty((0, len(PREDICTORS) + 1, 1))


def _pairs(both: Array) -> Fit | None:
    """The fit of all pairs of ``(runs, 2, measurements)``; None if there are too few."""
    index, gaps = both[:, 0].ravel(), both[:, 1].ravel()
    return fit(index, gaps) if len(index) >= 3 else None


BEYOND_TIME: Mapping[str, Callable[[Array], Fit | None]] = {
    CHANGES: lambda both: _pairs(np.diff(both)) if both.shape[-1] else None,
    BETWEEN: lambda both: _pairs(both - both.mean(0)) if len(both) >= 2 else None,
    LAST: _pairs,
}


def tracking(results: StudyResults, gap: str, title: str) -> list[Claim]:
    """The paper's claim, decided by the paper's test and by tests that do not benefit from time."""
    over_time = (
        f"WCI and the gap in {title} correlate over the epochs of most seeds (r > 0, p < 0.05: the paper's test)"
    )
    beyond = f"WCI and the gap in {title} correlate beyond what time alone explains (Fisher's z above 0)"
    seeds = [one for name, one in correlations(results, gap).items() if name.startswith("seed ")]
    good = sum(one.r > 0 and one.p < SIGNIFICANT for one in seeds)
    ends = f"r from {min(s.r for s in seeds):.2f} to {max(s.r for s in seeds):.2f}" if seeds else ""
    both = list(stacked(results, "piecewise", "wci", gap)[:, None])
    cases = {CHANGES: both, BETWEEN: both, LAST: [runs[:, [0, -1]] for runs in last_epochs(results, gap)]}
    values = {name: _pseudo(lambda some, of=of: _z(of(some)), cases[name]) for name, of in BEYOND_TIME.items()}  # type: ignore[misc]
    return [claim_share(over_time, good, len(seeds), ends), claim_above(beyond, values)]


def better_than_factors(runs: Array, ends: Sequence[Array], title: str) -> list[Claim]:
    """Whether WCI explains more of the gap than either of its factors alone, paired by seed.

    ``runs`` is ``(seeds, [predictors, gap], epochs)``, and ``ends`` has the last epochs of all runs of each seed.
    """
    wci, *others = range(len(PREDICTORS))
    names = {f"WCI against {name}": k for name, k in zip(list(PREDICTORS.values())[1:], others, strict=True)}
    epochs = {k: explained_over_epochs(runs, k) for k in (wci, *others)}
    over_epochs = {name: [a - b for a, b in zip(epochs[wci], epochs[k], strict=True)] for name, k in names.items()}
    at_the_end = {
        name: _pseudo(lambda some, k=k: explained_at_the_end(some, wci) - explained_at_the_end(some, k), ends)  # type: ignore[misc]
        for name, k in names.items()
    }
    claim = f"WCI explains more of the gap in {title} than the weight norm or the trace alone (R²)"
    return [
        claim_above(f"{claim}, over the epochs of a run", over_epochs),
        claim_above(f"{claim}, over the last epochs of all runs", at_the_end),
    ]


def explained(predictor: Array, gap: Array) -> float:
    """R² of a regression of the gap on a predictor; 0 for a constant predictor.

    >>> round(explained(np.arange(3.0), 2 * np.arange(3.0)), 9), explained(np.ones(3), np.arange(3.0))
    (1.0, 0.0)
    """
    return 0.0 if np.ptp(predictor) == 0 else fit(predictor, gap).r_squared


def explained_over_epochs(runs: Array, predictor: int) -> list[float]:
    """R² over the epochs of each run; ``runs`` is ``(runs, [predictors, gap], epochs)``."""
    return [explained(run[predictor], run[-1]) for run in runs] if runs.shape[-1] >= 3 else []


def explained_at_the_end(runs: Array, predictor: int) -> float:
    """R² over the last epochs of runs."""
    return explained(runs[:, predictor, -1], runs[:, -1, -1])


def _pseudo(statistic: Callable[[Array], float], seeds: Sequence[Array]) -> list[float]:
    """The jackknife over seeds, each with all of its runs; it needs four seeds, so that three always remain."""
    return pseudo_values(lambda some: statistic(np.concatenate(some)), seeds) if len(seeds) >= 4 else []


def _z(one: Fit | None) -> float:
    return math.nan if one is None else math.atanh(max(-LARGEST, min(one.r, LARGEST)))


def _table(fits: Mapping[str, Fit]) -> Table:
    def line(one: Fit) -> list[Value]:
        interval, slope = (f"[{low:.2g}, {high:.2g}]" for low, high in (one.r_interval, one.slope_interval))
        texts = (interval, f"{one.p:.1g}", f"{one.slope:.2g}", slope, f"{one.r_squared:.2f}")
        return [str(one.n), Estimate(one.r), *texts]

    return Table([Column(name) for name in COLUMNS], {name: line(one) for name, one in fits.items()})
