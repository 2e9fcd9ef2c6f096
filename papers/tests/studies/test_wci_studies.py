"""Verdicts of the studies of WCI on curves made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from atoll.studies import Cell, Study
from atoll.studies.base import Numbers
from atoll_papers.studies.learning_rates import EARLY, DropSchedules, WCIRate, differences, stopped_early
from atoll_papers.studies.wci_correlation import BETWEEN, CHANGES, LAST, WCICorrelation, correlations
from atoll_papers.studies.wci_curves import WCICurves, WCIParts
from made import made, outcomes

EPOCHS = [float(epoch) for epoch in range(2, 34, 2)]


def curves(index: list[float], gap: list[float], norm: list[float] | None = None) -> Numbers:
    norm = norm or [1.0] * len(index)
    return {
        "curves": {
            "epoch": EPOCHS[: len(index)],
            "wci": index,
            "gap_error": gap,
            "gap_loss": [3 * g for g in gap],
            "gap_test_error": gap,
            "learning_rate": [0.1] * len(index),
            "wci_weight_norm": norm,
            "wci_root_trace": [i / n for i, n in zip(index, norm, strict=True)],
        }
    }


def noise(cell: Cell, purpose: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng([len(cell.row), ord(cell.row[-1]), cell.seed, purpose]).normal(size=len(EPOCHS))


def together(cell: Cell) -> Numbers:
    """Whatever WCI does, the gap does, too."""
    index = 100 + 10 * noise(cell, 0)
    return curves(list(index), list(0.01 * index + 0.001 * noise(cell, 1)))


def only_time(cell: Cell) -> Numbers:
    """Both grow, and that is all they have in common."""
    ramp = np.arange(len(EPOCHS))
    return curves(list(100 + 10 * ramp + noise(cell, 0)), list(0.1 + 0.01 * ramp + 0.001 * noise(cell, 1)))


def apart(cell: Cell) -> Numbers:
    return curves(list(100 + noise(cell, 0)), list(0.1 + 0.01 * noise(cell, 1)))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (together, ["supported", "supported", "supported", "supported"]),
        (only_time, ["supported", "contradicted", "supported", "contradicted"]),
        (apart, ["contradicted", "contradicted", "contradicted", "contradicted"]),
    ],
)
def test_correlation(numbers: Callable[[Cell], Numbers], expected: list[str]) -> None:
    study = WCICorrelation()
    assert outcomes(study, made(study, numbers)) == expected


def test_correlations_are_those_of_the_pairs_they_name() -> None:
    found = made(WCICorrelation(), together)
    fits = correlations(found, "gap_error")
    runs = [numbers["curves"] for numbers in found.of("piecewise")]
    index, gap = (np.array([run[name] for run in runs]) for name in ("wci", "gap_error"))
    steps = [(row[:, 1:] - row[:, :-1]).ravel() for row in (index, gap)]
    assert fits[CHANGES].r == pytest.approx(stats.pearsonr(*steps).statistic)
    centred = [(row - row.mean(0)).ravel() for row in (index, gap)]
    assert fits[BETWEEN].r == pytest.approx(stats.pearsonr(*centred).statistic)
    last = [(n["curves"]["wci"][-1], n["curves"]["gap_error"][-1]) for n in found.numbers.values()]
    assert fits[LAST].n == len(last) == 12
    assert fits[LAST].r == pytest.approx(stats.pearsonr(*zip(*last, strict=True)).statistic)


@pytest.mark.parametrize(
    ("numbers", "expected"), [(together, "supported"), (only_time, "supported"), (apart, "contradicted")]
)
def test_curves(numbers: Callable[[Cell], Numbers], expected: str) -> None:
    study = WCICurves()
    assert outcomes(study, made(study, numbers)) == [expected, expected]


def factors(cell: Cell, norm: tuple[float, float], root: tuple[float, float]) -> Numbers:
    """Factors of the bound that change by e to these powers before and after the drop at epoch 16."""
    time = [(min(epoch, 16) - 2) / 14 for epoch in EPOCHS], [max(epoch - 16, 0) / 16 for epoch in EPOCHS]
    wobble = 1 + 0.01 * cell.seed
    sizes = [math.exp(wobble * (norm[0] * a + norm[1] * b)) for a, b in zip(*time, strict=True)]
    roots = [math.exp(root[0] * a + root[1] * b) for a, b in zip(*time, strict=True)]
    both = curves([s * r for s, r in zip(sizes, roots, strict=True)], EPOCHS, sizes)
    moved = {"weight_norm": (wobble * norm[0], wobble * norm[1]), "root_trace": root}
    names = {f"{part} {when}": two[k] for part, two in moved.items() for k, when in enumerate(("before", "after"))}
    return both | {"drop": 16.0} | names


@pytest.mark.parametrize(
    ("norm", "root", "expected"),
    [
        ((1.0, 0.1), (0.2, 0.8), ["supported", "supported"]),
        ((-1.0, 0.1), (0.2, -0.8), ["supported", "supported"]),  # sizes count, not directions
        ((0.1, 1.0), (-0.9, 0.1), ["contradicted", "contradicted"]),
    ],
)
def test_parts(norm: tuple[float, float], root: tuple[float, float], expected: list[str]) -> None:
    study = WCIParts()
    assert outcomes(study, made(study, lambda cell: factors(cell, norm, root))) == expected


def rates(cell: Cell, gains: dict[str, float], best: float = 0.0) -> Numbers:
    robust = 70 + cell.seed + gains.get(cell.row, 0.0) + 0.05 * noise(cell, 3)[0]
    found = only_time(cell) | {"last PGD-20": robust, "best PGD-20": robust + best, "last clean": 95.0}
    return found | {f"last {name}": series[-1] for name, series in found["curves"].items()}


@pytest.mark.parametrize(
    ("gains", "best", "expected"),
    [
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 0.0, ["supported", "supported"]),
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 3.0, ["contradicted", "supported"]),  # early stopping is better
        ({"rule, τ = 100": 2.0}, 0.0, ["contradicted", "contradicted"]),
    ],
)
def test_the_rule(gains: dict[str, float], best: float, expected: list[str]) -> None:
    study = WCIRate()
    assert outcomes(study, made(study, lambda cell: rates(cell, gains, best))) == expected


def test_early_stopping_is_the_best_checkpoint() -> None:
    found = made(WCIRate(), lambda cell: rates(cell, {}, best=3.0))
    more = stopped_early(found, "piecewise")
    assert more.values(EARLY, "last PGD-20") == found.values("piecewise", "best PGD-20")
    table = differences(more, [(EARLY, "piecewise")])
    (estimate, interval), *_ = table.rows.values()
    assert estimate.value == pytest.approx(3.0)  # type: ignore[union-attr]
    assert interval == "[3.00, 3.00]"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"1 of the rate, then 0.1 of it": 2.0}, ["supported", "supported"]),
        ({"drops at 0.5": 4.0, "0.1 of the rate, then 0.1 of it": 2.0}, ["contradicted", "contradicted"]),
    ],
)
def test_schedules(gains: dict[str, float], expected: list[str]) -> None:
    study = DropSchedules()
    assert outcomes(study, made(study, lambda cell: rates(cell, gains))) == expected


def anything(cell: Cell) -> Numbers:
    return rates(cell, {}) | factors(cell, (1.0, 0.1), (0.2, 0.8))


STUDIES: list[Study] = [WCICurves(), WCICorrelation(), WCIParts(), WCIRate(), DropSchedules()]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_lost_cells(study: Study) -> None:
    """Every row lost in turn, every row but its first seed, and all but one cell."""
    rows = list(dict.fromkeys(cell.row for cell in study.cells("cpu")))
    for row in rows[: len(rows) if len(rows) > 1 else 0]:
        assert outcomes(study, made(study, anything, lost=lambda cell, row=row: cell.row == row))  # type: ignore[misc]
    for lost in (lambda cell: cell.seed > 0, lambda cell: (cell.row, cell.seed) != (rows[-1], 1)):
        assert "supported" not in set(outcomes(study, made(study, anything, lost=lost)))


def test_a_run_that_ended_early_is_left_out() -> None:
    study = WCICorrelation()

    def numbers(cell: Cell) -> Numbers:
        found = together(cell)["curves"]
        return {"curves": {name: series[:5] if cell.seed == 1 else series for name, series in found.items()}}

    found = made(study, numbers)
    assert sum(name.startswith("seed ") for name in correlations(found, "gap_error")) == 5
