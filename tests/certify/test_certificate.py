"""Certificates of inputs that are rounded to the precision of the network, in exact fractions."""

import math
from fractions import Fraction

import pytest
import torch

from atoll.certify.certificate import Certificate, rounded_inputs

SINGLE, DOUBLE = torch.float32, torch.float64


def corrected(radius, size, given=DOUBLE, dtype=SINGLE):
    numbers = (torch.tensor([value], dtype=torch.float64) for value in (radius, size))
    return float(rounded_inputs(*numbers, given, dtype))


@pytest.mark.parametrize("radius", [1e-6, 1e-3, 0.7, 50.0])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e5])
def test_radii_survive_the_rounding_of_both_inputs(radius, size):
    """An input x moves by up to u |x| when it is rounded, and a neighbor at distance r by up to u (|x| + r)."""
    result, unit = Fraction(corrected(radius, size)), Fraction(1, 2**24)
    if result:
        farthest = result + unit * Fraction(size) + unit * (Fraction(size) + result)
        assert Fraction(radius) * (1 - Fraction(1, 10**6)) - unit * Fraction(size) / 10 <= farthest <= Fraction(radius)
    else:
        assert radius <= 2.1 * 2.0**-24 * size


def test_radii_of_inputs_that_are_not_rounded_stay():
    for given, dtype in ((SINGLE, SINGLE), (DOUBLE, DOUBLE), (SINGLE, DOUBLE)):
        assert corrected(0.3, 100.0, given, dtype) == 0.3


def test_a_radius_lost_to_rounding_is_zero():
    assert corrected(1e-7, 1.0) == 0  # less than 2 u
    assert corrected(math.inf, 1.0) == math.inf


def test_only_positive_radii_hold():
    certificate = Certificate(torch.tensor([4, 5, 6]), torch.tensor([0.0, 0.2, 0.3]).double())
    assert certificate.holds(0.0).tolist() == [False, True, True]
    assert certificate.holds(float(certificate.radius[1])).tolist() == [False, True, True]
    assert certificate.answer(0.25).tolist() == [-1, -1, 6]
