"""Claims about handmade curves; correlations compared with SciPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.wci_correlation import BETWEEN, CHANGES, LAST, WCICorrelation, correlations
from study_cases import make_results, outcomes
from wci_cases import apart, only_time, together


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (together, ["supported", "supported", "supported", "supported"]),
        (only_time, ["supported", "contradicted", "supported", "contradicted"]),
        (apart, ["contradicted", "contradicted", "contradicted", "contradicted"]),
    ],
)
def test_claims(numbers: Callable[[Cell], Numbers], expected: list[str]) -> None:
    study = WCICorrelation()
    assert outcomes(study, make_results(study, numbers)) == expected


def test_correlations_are_those_of_the_pairs_they_name() -> None:
    results = make_results(WCICorrelation(), together)
    fits = correlations(results, "gap_error")
    runs = [numbers["curves"] for numbers in results.of("piecewise")]
    index, gap = (np.array([run[name] for run in runs]) for name in ("wci", "gap_error"))
    steps = [(row[:, 1:] - row[:, :-1]).ravel() for row in (index, gap)]
    assert fits[CHANGES].r == pytest.approx(stats.pearsonr(*steps).statistic)
    centred = [(row - row.mean(0)).ravel() for row in (index, gap)]
    assert fits[BETWEEN].r == pytest.approx(stats.pearsonr(*centred).statistic)
    last = [(n["curves"]["wci"][-1], n["curves"]["gap_error"][-1]) for n in results.numbers.values()]
    assert fits[LAST].n == len(last) == 12
    assert fits[LAST].r == pytest.approx(stats.pearsonr(*zip(*last, strict=True)).statistic)


def test_a_run_that_ended_early_is_left_out() -> None:
    study = WCICorrelation()

    def numbers(cell: Cell) -> Numbers:
        curves = together(cell)["curves"]
        return {"curves": {name: series[:5] if cell.seed == 1 else series for name, series in curves.items()}}

    results = make_results(study, numbers)
    assert sum(name.startswith("seed ") for name in correlations(results, "gap_error")) == 5
