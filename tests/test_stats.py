"""Intervals against SciPy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from atoll.errors import InputError
from atoll.stats import Accuracy, Estimate


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_wilsons(counts):
    correct, total = counts
    expected = binomtest(correct, total).proportion_ci(0.95, method="wilson")
    assert Accuracy(correct, total).interval == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_an_accuracy_prints_its_interval_and_has_no_standard_error():
    accuracy = Accuracy(30, 400)
    assert repr(accuracy) == "7.50 % [5.3, 10.5]"
    assert not hasattr(accuracy, "standard_error")
    assert set(accuracy.to_json()) == {"value", "interval", "correct", "total"}


@pytest.mark.parametrize(("correct", "total"), [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(correct, total):
    with pytest.raises(InputError, match="expected 0 <= correct <= total"):
        Accuracy(correct, total)


def test_no_points_give_no_number():
    assert math.isnan(Accuracy(0, 0).value)
    assert all(map(math.isnan, Accuracy(0, 0).interval))


def test_estimates_without_an_error_are_exact():
    assert Estimate(2.0).interval == (2.0, 2.0)
    assert Estimate(2.0).relative_error == 0
