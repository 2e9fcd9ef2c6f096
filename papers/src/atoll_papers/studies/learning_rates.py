"""Learning rates in adversarial training: the WCI rule compared with schedules, and the time and size of drops."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from atoll.runs.run import Run, Which
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import Difference, claim_equivalent, claim_increase
from atoll.studies.table import Column, Table, Value
from atoll_papers.studies.measure import accuracies, describe_evaluation, describe_points, mean_table
from atoll_papers.studies.wci_runs import TITLES, curves, describe_setting, legend, plot, plot_all, wci_cell

POINTS: Mapping[Scale, int | None] = {"smoke": 20, "cpu": 4000, "paper": None}  # test images for PGD
PGD: Mapping[Scale, str] = {"smoke": "PGD-20", "cpu": "PGD-20", "paper": "PGD-10"}  # the paper uses 10 steps of 2/255
# Points for AutoAttack, and its version.
AUTOATTACK: Mapping[Scale, tuple[int | None, str]] = {
    "smoke": (20, "APGD-CE"),
    "cpu": (500, "fast"),
    "paper": (None, "standard"),
}
LITTLE = 1.0  # percentage points of accuracy
WHICH: tuple[Which, ...] = ("last", "best")
EARLY = "early stopping"
CONTROL = "one drop"
ACCURACY = {
    "last robust": Column("robust, last", "high"),
    "best robust": Column("robust, best on validation", "high"),
    "last clean": Column("clean, last", "high"),
    "last gap_error": Column("gap in error, last", "low", 3),
}


class LearningRates(Study):
    """Base class of studies whose runs differ in their learning rate; measures the last and the best epoch."""

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        numbers = curves(run)
        for which in WHICH:
            part = accuracies(run, which=which, points=POINTS[scale], attacks=[PGD[scale]])
            numbers |= {f"{which} clean": part["clean"], f"{which} robust": part[PGD[scale]]}
        ends = {name: series[-1] for name, series in numbers["curves"].items() if series}
        return numbers | {f"last {name}": value for name, value in ends.items()}


class WCIRate(LearningRates):
    """Compares the WCI rule with ordinary schedules and early stopping."""

    name = "wci-lr"
    title = "A learning rate that follows WCI"
    reference = "WCI, table 1 and figures 3, 8 and 9"
    thresholds = (100, 10)  # both ends of the paper's range

    def cells(self, scale: Scale) -> list[Cell]:
        warmup = "{}" if scale == "paper" else "{warmup: 2}"  # as in the recipes
        schedules = {CONTROL: f"OneDrop, init_args: {warmup}", "linear": f"Linear, init_args: {warmup}"}
        schedules["super-convergence"] = "SuperConvergence"  # it includes a warm-up
        rows = {row: [row] for row in ("piecewise", "cosine")}
        rows |= {row: ["piecewise", f"schedule={{class_path: {each}}}"] for row, each in schedules.items()}
        rows |= {f"rule, τ = {tau}": ["rule", f"methods.0.threshold={tau}"] for tau in self.thresholds}
        if scale == "smoke":
            rows = {row: rows[row] for row in ("piecewise", CONTROL, "rule, τ = 10")}
        seeds = range(1 if scale == "smoke" else 4)
        return [wci_cell(row, seed, scale, *variant) for row, variant in rows.items() for seed in seeds]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Also run AutoAttack on the last checkpoint and on the best one, which is where early stopping stops."""
        assert run is not None
        numbers = super().measure(cell, run, scale, dependencies)
        points, version = AUTOATTACK[scale]
        for which in WHICH:
            part = accuracies(run, which=which, points=points, attacks=["none"], autoattack=version)
            numbers[f"{which} AutoAttack"] = part["AutoAttack"]
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            **ACCURACY,
            "last AutoAttack": Column("AutoAttack, last", "high"),
            "last wci": Column("WCI, last", "low"),
            "last learning_rate": Column("rate, last", digits=5),
        }
        return {
            "Learning rates": mean_table(results, columns),
            "Robust accuracy after the last epoch in points, paired by seed": differences(
                stopped_early(results, "piecewise"), self.pairs(results)
            ),
        }

    def pairs(self, results: StudyResults) -> list[tuple[str, str]]:
        """Pairs of every rule with every other learning rate."""
        others = [row for row in stopped_early(results, "piecewise").rows if row not in self.rules(results)]
        return [(rule, other) for rule in self.rules(results) for other in others]

    def rules(self, results: StudyResults) -> list[str]:
        return [row for row in results.rows if row.startswith("rule")]

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        extended = stopped_early(results, "piecewise")
        control = [(rule, CONTROL) for rule in self.rules(results)]
        same = f"Accuracy does not depend on the threshold from 10 to 100 (within {LITTLE:g} point)"
        attacks = {"last robust": PGD[results.scale], "last AutoAttack": "AutoAttack"}
        return [
            *(
                claim_increase(f"The rule {what} (last epoch, {attack})", extended, pairs, name)
                for what, pairs in (
                    ("beats the same schedule without it (one drop)", control),
                    ("beats other learning rates and early stopping", self.pairs(results)),
                )
                for name, attack in attacks.items()
            ),
            claim_equivalent(same, extended, self.rules(results), "last robust", LITTLE),
        ]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"rates": plot_all(results)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *describe_setting(results.scale),
            f"{_describe(results.scale)} AutoAttack version `{AUTOATTACK[results.scale][1]}` on"
            f" {describe_points(AUTOATTACK[results.scale][0])} test images.",
            '"One drop" reduces the rate to a tenth after half of the run. The rule, `WCISchedule`, has the same drop'
            " and then multiplies the rate by min(1, τ / average of WCI), for both ends of the paper's range of τ."
            + _at_drop(results)
            + _gain(results),
        ]


def stopped_early(results: StudyResults, row: str) -> StudyResults:
    """Results with an additional row for early stopping, whose last epoch is the best epoch of ``row``."""
    stopped = {
        replace(cell, row=EARLY): {f"last {name}": numbers.get(f"best {name}") for name in ("robust", "AutoAttack")}
        for cell, numbers in results.numbers.items()
        if cell.row == row
    }
    return replace(results, numbers={**results.numbers, **stopped})


def _describe(scale: Scale) -> str:
    return f"{describe_evaluation(POINTS[scale])} Robust accuracy is under {PGD[scale]}."


def differences(results: StudyResults, pairs: list[tuple[str, str]]) -> Table:
    """Differences in the last robust accuracy between the rows of each pair."""
    rows: dict[str, list[Value]] = {}
    for first, second in pairs:
        apart = results.paired(first, second, "last robust")
        one = Difference.of(apart)
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        interval = f"[{one.low:.2f}, {one.high:.2f}]" if len(apart) > 1 else None
        rows[f"{first} minus {second}"] = [Estimate(one.value, error), interval]
    return Table([Column("difference"), Column("95 % interval")], rows)


def _at_drop(results: StudyResults) -> str:
    """WCI of the piecewise runs when the rate drops, which is when the rule starts."""
    at = []
    for curve in (numbers["curves"] for numbers in results.of("piecewise")):
        pairs = zip(curve["epoch"], curve["wci"], strict=True)
        at += [index for epoch, index in pairs if 2 * epoch == curve["epoch"][-1]]
    return f" In the piecewise runs, WCI is {statistics.fmean(at):.0f} when the rate drops." if at else ""


def _gain(results: StudyResults) -> str:
    """The gain from early stopping in the piecewise runs."""
    gains = [numbers["best robust"] - numbers["last robust"] for numbers in results.of("piecewise")]
    return f" Early stopping of these runs gains {Difference.of(gains)} points." if gains else ""


class DropSchedules(LearningRates):
    """When and by how much the learning rate drops."""

    name = "lr-schedules"
    title = "When and how much the learning rate drops"
    reference = "WCI, figure 2"
    times = (0.125, 0.25, 0.375, 0.5)  # epochs 25, 50, 75, 100 of 200
    rates: Mapping[Scale, float] = {"smoke": 0.05, "cpu": 0.05, "paper": 0.1}
    published = (1.0, 0.1)  # factors of the initial rate and of the drop

    def drop(self, share: float, factor: float) -> str:
        return f"rate x {share:g}, drop x {factor:g}"

    def cells(self, scale: Scale) -> list[Cell]:
        seeds = range(1 if scale == "smoke" else 3)
        rows: dict[str, list[str]] = {
            # The paper says "for 50 epochs, followed by similar decays".
            f"drops at {at:g}": [f"schedule.milestones=[{at}, {at + 0.25}]"]
            for at in self.times[: 1 if scale == "smoke" else None]
        }
        drops = [(share, factor) for share in (1.0, 0.1) for factor in (0.1, 0.01)]
        for share, factor in drops[: 1 if scale == "smoke" else None]:
            rate = share * self.rates[scale]
            own = ["schedule.milestones=[0.5]", f"schedule.gamma={factor}", f"optimizer.lr={rate}"]
            rows[self.drop(share, factor)] = own
        return [wci_cell(row, seed, scale, "piecewise", *rows[row]) for row in rows for seed in seeds]

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"Learning rates": mean_table(results, ACCURACY)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        times, best = _times(results), self.drop(*self.published)
        pairs = [(best, row) for row in results.rows if row not in (*times, best)]
        when = f"It does not matter when the rate drops (within {LITTLE:g} point, last epoch)"
        highest = "Dropping the highest rate to a tenth works best (best checkpoint)"
        return [
            claim_equivalent(when, results, times, "last robust", LITTLE),
            claim_increase(highest, results, pairs, "best robust"),
        ]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Robust test error over epochs, for both questions."""
        figure = Figure(figsize=(10, 4), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        times = _times(results)
        for axis, rows in zip(axes, (times, [row for row in results.rows if row not in times]), strict=True):
            plot(axis, results, "gap_test_error", {row: f"C{number}" for number, row in enumerate(rows)})
            axis.set_ylabel(TITLES["gap_test_error"])
            legend(axis)
        return {"schedules": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *describe_setting(results.scale),
            _describe(results.scale),
            "In the upper rows, the rate drops to a tenth after the given share of the run, and again a quarter of the"
            " run later. In the lower rows, the initial rate and the drop after half of the run vary.",
        ]


def _times(results: StudyResults) -> list[str]:
    return [row for row in results.rows if row.startswith("drops at")]
