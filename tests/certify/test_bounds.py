"""The arithmetic of bounds against exact fractions: nothing is below the truth, and little is above."""

import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.certify.bounds import Bound, Error, Precision, Selection, TracedConstant, gamma, hypot, norm
from atoll.errors import InputError


@pytest.mark.parametrize("terms", [2, 10, 1000])
@pytest.mark.parametrize("unit", [2.0**-24, 2.0**-53])
def test_gamma_bounds_a_product_of_roundings(terms, unit):
    """A sum of n products has at most n roundings per product, up or down, and some are divided by."""
    u, bound = Fraction(unit), Fraction(gamma(terms, unit))
    worst = max((1 + u) ** terms - 1, 1 / (1 - u) ** terms - 1)
    assert worst * (1 - Fraction(1, 2**50)) <= bound <= worst * (1 + 2 * terms * u)  # gamma is itself rounded
    assert terms * u < bound  # the first order alone is not enough


def test_sums_that_are_too_long_have_no_bound():
    assert gamma(2**23 - 1, 2.0**-24) == pytest.approx(1, rel=1e-6)
    with pytest.raises(InputError, match="a sum of 8,388,608 terms is too long for this precision"):
        gamma(2**23, 2.0**-24)


def test_precision_is_that_of_the_number_format():
    """Half a unit in the last place of 1, the smallest normal number, and the largest number of IEEE 754."""
    assert Precision.of(torch.float32) == Precision(2.0**-24, 2.0**-126, (2 - 2.0**-23) * 2.0**127)
    assert Precision.of(torch.float64) == Precision(2.0**-53, 2.0**-1022, sys.float_info.max)
    with pytest.raises(InputError, match=r"certificates require float32 or float64, got torch\.bfloat16"):
        Precision.of(torch.bfloat16)


def test_errors_add_scale_and_join():
    one, two = Error(3.0, 5.0), Error(4.0, 12.0)
    assert one + two == Error(7.0, 17.0)
    assert one.times(2.0) == Error(6.0, 10.0)
    assert Error(math.inf, math.inf).times(0.0) == Error()  # nothing remains of what is multiplied by 0
    assert Error.joint([one, two]) == Error(5.0, 13.0)


def test_a_bound_is_by_default_that_of_the_input_itself():
    assert Bound() == Bound(lipschitz=1.0, offset=0.0, relative=0.0, absolute=0.0)
    assert Bound(2.0, 3.0, 4.0, 5.0).error == Error(4.0, 5.0)


def root(total):
    """Whether a float is the square root of a fraction, from above and within 1e-11."""
    return lambda value: total <= Fraction(value) ** 2 <= total * (1 + Fraction(1, 10**11))


numbers = st.floats(1e-3, 1e3)


@given(slopes=st.lists(numbers, min_size=1, max_size=6), scale=st.sampled_from([1.0, 1e-200, 1e200]))
def test_gain_is_the_root_of_the_sum_of_squared_slopes(slopes, scale):
    slopes = [scale * slope for slope in slopes]
    index = torch.ones(len(slopes), dtype=torch.float64)
    gain = Selection(index, torch.tensor(slopes, dtype=torch.float64)).gain
    assert root(sum(Fraction(slope) ** 2 for slope in slopes))(gain)


def test_gain_counts_only_the_entry_that_is_used_most():
    index = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 2.0]], dtype=torch.float64)
    slopes = torch.tensor([[90.0, 5.0, 1.0], [2.0, 80.0, 2.0]], dtype=torch.float64)
    assert Selection(index, slopes).gain == pytest.approx(5, rel=1e-11)
    assert Selection(index, 2.0).gain == pytest.approx(2 * 3**0.5, rel=1e-11)
    assert Selection(index).gain == pytest.approx(3**0.5, rel=1e-15)
    assert Selection(torch.tensor([2.0, 1.0, 4.0, 3.0])).gain == 1  # moving entries costs nothing
    assert Selection(None, slopes).gain == 90
    assert Selection(None, 0.25).gain == 0.25
    assert Selection(torch.zeros(3), 5.0).gain == 0  # constants
    assert Selection(index, math.inf).gain == math.inf
    assert Selection(torch.zeros(0)).gain == 0


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), power=st.sampled_from([0, 900, -900]))
def test_norm_is_above_the_exact_one(values, power):
    values = [value * 2.0**power for value in values]
    length = norm(torch.tensor(values, dtype=torch.float64))
    total = sum(Fraction(value) ** 2 for value in values)
    assert root(total)(length) or length < 1e-300


def test_norm_of_numbers_that_are_not_finite():
    assert norm(torch.tensor([])) == norm(torch.zeros(3)) == 0
    assert norm(torch.tensor([1.0, -math.inf])) == math.inf


def test_traced_constants_are_numbers_with_a_formula():
    two, three = TracedConstant(2.0, "two"), TracedConstant(3.0, "three")
    formula = hypot(2.0, 1.5 * two, three + 1)
    assert formula == pytest.approx(29**0.5)
    leaves = {"two": torch.tensor(4.0), "three": torch.tensor(11.0)}
    assert float(formula.evaluate(leaves)) == pytest.approx((4 + 36 + 144) ** 0.5)
    assert type(hypot(3.0, 4.0)) is float
