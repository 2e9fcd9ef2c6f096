"""The proof of a norm where rounding decides: exact fractions, wrong factors, and what it costs."""

from fractions import Fraction

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atoll.certify.banded import BlockBandedOperator
from atoll.certify.norms import OPERATORS, Layout


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(weight):
    return BlockBandedOperator(weight[None, None])


@pytest.mark.parametrize("shape", [(20, 3), (3, 20)])
def test_the_smallest_provable_square_is_not_below_the_exact_one(shape):
    """Rows of equal numbers, whose squared norm is a fraction; rounding makes some factorizations below it succeed."""
    below = 0
    for seed in range(40):
        number = float(random(1, seed=seed).abs())
        operator = matrix(torch.full(shape, number, dtype=torch.float64))
        exact = Fraction(number) ** 2 * shape[0] * shape[1]
        square = float(exact)
        for step in range(-6, 7):
            claim = square * (1 + step * 2**-52)
            defect = operator._defect(claim)
            if defect is not None:
                assert Fraction(claim) + Fraction(defect) + Fraction(operator._rounding(claim)) >= exact
                below += Fraction(claim) + Fraction(defect) < exact
    assert below > 0  # the bound of the rounding error was necessary


@pytest.mark.parametrize("method", OPERATORS)
def test_the_proof_holds_for_any_factor(monkeypatch, method):
    """A wrong Cholesky factor costs tightness: the bound grows by what it is wrong, and is never below the norm."""
    operator = OPERATORS[method](random(3, 2, 3, 3), Layout((7, 5), (1, 1), (1, 1)))
    norm, cholesky = operator.norm(1e-6), torch.linalg.cholesky_ex
    for size in (1e-3, 0.1, 1.0):

        def wrong(square, size=size):
            factor, failed = cholesky(square)
            return factor + size * factor.tril(-1).flip(-2).tril(), failed

        monkeypatch.setattr(torch.linalg, "cholesky_ex", wrong)
        square = (1.01 * norm) ** 2
        defect = operator._defect(square)
        assert defect is not None
        assert square + defect >= norm**2
        assert operator.norm() >= norm * (1 - 1e-9)

    def claim(square):
        """A factor of any matrix, even one that is not positive."""
        return torch.eye(square.shape[-1]).to(square).expand_as(square), torch.zeros(len(square))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", claim)
    for share in (0.1, 0.9, 1.0):
        square = (share * norm) ** 2
        assert square + operator._defect(square) >= norm**2 * (1 - 1e-9)


@pytest.mark.parametrize("method", OPERATORS)
def test_a_norm_adds_everything_that_is_computed_roughly(monkeypatch, method):
    """From an estimate that is far too low, with a factor that is no factor."""
    operator = OPERATORS[method](random(3, 2, 3, 3), Layout((7, 5), (1, 1), (1, 1)))
    norm = operator.norm(1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(BlockBandedOperator, "_rounding", lambda self, square: square)
        assert operator.norm(1e-6) == pytest.approx(2**0.5 * norm, rel=1e-3)

    def claim(square):
        return torch.eye(square.shape[-1]).to(square).expand_as(square), torch.zeros(len(square))

    monkeypatch.setattr(BlockBandedOperator, "largest", lambda self: 0.1 * norm)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "cholesky_ex", claim)
        assert operator.norm() >= norm * (1 - 1e-9)
    # Without the blocks beside the diagonal, every block of rows is factorized on its own.
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda lower, beside, upper: torch.zeros_like(beside))
    assert operator.norm() >= norm * (1 - 1e-9)


@pytest.mark.parametrize("method", OPERATORS)
def test_the_gram_matrix_is_that_of_the_map(method):
    """For both sides; the defect of s I - G is zero only if G has the singular values of the map."""
    for stride, padding in (((1, 1), (1, 1)), ((2, 3), (0, 2))):
        operator = OPERATORS[method](random(3, 2, 4, 3), Layout((7, 8), stride, padding))
        basis = torch.eye(operator.rows_in * operator.parts.shape[3]).to(operator.parts)
        dense = []
        for each in operator.parts.split(1):
            one = BlockBandedOperator(each, operator.rows_in, operator.rows_out, operator.stride, operator.padding)
            x = basis.view(-1, operator.rows_in, each.shape[3])
            part = BlockBandedOperator(
                each.expand(len(x), -1, -1, -1), one.rows_in, one.rows_out, one.stride, one.padding
            )
            dense.append(part.apply(x).flatten(1).T)
        stacked = torch.stack(dense)
        gram = stacked @ stacked.mH if operator.output_side else stacked.mH @ stacked
        rows, size, _ = operator._shape(operator.output_side)
        place = 0
        for diagonal, beside in operator._tridiagonal():
            width = diagonal.shape[1]
            torch.testing.assert_close(diagonal, gram[:, place : place + width, place : place + width])
            if beside is not None:
                following = slice(place + width, place + width + beside.shape[2])
                torch.testing.assert_close(beside, gram[:, place : place + width, following])
                assert not gram[:, place : place + width, following.stop :].any()
            else:
                assert not gram[:, place : place + width, place + width :].any()
            place += width
        assert place == rows * size


def test_a_tap_that_meets_only_padding_adds_nothing():
    operator = BlockBandedOperator(random(1, 4, 2, 3), rows_in=2, rows_out=5, padding=3)
    x = random(1, 2, 3)
    expected = torch.zeros(1, 5, 2).double()
    for i in range(5):
        for tap in range(4):
            if 0 <= i + tap - 3 < 2:
                expected[0, i] += operator.parts[0, tap] @ x[0, i + tap - 3]
    torch.testing.assert_close(operator.apply(x), expected)
    y = random(1, 5, 2, seed=1)
    assert float((operator.apply(x) * y).sum()) == pytest.approx(float((x * operator.transposed(y)).sum()))


def count(operator):
    """The number of operations of one attempt at a proof; a sum of products of n terms has 2 n."""
    costs = {
        torch.ops.aten.linalg_cholesky_ex: lambda a, *_, out_shape, **__: a[0] * a[-1] ** 3 / 3,
        torch.ops.aten.linalg_solve_triangular: lambda a, b, *_, out_shape, **__: a[0] * a[-1] ** 2 * b[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=costs) as counter:
        operator._defect((2 * operator.largest(5)) ** 2)
    with FlopCounterMode(display=False) as lanczos:
        operator.largest(5)
    return counter.get_total_flops() - lanczos.get_total_flops()


@pytest.mark.parametrize(
    ("weight", "size"),
    [(random(16, 16, 5, 5), (40, 4)), (random(8, 24, 3, 3), (30, 5)), (random(24, 8, 7, 3), (30, 5))],
)
def test_flops_are_about_the_number_of_operations(weight, size):
    """They decide which bounds are within the budget."""
    for method in ("exact", "strip"):
        operator = OPERATORS[method](weight, Layout(size, (1, 1), (1, 1)))
        factor = 4 if operator.parts.is_complex() else 1  # the counter ignores that numbers are complex
        assert 0.5 < operator.flops / (factor * count(operator)) < 2


def test_entries_are_sums_of_as_many_taps_as_fall_on_one_phase():
    """The rounding of entries counts: those of a kernel are exact, frequencies are sums of taps."""
    weight, layout = random(2, 3, 5, 4), Layout((9, 9), (2, 3), (1, 1))
    assert [OPERATORS[name](weight, layout).terms for name in ("exact", "strip", "torus")] == [1, 2, 3 * 2]


@pytest.mark.parametrize(("size", "kernel", "stride"), [(9, 3, 1), (9, 3, 2), (16, 5, 3), (7, 4, 4)])
def test_rings_have_no_more_frequencies_than_places_for_image_and_kernel(size, kernel, stride):
    places = -(-(size + 2) // stride) + -(-kernel // stride)
    weight, layout = random(2, 3, kernel, kernel), Layout((size, size), (stride, stride), (1, 1))
    assert len(OPERATORS["strip"](weight, layout).parts) <= places // 2 + 1
    assert len(OPERATORS["torus"](weight, layout).parts) <= (places // 2 + 1) * places
