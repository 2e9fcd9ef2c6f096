"""Means and differences over seeds."""

from __future__ import annotations

import math

import pytest

from atoll.studies import Cell, StudyResults


def test_means_over_seeds() -> None:
    results = StudyResults("smoke", {Cell("a", 0): {"x": 1.0}, Cell("a", 1): {"x": 3.0}, Cell("a", 2): {"x": None}})
    mean = results.mean("a", "x", 100)
    assert mean is not None
    assert (mean.value, mean.standard_error) == pytest.approx((200.0, 100.0))
    assert results.mean("a", "y") is None


def test_pairs_leave_out_missing_values() -> None:
    numbers = {Cell("a", 0): {"x": 1.0}, Cell("a", 1): {"x": None}, Cell("b", 0): {"x": 3.0}, Cell("b", 1): {"x": 2.0}}
    results = StudyResults(
        "smoke",
        numbers | {Cell("a", 2): {}, Cell("b", 2): {"x": 5.0}, Cell("a", 3): {"x": math.nan}, Cell("b", 3): {"x": 1.0}},
    )
    assert results.paired("b", "a", "x") == [2.0]
    assert results.paired("b", "a", "x", of=lambda x: x**2) == [8.0]
