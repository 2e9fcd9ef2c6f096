"""Claims about handmade curves; correlations compared with SciPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.wci_correlation import (
    BETWEEN,
    CHANGES,
    LAST,
    WCICorrelation,
    better_than_factors,
    correlations,
    explained_at_the_end,
)
from study_cases import make_results, outcomes
from wci_cases import apart, only_time, opposite, product, together


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # In the first three, WCI is the root of the trace and the norm constant, so WCI explains as much as the trace.
        (together, ["supported", "supported", "contradicted", "contradicted"] * 2),
        (only_time, ["supported", "inconclusive", "contradicted", "contradicted"] * 2),
        (apart, ["contradicted", "inconclusive", "contradicted", "contradicted"] * 2),
        (opposite, ["contradicted", "contradicted", "contradicted", "contradicted"] * 2),
        (product, ["supported", "supported", "supported", "inconclusive"] * 2),  # twelve runs are too few at the end
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


def test_enough_runs_tell_wci_from_its_factors_at_the_end() -> None:
    draw = np.random.default_rng(0)
    norm, root = np.exp(0.3 * draw.normal(size=(2, 60, 5)))
    runs = np.stack([norm * root, norm, root, norm * root + 0.1 * draw.normal(size=(60, 5))], 1)
    claims = better_than_factors(runs, list(runs[:, None, :, -1:]), "robust error")
    assert [claim.outcome for claim in claims] == ["supported", "supported"]
    assert explained_at_the_end(runs, 1) == pytest.approx(
        stats.pearsonr(runs[:, 1, -1], runs[:, -1, -1]).statistic ** 2
    )
    by_norm = runs.copy()
    by_norm[:, -1] = norm  # the gap follows the norm alone
    claims = better_than_factors(by_norm, list(by_norm[:, None, :, -1:]), "robust error")
    assert [claim.outcome for claim in claims] == ["contradicted", "contradicted"]


def test_runs_with_the_same_seed_are_not_independent() -> None:
    """The jackknife leaves out a seed with all its runs: copies of runs do not make the interval shorter."""
    draw = np.random.default_rng(1)
    runs = list(draw.normal(size=(8, 1, 4, 1)))
    copies = [np.concatenate([run, run, run]) for run in runs]
    one, three = (better_than_factors(np.empty((0, 4, 0)), seeds, "error")[1] for seeds in (runs, copies))
    assert one.smallest_effect == pytest.approx(three.smallest_effect)


def test_a_run_that_ended_early_is_left_out() -> None:
    study = WCICorrelation()

    def numbers(cell: Cell) -> Numbers:
        curves = together(cell)["curves"]
        return {"curves": {name: series[:5] if cell.seed == 1 else series for name, series in curves.items()}}

    results = make_results(study, numbers)
    assert sum(name.startswith("seed ") for name in correlations(results, "gap_error")) == 5
