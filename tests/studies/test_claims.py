"""Claims about handmade numbers; intervals compared with SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from atoll.studies import Cell, StudyResults
from atoll.studies.claims import (
    Difference,
    claim_above,
    claim_at_least,
    claim_equivalent,
    claim_increase,
    claim_means,
    claim_share,
    pseudo_values,
)

values = st.lists(st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=3, max_size=6).filter(
    lambda v: max(v) - min(v) > 0.01
)


@given(values)
def test_intervals_are_students(each: list[float]) -> None:
    difference = Difference.of(each)
    truth = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((truth.low, truth.high), abs=1e-6)


limits = st.sampled_from([(0.0, math.inf), (-math.inf, 3.0), (-20.0, 20.0), (5.0, 6.0)])
several = st.lists(values, min_size=1, max_size=4).map(lambda lists: dict(zip("abcd", lists, strict=False)))
RANKS = ("contradicted", "inconclusive", "supported")


@given(values, st.floats(-5, 5))
def test_outcomes_of_one_mean_are_tests_at_a_fortieth(each: list[float], limit: float) -> None:
    """Supported and contradicted are exactly the one-sided tests at 2.5 %; signs do not matter."""
    above, below = (stats.ttest_1samp(each, limit, alternative=side).pvalue for side in ("greater", "less"))
    claim = claim_above("more", {"a": each}, limit)
    if min(abs(above - 0.025), abs(below - 0.025)) > 1e-6:
        expected = "supported" if above < 0.025 else "contradicted" if below < 0.025 else "inconclusive"
        assert claim.outcome == expected
        mirrored = claim_above("less", {"a": [-v for v in each]}, -limit, sign=-1)
        assert mirrored.outcome == claim.outcome


@given(values, st.floats(0.01, 50))
def test_equivalence_is_two_one_sided_tests(each: list[float], within: float) -> None:
    """Supported: both tests against the ends of the margin reject at 2.5 %.  Contradicted: the mean is beyond one."""
    numbers = {Cell(row, seed): {"x": v * (row == "a")} for row in "ab" for seed, v in enumerate(each)}
    claim = claim_equivalent("alike", StudyResults("cpu", numbers), "ab", "x", within)
    p = {
        (end, side): float(stats.ttest_1samp(each, end, alternative=side).pvalue)
        for end in (-within, within)
        for side in ("greater", "less")
    }
    if all(abs(value - 0.025) > 1e-6 for value in p.values()):
        alike = max(p[-within, "greater"], p[within, "less"]) < 0.025
        beyond = min(p[-within, "less"], p[within, "greater"]) < 0.025
        assert claim.outcome == ("supported" if alike else "contradicted" if beyond else "inconclusive")


@given(several, limits)
def test_all_support_and_any_contradicts(each: dict[str, list[float]], within: tuple[float, float]) -> None:
    """By brute force over the means: no correction for all of them, Bonferroni's for any of them."""
    claim = claim_means("claim", each, dict.fromkeys(each, within))
    low, high = within
    plain = [stats.t.interval(0.95, len(v) - 1, np.mean(v), stats.sem(v)) for v in each.values()]
    wide = [stats.t.interval(1 - 0.05 / len(each), len(v) - 1, np.mean(v), stats.sem(v)) for v in each.values()]
    inside = all(low < a and b < high for a, b in plain)
    outside = any(b <= low or a >= high for a, b in wide)
    assert not (inside and outside)
    ends = np.array([*plain, *wide])
    if min(abs(ends - low).min(), abs(ends - high).min()) > 1e-6:
        assert claim.outcome == ("supported" if inside else "contradicted" if outside else "inconclusive")
    assert claim.smallest_effect == pytest.approx(max((b - a) / 2 for a, b in plain))
    assert claim.message.count("[") == len(each)
    assert f"smallest detectable effect {claim.smallest_effect:.2g}" in claim.message


@given(several, st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_shifts_move_from_contradicted_to_supported(each: dict[str, list[float]], shifts: list[float]) -> None:
    moved = [claim_above("more", {n: [v + s for v in vs] for n, vs in each.items()}) for s in sorted(shifts)]
    ranks = [RANKS.index(claim.outcome) for claim in moved]
    assert ranks == sorted(ranks)
    extremes = [claim_above("more", {n: [v + s for v in vs] for n, vs in each.items()}) for s in (-1e5, 1e5)]
    assert [claim.outcome for claim in extremes] == ["contradicted", "supported"]


@given(several, limits)
def test_the_stated_number_of_seeds_decides(each: dict[str, list[float]], within: tuple[float, float]) -> None:
    """Data repeated until there are that many have the same mean and hardly another spread."""
    claim = claim_means("claim", each, dict.fromkeys(each, within))
    assert (claim.seeds_needed is not None) <= (claim.outcome == "inconclusive")
    if claim.outcome == "inconclusive" and claim.seeds_needed is None:
        assert "more than 1000 seeds would decide" in claim.message
    elif claim.outcome == "inconclusive":
        needed = claim.seeds_needed
        assert needed is not None
        assert needed > min(map(len, each.values()))
        assert f"{needed} seeds would decide" in claim.message
        repeated = {name: v * math.ceil(needed / len(v)) for name, v in each.items()}
        assert claim_means("claim", repeated, dict.fromkeys(each, within)).outcome != "inconclusive"


def test_one_seed_less_does_not_decide() -> None:
    """The number is the smallest one, for values whose spread is the same at every number."""
    claim = claim_above("more", {"a": [0.0, 2.0, 1.0, 1.0, -1.0, 3.0]}, 0.2)
    needed, spread = claim.seeds_needed, stats.tstd([0.0, 2.0, 1.0, 1.0, -1.0, 3.0])
    assert needed is not None
    half = {n: stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (needed - 1, needed)}
    assert half[needed] < 0.8 <= half[needed - 1]


@pytest.mark.parametrize(
    ("each", "outcome"),
    [
        ({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1]}, "supported"),
        ({"a": [1.0, 1.1, 1.2], "b": [2.0, -1.0]}, "inconclusive"),
        ({"a": [1.0, 1.1, 1.2], "b": [-2.0, 1.0]}, "inconclusive"),  # was contradicted, with ±19
        ({"a": [1.0, 1.1, 1.2], "b": [-2.0, -2.1]}, "contradicted"),
        ({"a": [-2.0, 1.0, 2.0], "b": [-2.0, -2.1]}, "contradicted"),  # one is enough
        ({"a": [1.0, 1.1, 1.2], "b": [-1.0, -0.5, -1.2]}, "inconclusive"),  # -0.9 ± 0.9, but one of two
        ({"a": [1.0, 1.1, 1.2], "b": [2.0]}, "not testable"),
        ({"a": [1.0, 1.1, 1.2], "b": []}, "not testable"),
        ({"a": [1.0, 1.1, math.nan]}, "not testable"),
        ({}, "not testable"),
    ],
)
def test_all_rows_have_to_support(each: dict[str, list[float]], outcome: str) -> None:
    assert claim_above("more", each).outcome == outcome


def test_contradictions_by_one_of_several_are_corrected() -> None:
    """The same differences contradict alone, but not as one of two; the message says why."""
    values = [-1.3, -0.5, -1.2, -0.3]
    alone = claim_above("more", {"b": values})
    both = claim_above("more", {"a": [1.0, 1.1, 1.2], "b": values})
    assert (alone.outcome, both.outcome) == ("contradicted", "inconclusive")
    assert "an interval of 97.5 % outside" in both.message


def test_only_seeds_of_both_rows_count() -> None:
    numbers = {Cell("a", 0): 1.0, Cell("a", 1): 2.0, Cell("a", 2): 9.0, Cell("b", 1): 1.0, Cell("b", 0): 0.0}
    results = StudyResults("cpu", {cell: {"x": value} for cell, value in numbers.items()} | {Cell("b", 2): {"x": None}})
    assert results.paired("a", "b", "x") == [1.0, 1.0]
    assert claim_increase("more", results, [("a", "b")], "x").outcome == "supported"
    assert claim_increase("more", results, [("a", "b")], "x", 1.5).outcome == "contradicted"
    assert claim_increase("not much less", results, [("b", "a")], "x", -1.5).outcome == "supported"
    assert claim_increase("more", results, [("a", "c")], "x").outcome == "not testable"


def test_messages_have_the_sign_of_the_difference() -> None:
    claim = claim_above("less", {"a against b": [-1.0, -1.0]}, sign=-1)
    assert claim.outcome == "supported"
    assert claim.message == "a against b: -1.00 [-1.00, -1.00]; smallest detectable effect 0"
    assert math.isinf(Difference.of([1.0]).high)


@pytest.mark.parametrize(
    ("good", "cases", "outcome"),
    [
        (6, 6, "supported"),
        (5, 5, "inconclusive"),  # by chance in one of 32
        (5, 6, "inconclusive"),
        (11, 12, "supported"),
        (1, 12, "contradicted"),
        (0, 5, "inconclusive"),
        (1, 1, "not testable"),
    ],
)
def test_share(good: int, cases: int, outcome: str) -> None:
    assert claim_share("claim", good, cases, "message").outcome == outcome


@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_shares_are_exact_tests(counts: tuple[int, int]) -> None:
    good, cases = counts
    claim = claim_share("claim", good, cases, "message")
    above, below = (stats.binom.sf(good - 1, cases, 0.5), stats.binom.cdf(good, cases, 0.5))
    expected = "supported" if above < 0.025 else "contradicted" if below < 0.025 else "inconclusive"
    assert claim.outcome == expected
    if claim.seeds_needed is not None:
        times = math.ceil(claim.seeds_needed / cases)
        assert claim_share("claim", good * times, cases * times, "message").outcome != "inconclusive"


@pytest.mark.parametrize("rows", ["abc", "cab"])
@pytest.mark.parametrize(
    ("seeds", "apart", "spread", "expected"),
    [
        (3, 1.0, 0.0, "contradicted"),
        (3, 0.4, 0.0, "supported"),
        (3, 0.0, 0.4, "inconclusive"),  # no difference, but nothing shows that there is none
        (1, 0.4, 0.0, "not testable"),
    ],
)
def test_differences_to_either_side(rows: str, seeds: int, apart: float, spread: float, expected: str) -> None:
    numbers = {
        Cell(row, seed): {"x": seed + (row == "c") * (apart + spread * (seed - 1))}
        for row in "abc"
        for seed in range(seeds)
    }
    claim = claim_equivalent("All the same", StudyResults("cpu", numbers), rows, "x", 0.5)
    assert claim.outcome == expected
    assert claim.message.count("against") == (3 if seeds > 1 else 0)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([3.0, 3.1, 3.2], "supported"),
        ([1.0, 5.0, 2.0], "inconclusive"),
        ([1.0, 1.1, 1.2], "contradicted"),
        ([3.0], "not testable"),
        ([], "not testable"),
    ],
)
def test_at_least(values: list[float], outcome: str) -> None:
    results = StudyResults("cpu", {Cell("a", seed): {"x": value} for seed, value in enumerate(values)})
    assert claim_at_least("more than published", results, {"a": 2.0}, "x").outcome == outcome


@given(values)
def test_pseudo_values_of_the_variance(each: list[float]) -> None:
    """The jackknife of the variance with denominator n is the unbiased variance, a closed form."""
    mean = np.mean(pseudo_values(lambda v: float(np.var(v)), each))
    assert mean == pytest.approx(np.var(each, ddof=1), rel=1e-6, abs=1e-9)


def test_pseudo_values_of_a_correlation_cover() -> None:
    """The interval of Fisher's z over 12 runs covers the true correlation about as often as it says."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(400):
        x = draw.normal(size=12)
        runs = list(zip(x, 0.6 * x + 0.8 * draw.normal(size=12), strict=True))
        interval = Difference.of(pseudo_values(lambda r: float(np.arctanh(np.corrcoef(np.array(r).T)[0, 1])), runs))
        covered += interval.low < math.atanh(0.6) < interval.high
    assert covered > 360  # 95 % would be 380
