"""Whether WCI and the robust gap correlate: over epochs, as in the paper, and beyond what time alone explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_unanimous
from atoll.studies.table import Column, Table, Value
from atoll_papers.correlation import Fit, analyze, fit
from atoll_papers.studies.wci_runs import GAPS, SIGNIFICANT, curves, describe_setting, legend, stacked, wci_cell

CHANGES, BETWEEN = "changes from one measurement to the next", "deviations of seeds from their mean at each epoch"
LAST = "last epoch, all runs of all schedules"
POOLED = "all seeds and epochs"
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
        return {f"Gap in {title} against WCI": _table(correlations(results, gap)) for gap, title in GAPS.items()}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        fits = {title: correlations(results, gap) for gap, title in GAPS.items()}
        return [claim for title, one in fits.items() for claim in tracking(one, title, results.scale)]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Gap against WCI with a line per seed; correlation across seeds and spread of WCI by epoch."""
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
            place[0].set_title(f"gap in {title} against WCI", fontsize=9)
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
            "Over the epochs of the piecewise runs, as in the paper. WCI and the gap both rise during training, and"
            " neighboring epochs are alike, so r is large and p small for any two numbers that do. Time alone cannot"
            " explain the last three rows. Only in the last row is every pair a run of its own; all other intervals are"
            " too narrow.",
        ]


def correlations(results: StudyResults, gap: str) -> dict[str, Fit]:
    """The paper's correlations over epochs and three that time alone cannot explain, as far as there is data."""
    both = stacked(results, "piecewise", "wci", gap)  # (seeds, 2, epochs)
    fits: dict[str, Fit] = {}
    if len(both) and both.shape[-1] >= 3:
        index, gaps = both[:, 0], both[:, 1]
        over_time = analyze(*({f"seed {k}": list(row) for k, row in enumerate(part)} for part in (index, gaps)))
        fits |= {**over_time.seeds, POOLED: over_time.pooled}
        changes = [np.diff(part).ravel() for part in (index, gaps)]
        if len(changes[0]) >= 3:
            fits[CHANGES] = fit(*changes)
        if len(both) >= 2:
            fits[BETWEEN] = fit(*((part - part.mean(0)).ravel() for part in (index, gaps)))
    each = [one for row in results.rows if (one := stacked(results, row, "wci", gap)).size]
    last = np.concatenate([one[:, :, -1] for one in each]) if each else np.empty((0, 2))
    if len(last) >= 3:
        fits[LAST] = fit(*last.T)
    return fits


def tracking(fits: Mapping[str, Fit], title: str, scale: Scale) -> list[Claim]:
    """The paper's claim by its own test, and by tests that do not profit from time."""
    over_time = (
        f"WCI and the gap in {title} correlate over the epochs of every seed (r > 0, p < 0.05: the paper's test)"
    )
    beyond = f"WCI and the gap in {title} correlate beyond what time alone explains"
    seeds = [one for name, one in fits.items() if name.startswith("seed ")]
    others = {name: fits[name] for name in (CHANGES, BETWEEN, LAST) if name in fits}
    if scale == "smoke" or len(seeds) < 2 or len(others) < 3:
        message = "more seeds, epochs and schedules are needed"
        return [Claim(claim, "not testable", message) for claim in (over_time, beyond)]
    good = sum(one.r > 0 and one.p < SIGNIFICANT for one in seeds)
    message = f"in {good} of {len(seeds)} seeds; r from {min(s.r for s in seeds):.2f} to {max(s.r for s in seeds):.2f}"
    clear = sum(one.r_interval[0] > 0 for one in others.values())
    ends = {name: "[{:.2f}, {:.2f}]".format(*one.r_interval) for name, one in others.items()}
    texts = "; ".join(f"{name}: r {one.r:.2f} {ends[name]}" for name, one in others.items())
    return [claim_unanimous(over_time, good, len(seeds), message), claim_unanimous(beyond, clear, len(others), texts)]


def _table(fits: Mapping[str, Fit]) -> Table:
    def line(one: Fit) -> list[Value]:
        interval, slope = (f"[{low:.2g}, {high:.2g}]" for low, high in (one.r_interval, one.slope_interval))
        texts = (interval, f"{one.p:.1g}", f"{one.slope:.2g}", slope, f"{one.r_squared:.2f}")
        return [str(one.n), Estimate(one.r), *texts]

    return Table([Column(name) for name in COLUMNS], {name: line(one) for name, one in fits.items()})
