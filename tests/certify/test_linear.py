"""Linear maps and their products and sums against dense matrices, and their rounding errors against exact fractions."""

from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify.linear import Blocks, Convolution, Dense, Diagonal, convolution

SIZE = (4, 5)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(linear, shape):
    """The matrix of a map of values with this shape, by applying the operation to a basis."""
    n = torch.Size(shape).numel()
    basis = torch.eye(n, dtype=torch.float64).view(n, *shape)
    if isinstance(linear, Diagonal):
        result = basis * linear.weight
    elif isinstance(linear, Dense):
        result = basis @ linear.weight.T
    elif isinstance(linear, Blocks):
        parts = basis.chunk(len(linear.maps), 1)
        result = torch.cat([forward(part, each) for part, each in zip(linear.maps, parts, strict=True)], 1)
    else:
        result = forward(linear, basis)
    return result.flatten(1).T


def forward(linear, x):
    if not linear.adjoint:
        return F.conv2d(x, linear.weight, None, linear.stride, linear.padding)
    kernel = linear.weight.shape[2:]
    sizes = zip(linear.size, x.shape[2:], kernel, linear.stride, linear.padding, strict=True)
    missing = [size - ((out - 1) * s + k - 2 * p) for size, out, k, s, p in sizes]  # rows that no window reaches
    return F.conv_transpose2d(x, linear.weight, None, linear.stride, linear.padding, missing)


def windows(linear):
    """The shape of the results of a convolution."""
    places = zip(linear.size, linear.weight.shape[2:], linear.stride, linear.padding, strict=True)
    return (linear.weight.shape[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in places))


def ends(linear, shape=()):
    """The shapes of the inputs and outputs of a map; for matrices and diagonals, the shape of the inputs is given."""
    if isinstance(linear, Convolution):
        image = (linear.weight.shape[1], *linear.size)
        return (windows(linear), image) if linear.adjoint else (image, windows(linear))
    return shape, (*shape[:-1], len(linear.weight)) if isinstance(linear, Dense) else shape


def largest(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


@st.composite
def convolutions(draw):
    kernel, stride = (draw(st.tuples(st.integers(1, 4), st.integers(1, 3))) for _ in range(2))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = tuple(draw(st.integers(max(1, k - 2 * p), 8)) for k, p in zip(kernel, padding, strict=True))
    weight = random(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *kernel, seed=draw(st.integers(0, 10**6)))
    return Convolution(weight, size, stride, padding, draw(st.booleans()))


@settings(max_examples=100)
@given(linear=convolutions())
def test_spread_bounds_the_absolute_values_and_terms_count_the_products(linear):
    """Rounding errors are proportional to both."""
    matrix = dense(linear, ends(linear)[0]).abs()
    assert largest(matrix) <= linear.spread * (1 + 1e-12)
    assert linear.norm().value <= linear.spread * (1 + 2e-3)
    assert int((matrix > 0).sum(1).max()) <= linear.terms


@pytest.mark.parametrize("shape", [(9, 1), (1, 9), (5, 5), (3, 7)])
def test_spread_of_matrices(shape):
    """Of equal numbers, it is the norm; of others, between the norm and the square root of row sum times column sum."""
    assert Dense(torch.full(shape, -2.0).double()).spread == pytest.approx(2 * (shape[0] * shape[1]) ** 0.5)
    weight = random(*shape)
    sums = [float(weight.abs().sum(axis).max()) for axis in (0, 1)]
    assert largest(weight.abs()) <= Dense(weight).spread * (1 + 1e-12) <= (sums[0] * sums[1]) ** 0.5 * (1 + 1e-9)


def test_spread_is_the_norm_of_kernels_whose_windows_are_alike():
    weight = random(3, 2, 2, 2).abs()
    patches = Convolution(weight, (4, 6), (2, 2))
    assert patches.spread <= float(weight.norm()) * (1 + 1e-9)  # Frobenius
    ones = Convolution(torch.ones(2, 3, 3, 3).double(), (30, 30))
    assert ones.spread == pytest.approx(9 * 6**0.5)  # all windows see the same: Schur's test
    rows = Convolution(torch.tensor([[[[1.0, 2.0, 4.0]]], [[[8.0, 0.0, 1.0]]]]).double(), (1, 9), (1, 2))
    # A pixel meets the taps 0 and 2, or tap 1: column sums of 1 + 4 + 8 + 1 and 2; the largest row sum is 9.
    assert rows.spread == pytest.approx((14 * 9) ** 0.5)
    assert rows.spread < float(rows.weight.norm()) * 2**0.5


@pytest.mark.parametrize("adjoint", [False, True])
def test_terms_of_full_windows(adjoint):
    linear = Convolution(random(5, 2, 3, 3), (9, 9), adjoint=adjoint)
    assert linear.terms == (5 if adjoint else 2) * 9
    assert int((dense(linear, ends(linear)[0]) != 0).sum(1).max()) == linear.terms
    assert Dense(random(3, 7)).terms == 7


def vector(count, seed=9):
    return random(count, seed=seed)


# A map, the shape of its input, and diagonals that fit before and after it.
MAPS = {
    "dense": (Dense(random(3, 5)), (5,), vector(5), vector(3)),
    "square": (Dense(random(4, 4)), (4,), vector(4), vector(4)),
    "tokens": (Dense(random(3, 5)), (2, 5), vector(5), vector(3)),
    "convolution": (Convolution(random(3, 2, 3, 2), SIZE, (2, 1), (1, 0)), (2, *SIZE), vector(2), vector(3)),
    "square convolution": (Convolution(random(2, 2, 3, 3), SIZE, padding=(1, 1)), (2, *SIZE), vector(2), vector(2)),
    "adjoint": (Convolution(random(3, 2, 3, 2), SIZE, (2, 1), (1, 0), True), (3, 2, 4), vector(3), vector(2)),
    "square adjoint": (Convolution(random(2, 2, 3, 3), SIZE, (1, 1), (1, 1), True), (2, *SIZE), vector(2), vector(2)),
    "diagonal": (Diagonal(random(2, 1, 1)), (2, *SIZE), vector(2), vector(2)),
}


def per_channel(weight, linear):
    return Diagonal(weight.view(-1, 1, 1) if isinstance(linear, Convolution | Diagonal) else weight)


@pytest.mark.parametrize("name", MAPS)
def test_products_with_diagonals_are_products_of_matrices(name):
    linear, shape, before, behind = MAPS[name]
    matrix, (shape, rows) = dense(linear, shape), ends(linear, shape)
    numbers = Diagonal(torch.tensor(-3.0).double()), Diagonal(torch.tensor([0.7]).double())
    for first, second in ((per_channel(before, linear), per_channel(behind, linear)), numbers):
        cases = {
            "after": (linear.after(first), matrix @ dense(first, shape)),
            "scaled": (linear.scaled(second), second.weight.expand(rows).reshape(-1, 1) * matrix),
        }
        for result, truth in cases.values():
            torch.testing.assert_close(dense(result, shape), truth)
            assert largest(truth) * (1 - 1e-10) <= result.norm().value <= largest(truth) * 1.0011


def test_diagonals_that_are_not_one_number_per_channel_are_left_apart():
    """Even if they have the right length, such as one number per row of a square image."""
    linear, square = Convolution(random(4, 4, 1, 1), (4, 4)), Dense(random(4, 4))
    for weight in (vector(4).view(1, 4, 1), vector(4).view(1, 1, 4), random(4, 4, 4), random(4, 4, 1)):
        for result in (linear.after(Diagonal(weight)), linear.scaled(Diagonal(weight)), linear.plus(Diagonal(weight))):
            assert result is None
    for weight in (vector(4).view(4, 1), random(2, 4), vector(3)):
        for result in (square.after(Diagonal(weight)), square.scaled(Diagonal(weight)), square.plus(Diagonal(weight))):
            assert result is None
    assert Dense(random(3, 4)).plus(Diagonal(torch.ones(()).double())) is None
    blocks = convolution(random(4, 2, 3, 3), SIZE, (1, 1), (1, 1), (1, 1), 2)
    ones = Diagonal(torch.ones(()).double())
    assert [blocks.after(ones), blocks.scaled(ones), blocks.plus(blocks)] == [None] * 3


ONE = Diagonal(torch.tensor(-2.0).double())
SUMS = {
    "dense": (Dense(random(3, 5)), Dense(random(3, 5, seed=1)), (5,)),
    "dense and number": (Dense(random(4, 4)), ONE, (4,)),
    "dense and diagonal": (Dense(random(4, 4)), Diagonal(vector(4)), (4,)),
    "dense and diagonal for tokens": (Dense(random(4, 4)), Diagonal(vector(4).view(1, 4)), (2, 4)),
    "dense and number for tokens": (Dense(random(4, 4)), Diagonal(vector(1).view(1, 1)), (2, 4)),
    "diagonals": (Diagonal(vector(4)), ONE, (4,)),
    "convolution and number": (MAPS["square convolution"][0], ONE, (2, *SIZE)),
    "convolution and channels": (MAPS["square convolution"][0], Diagonal(vector(2).view(2, 1, 1)), (2, *SIZE)),
    "adjoint and number": (MAPS["square adjoint"][0], ONE, (2, *SIZE)),
    "kernels": (
        Convolution(random(3, 2, 5, 3), SIZE, padding=(2, 1)),
        Convolution(random(3, 2, 1, 3, seed=1), SIZE, padding=(0, 1)),
        (2, *SIZE),
    ),
    "crossed kernels": (
        Convolution(random(3, 2, 5, 1), SIZE, padding=(2, 0)),
        Convolution(random(3, 2, 1, 5, seed=1), SIZE, padding=(0, 2)),
        (2, *SIZE),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_sums_of_matrices(name):
    one, two, shape = SUMS[name]
    truth = dense(one, shape) + dense(two, shape)
    for total in (one.plus(two), two.plus(one)):
        if total is None:
            assert name == "crossed kernels"
            continue
        torch.testing.assert_close(dense(total, shape), truth)
        assert largest(truth) * (1 - 1e-10) <= total.norm().value <= largest(truth) * 1.0011


def test_kernels_that_do_not_meet_are_not_added():
    base = Convolution(random(2, 2, 3, 3), SIZE, padding=(1, 1))
    others = [
        Convolution(random(2, 2, 2, 3), SIZE, padding=(1, 1)),  # even
        Convolution(random(2, 2, 3, 3), SIZE, padding=(1, 2)),  # shifted
        Convolution(random(2, 2, 3, 3), SIZE, (2, 1), (1, 1)),
        Convolution(random(2, 2, 3, 3), (5, 4), padding=(1, 1)),
        Convolution(random(2, 2, 3, 3), SIZE, (1, 1), (1, 1), True),
        Convolution(random(3, 2, 3, 3), SIZE, padding=(1, 1)),
        Dense(random(5, 5)),
    ]
    assert [base.plus(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_with_groups_and_dilation(dilation, groups):
    weight, x = random(4, 4 // groups, 2, 2), random(1, 4, 5, 6)
    linear = convolution(weight, (5, 6), (1, 2), (1, 0), dilation, groups)
    truth = F.conv2d(x, weight, None, (1, 2), (1, 0), dilation, groups).flatten()
    matrix = dense(linear, (4, 5, 6))
    torch.testing.assert_close(matrix @ x.flatten(), truth)
    assert largest(matrix) <= linear.norm().value <= largest(matrix) * 1.0011
    assert largest(matrix.abs()) <= linear.spread


# --- rounding


def made(kind, value, error):
    weight = torch.tensor(value, dtype=torch.float64)
    if kind == "diagonal":
        return Diagonal(weight, error)
    if kind == "dense":
        return Dense(weight.view(1, 1), error)
    return Convolution(weight.view(1, 1, 1, 1), (1, 1), adjoint=kind == "adjoint", error=error)


KINDS = ("diagonal", "dense", "convolution", "adjoint")
NUMBERS = [-0.3, 1 / 3, 5e-7, 12345.678]


def signed(value, error):
    """The ends of all numbers that a rounded one may stand for."""
    return Fraction(value) - Fraction(error), Fraction(value) + Fraction(error)


def entry(linear):
    return Fraction(float(linear.weight.reshape(-1)[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("errors", [(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3), (1e-9, 1e-4)])
def test_errors_of_products_and_sums_cover_exact_results(kind, errors):
    """Maps of one number: the distance of the computed product or sum from every exact one."""
    for a, b in product(NUMBERS, NUMBERS):
        one, two = made(kind, a, errors[0]), made("diagonal", b, errors[1])
        exact = {
            "after": [s * t for s in signed(a, errors[0]) for t in signed(b, errors[1])],
            "scaled": [s * t for s in signed(a, errors[0]) for t in signed(b, errors[1])],
            "plus": [s + t for s in signed(a, errors[0]) for t in signed(b, errors[1])],
        }
        for name, values in exact.items():
            result = getattr(one, name)(two)
            worst = max(abs(value - entry(result)) for value in values)
            assert worst <= Fraction(result.error)
            # At most three times the exact error and a few roundings, so that nothing is counted too often.
            assert result.error <= 3 * worst + 2**-51 * (abs(Fraction(a)) + abs(Fraction(b))) * max(1, abs(Fraction(b)))
            if kind == "diagonal":  # other norms have a tolerance
                assert max(map(abs, values)) <= Fraction(result.norm().value)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_spreads_include_the_error(kind):
    for error in (0.5, 100.0):
        linear = made(kind, -2.0, error)
        assert 2 + error <= linear.norm().value <= 2.002 + error
        assert linear.spread == pytest.approx(2 + error)


@pytest.mark.parametrize("kind", ["dense", "convolution", "adjoint"])
def test_errors_of_sums_of_the_same_kind_cover_exact_results(kind):
    for (a, b), errors in product(product(NUMBERS, NUMBERS), [(0.0, 0.0), (1e-3, 1e-5)]):
        result = made(kind, a, errors[0]).plus(made(kind, b, errors[1]))
        worst = max(abs(s + t - entry(result)) for s in signed(a, errors[0]) for t in signed(b, errors[1]))
        assert worst <= Fraction(result.error) <= 3 * worst + 2**-51 * (abs(Fraction(a)) + abs(Fraction(b)))


def test_a_long_chain_of_factors_stays_above_the_exact_product():
    """The norm of a diagonal has no tolerance that could hide rounding."""
    total, exact, below = Diagonal(torch.tensor(1.0).double()), Fraction(1), 0
    for step in range(200):
        factor = 1 + 1 / (3 + step)
        total, exact = total.scaled(made("diagonal", factor, 0.0)), exact * Fraction(factor)
        assert exact <= Fraction(total.norm().value) <= exact * (1 + Fraction(1, 10**12))
        below += Fraction(float(total.weight)) < exact
    assert below > 20  # the computed product alone is not a bound


@pytest.mark.parametrize("power", [-400, -300, 300, 400])
def test_norms_of_any_scale(power):
    """Squares of the entries would underflow or overflow."""
    for linear, *_ in MAPS.values():
        scaled = type(linear)(linear.weight * 2.0**power, *list(vars(linear).values())[1:])
        assert scaled.norm().value == linear.norm().value * 2.0**power
        assert scaled.spread == pytest.approx(linear.spread * 2.0**power, rel=1e-12)
    assert Dense(torch.zeros(2, 3).double()).norm().value == Dense(torch.zeros(2, 3).double()).spread == 0
