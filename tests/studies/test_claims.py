"""Claims about handmade numbers; intervals compared with SciPy."""

from __future__ import annotations

import math

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
    claim_unanimous,
)

values = st.lists(st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=3, max_size=6).filter(
    lambda v: max(v) - min(v) > 0.01
)


@given(values)
def test_intervals_are_students(each: list[float]) -> None:
    difference = Difference.of(each)
    truth = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((truth.low, truth.high), abs=1e-6)


@given(values, st.floats(-5, 5))
def test_supported_means_significant(each: list[float], limit: float) -> None:
    """A claim is supported exactly if a one-sided test at 2.5 % is significant; signs do not matter."""
    p = stats.ttest_1samp(each, limit, alternative="greater").pvalue
    claim = claim_above("more", {"a": each}, limit)
    if abs(p - 0.025) > 1e-6:
        assert (claim.outcome == "supported") == (p < 0.025)
    mirrored = claim_above("less", {"a": [-v for v in each]}, -limit, sign=-1)
    assert mirrored.outcome == claim.outcome


@pytest.mark.parametrize(
    ("each", "outcome"),
    [
        ({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1]}, "supported"),
        ({"a": [1.0, 1.1, 1.2], "b": [2.0, -1.0]}, "supported in part"),
        ({"a": [1.0, 1.1, 1.2], "b": [-2.0, 1.0]}, "contradicted"),
        ({"a": [1.0, 1.1, 1.2], "b": [2.0]}, "not testable"),
        ({"a": [1.0, 1.1, 1.2], "b": []}, "not testable"),
        ({}, "not testable"),
    ],
)
def test_the_weakest_row_decides(each: dict[str, list[float]], outcome: str) -> None:
    assert claim_above("more", each).outcome == outcome


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
    assert claim.message == "a against b: -1.00 [-1.00, -1.00]"
    assert math.isinf(Difference.of([1.0]).high)


@pytest.mark.parametrize(("good", "outcome"), [(4, "supported"), (3, "supported in part"), (2, "contradicted")])
def test_unanimous(good: int, outcome: str) -> None:
    assert claim_unanimous("claim", good, 4, "message").outcome == outcome


@pytest.mark.parametrize("rows", ["abc", "cab"])
@pytest.mark.parametrize(
    ("seeds", "apart", "expected"), [(3, 1.0, "contradicted"), (3, 0.4, "supported"), (1, 0.4, "not testable")]
)
def test_differences_to_either_side(rows: str, seeds: int, apart: float, expected: str) -> None:
    numbers = {Cell(row, seed): {"x": seed + apart * (row == "c")} for row in "abc" for seed in range(seeds)}
    claim = claim_equivalent("All the same", StudyResults("cpu", numbers), rows, "x", 0.5)
    assert claim.outcome == expected
    assert claim.message.count("against") == (3 if seeds > 1 else 0)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([3.0, 3.1, 3.2], "supported"),
        ([1.0, 5.0, 2.0], "supported in part"),
        ([1.0, 1.1, 1.2], "contradicted"),
        ([3.0], "not testable"),
        ([], "not testable"),
    ],
)
def test_at_least(values: list[float], outcome: str) -> None:
    results = StudyResults("cpu", {Cell("a", seed): {"x": value} for seed, value in enumerate(values)})
    assert claim_at_least("more than published", results, {"a": 2.0}, "x").outcome == outcome
