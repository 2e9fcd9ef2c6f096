"""Intervals against SciPy, and numbers as text."""

import dataclasses
import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from atoll.errors import InputError
from atoll.stats import (
    NORMAL_95,
    Accuracy,
    Estimate,
    SampledAccuracy,
    hypergeometric_interval,
    percent,
    percent_interval,
)


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


def chance(count, drawn, marked, population):
    """The hypergeometric distribution, exactly."""
    ways = math.comb(marked, count) * math.comb(population - marked, drawn - count) if count <= drawn else 0
    return Fraction(ways, math.comb(population, drawn))


@pytest.mark.parametrize(("population", "drawn"), [(1, 1), (7, 3), (12, 12), (30, 10), (41, 1), (60, 45)])
def test_the_exact_interval_covers_every_number_of_marked_items(population, drawn):
    intervals = [hypergeometric_interval(count, drawn, population) for count in range(drawn + 1)]
    for marked in range(population + 1):
        inside = [count for count, (low, high) in enumerate(intervals) if low <= marked <= high]
        assert sum(chance(count, drawn, marked, population) for count in inside) >= Fraction(95, 100)
        for count, (low, high) in enumerate(intervals):
            if count <= marked <= population - (drawn - count):  # otherwise this count cannot occur
                least = sum(chance(k, drawn, marked, population) for k in range(count, drawn + 1))
                most = sum(chance(k, drawn, marked, population) for k in range(count + 1))
                assert (low <= marked <= high) == (min(least, most) > Fraction(1, 40))


@pytest.mark.parametrize("pilot", [0, 3])
def test_sampled_accuracies_are_unbiased(pilot):
    remaining, marked, sampled, total = 12, 5, 4, 20
    expected = Fraction(0)
    for first in range(pilot + 1):
        unknown, rest = remaining - pilot, marked - first
        for count in range(sampled + 1):
            value = SampledAccuracy(total, remaining, sampled, count, pilot, first).value
            weight = chance(first, pilot, marked, remaining) * chance(count, sampled, rest, unknown)
            expected += weight * Fraction(value)
    assert float(expected) == pytest.approx((remaining - marked) / total, abs=1e-12)


def test_a_complete_sample_is_exact():
    whole = SampledAccuracy(100, 60, 50, 7, 10, 2)
    assert whole.value == whole.at_most.value == 0.51
    assert whole.interval == (0.51, 0.51)
    nothing = SampledAccuracy(100, 0, 0, 0)
    assert (nothing.value, nothing.interval) == (0.0, (0.0, 0.0))
    assert nothing.p_value(0.01) == 1


def test_p_values_are_tails_of_the_binomial_distribution():
    share = Fraction(1, 10)
    tail = sum(math.comb(20, k) * share**k * (1 - share) ** (20 - k) for k in range(3, 21))
    assert SampledAccuracy(100, 50, 20, 3).p_value(0.1) == pytest.approx(float(tail), rel=1e-9)
    assert SampledAccuracy(100, 50, 20, 0).p_value(0.1) == 1


@pytest.mark.parametrize(
    "numbers", [(10, 11, 1, 0), (10, 5, 0, 0), (10, 5, 2, 3), (10, 5, 4, 1, 2, 0), (10, 5, 2, 1, 1, 2)]
)
def test_samples_that_do_not_fit_together_are_refused(numbers):
    with pytest.raises(InputError, match="expected numbers that fit together"):
        SampledAccuracy(*numbers)


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(346.6, 163.2), "347 ± 163"),
        (Estimate(1e6, 1.0), "1e+06 ± 1"),  # two digits of the error would show seven of the value
        (Estimate(1.0, 1e-7), "1 ± 1e-07"),
        (Estimate(0.0, 5e-7), "0 ± 5e-07"),
        (Estimate(1.0, math.inf), "1 ± inf"),
        (Estimate(2.0), "2"),
    ],
)
def test_estimates_show_two_digits_of_their_error(estimate, text):
    assert str(estimate) == text


@pytest.mark.parametrize(
    ("estimate", "error"),
    [(Estimate(4.0, 1.0), 0.25), (Estimate(-4.0, 1.0), 0.25), (Estimate(0.0, 1.0), math.inf), (Estimate(0.0), 0.0)],
)
def test_relative_errors(estimate, error):
    assert estimate.relative_error == error


def test_estimates_in_notebooks_and_files():
    assert Estimate(2.0, 0.1)._repr_html_() == "2.00 ± 0.10 (95 %: 1.804 to 2.196)"
    assert Estimate(2.0)._repr_html_() == "2"
    assert Estimate(2.0, freedom=3).to_json() == {
        "value": 2.0, "standard_error": 0.0, "skewed": False, "freedom": 3, "interval": [2.0, 2.0],
    }  # fmt: skip
    unknown = Estimate(math.nan, math.nan).to_json()
    assert (unknown["value"], unknown["standard_error"], unknown["interval"]) == (None, None, [None, None])


def test_the_upper_end_of_a_skewed_interval_is_on_a_logarithmic_scale_if_it_is_finite():
    almost, beyond = (Estimate(1.0, half / NORMAL_95, skewed=True).interval[1] for half in (99.5, 100.5))
    assert almost == pytest.approx(math.exp(99.5))
    assert beyond == pytest.approx(101.5)


def test_means_of_few_values():
    assert Estimate.mean_of(torch.tensor([1.0, 3.0])) == Estimate(2.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single = Estimate.mean_of(torch.tensor([1.0]))
    assert single.value == 1
    assert math.isnan(single.standard_error)


def test_accuracies_in_percent():
    assert percent(Accuracy(7, 8)) == "87.50"
    assert percent_interval(Accuracy(90, 100)) == ["90.00", "82.6-94.5"]


@pytest.mark.parametrize("number", [Accuracy(1, 2), Estimate(1.0), SampledAccuracy(10, 5, 5, 0)])
def test_numbers_do_not_change(number):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(number, dataclasses.fields(number)[0].name, 1)
