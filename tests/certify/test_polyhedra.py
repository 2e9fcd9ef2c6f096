"""Dual bounds of distances against the same dual function in exact fractions, and the speed of the ascent."""

from fractions import Fraction

import pytest
import torch

from atoll.certify.polyhedra import Dual, ascend, distance_bounds

CASES = 40


def problem(offset, *, boxed, gain=1.0, own=1, features=3, seed=0):
    """Centroids around a point far from the origin; numbers are multiples of 2**-20, so that margins are exact."""
    draw = torch.Generator().manual_seed(seed)

    def near(*shape):
        steps = torch.randint(-(2**20), 2**20, (CASES, *shape, features), generator=draw)
        return offset + steps.double() / 2**20

    z, p, c = near(), near(own), near(1)
    squares = [(z[:, None] - each).square().sum(2) for each in (c, p)]
    margin = gain**2 * (squares[0][:, :, None] - squares[1][:, None])
    low = torch.full_like(z, -0.25 if boxed else -torch.inf)[:, None]
    return Dual(p, c, margin, low, -low, torch.tensor([gain]).double())


def exact_dual(dual, row, multipliers):
    """q of one point and one centroid, without rounding."""
    fractions = [[Fraction(float(v)) for v in vector] for vector in (*dual.own[row], dual.other[row, 0])]
    *own, other = fractions
    weights = [Fraction(float(v)) for v in multipliers[row, 0]]
    gain = Fraction(float(dual.gain))
    total = sum(weight * Fraction(float(s)) for weight, s in zip(weights, dual.margin[row, 0], strict=True))
    for i, coordinate in enumerate(other):
        v = 2 * sum(weight * (p[i] - coordinate) for weight, p in zip(weights, own, strict=True))
        move = -gain * v
        low, high = (float(end[row, 0, i]) for end in (dual.low, dual.high))
        if low > -torch.inf:
            move = max(Fraction(low), min(Fraction(high), move))
        total += move * move / 2 + v * gain * move
    return total


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("gain", [1.0, 4.0])
@pytest.mark.parametrize("offset", [0.0, 2.0**16])
def test_no_bound_is_above_the_exact_dual_function(offset, gain, boxed):
    """Far from the origin, rounding of the multipliers' sum decides; many computed values alone are too large."""
    dual, above = problem(offset, boxed=boxed, gain=gain, own=2), 0
    dual = dual.take((dual.margin > 0).all(2).squeeze(1).nonzero().squeeze(1))
    _, multipliers = ascend(dual, torch.full_like(dual.margin[:, :, 0], torch.inf), steps=20)
    bounds = dual.bound(multipliers)
    v = dual.slope(multipliers)
    move = (-dual.gain * v).clamp(dual.low, dual.high)
    computed = (multipliers * dual.margin).sum(2) + (move * move / 2 + v * dual.gain * move).sum(2)
    assert len(dual.own) > 5
    for row in range(len(dual.own)):
        exact = exact_dual(dual, row, multipliers)
        assert Fraction(float(bounds[row, 0])) ** 2 <= 2 * max(Fraction(0), exact)
        above += Fraction(float(computed[row, 0])) > exact
        if offset == 0:
            assert float(bounds[row, 0]) ** 2 >= 2 * float(exact) * (1 - 1e-9)
    assert above > 0


def test_without_steps_the_bound_is_that_of_the_farthest_plane():
    """The distance of a plane is the difference of squared distances by twice the distance of the centroids."""
    dual = problem(0.0, boxed=False, own=6, features=4)
    bound, _ = ascend(dual, torch.full_like(dual.margin[:, :, 0], torch.inf), steps=0)
    planes = dual.margin[:, 0] / (2 * (dual.own - dual.other).norm(dim=2))
    torch.testing.assert_close(bound[:, 0], planes.amax(1).clamp_min(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("own", "features"), [(6, 4), (12, 6), (24, 10)])
def test_the_ascent_is_accelerated(own, features):
    """Momentum with restarts: 100 steps leave a tiny part of the error of the best single plane."""
    dual = problem(0.0, boxed=False, own=own, features=features)
    dual = dual.take((dual.margin > 0).all(2).squeeze(1).nonzero().squeeze(1))
    goal = torch.full_like(dual.margin[:, :, 0], torch.inf)
    single, some, best = (ascend(dual, goal, steps=steps)[0] for steps in (0, 100, 2000))
    assert (single <= some).all()
    assert (some <= best * (1 + 1e-9)).all()
    assert float((best - some).mean()) < 1e-5 * float((best - single).mean())


@pytest.mark.parametrize("gain", [1.0, 4.0])
def test_the_documented_rounding_error_is_subtracted(gain):
    """More than gamma (lambda |s| + 3 g^2 V^2), for multipliers of all sizes."""
    dual = problem(1000.0, boxed=False, gain=gain, own=2)
    lengths = dual.own.norm(dim=2)[:, None] + dual.other.norm(dim=2)[..., None]
    for size in (1e-5, 2 * gain / float(lengths.mean()), 1.0):
        multipliers = size * torch.rand(CASES, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        large = torch.full_like(dual.margin, 400 * size)  # so that the bound is positive
        shifted = Dual(dual.own, dual.other, large, dual.low, dual.high, dual.gain)
        bounds = shifted.bound(multipliers)
        for row in range(0, CASES, 8):
            weights, margins = multipliers[row, 0].tolist(), large[row, 0].tolist()
            reach = 2 * sum(w * float(length) for w, length in zip(weights, lengths[row, 0], strict=True))
            total = sum(w * abs(s) for w, s in zip(weights, margins, strict=True)) + 3 * (gain * reach) ** 2
            documented = Fraction((2 + 3) * 2.0**-53 * total)
            assert Fraction(float(bounds[row, 0])) ** 2 / 2 <= exact_dual(shifted, row, multipliers) - documented


def test_points_that_reach_their_goal_stop():
    dual = problem(0.0, boxed=False, own=6, features=4)
    arguments = dual.own, dual.other, dual.margin, dual.low.squeeze(1), dual.high.squeeze(1)
    single = distance_bounds(*arguments, torch.zeros(CASES, 1).double())
    mixed = torch.zeros(CASES, 1).double()
    mixed[::2] = torch.inf
    bounds = distance_bounds(*arguments, mixed)
    assert torch.equal(bounds[1::2], single[1::2])
    full = distance_bounds(*arguments, torch.full_like(mixed, torch.inf))
    torch.testing.assert_close(bounds[::2], full[::2])
    assert (bounds[::2] > single[::2] + 1e-6).any()
