"""Bounds of norms against dense singular values: never below, and close where they say that they are."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.grad import conv2d_input

from atoll.certify import banded
from atoll.certify.norms import OPERATORS, Layout, conv_norm, dense_norm
from atoll.errors import InputError
from atoll.models import ConvNet4C3F

ROUNDING = 1e-10  # of the dense singular values themselves


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense_conv(weight, size, stride=(1, 1), padding=(0, 0)):
    """The matrix of a convolution, column by column."""
    channels = weight.shape[1]
    n = channels * math.prod(size)
    return F.conv2d(torch.eye(n).double().view(n, channels, *size), weight.double(), None, stride, padding).flatten(1).T


def largest(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def infinite_grid(weight, frequencies=64):
    """The supremum over (many) frequencies of the infinite grid, for stride 1."""
    symbols = torch.fft.fft2(weight.double(), s=(frequencies, frequencies)).permute(2, 3, 0, 1)
    return float(torch.linalg.matrix_norm(symbols, 2).max())


@st.composite
def convolutions(draw):
    """Every kernel, stride and padding that fits, square or not."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    size = tuple(draw(st.integers(max(1, k - 2 * p), 9)) for k, p in zip(kernel, padding, strict=True))
    weight = random(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *kernel, seed=draw(st.integers(0, 10**6)))
    return weight, size, stride, padding


# The layers of 4C3F, 6C2F, LiResNet and the small ConvNets: kernel, stride, padding.
IN_USE = [(3, 1, 1), (4, 2, 1), (3, 2, 1), (5, 2, 2), (7, 4, 3), (4, 4, 0), (14, 14, 0), (1, 1, 0)]


@pytest.mark.parametrize("method", OPERATORS)
@settings(max_examples=60)
@given(case=convolutions())
def test_every_bound_of_a_convolution_is_above_the_dense_norm(method, case):
    weight, size, stride, padding = case
    truth = largest(dense_conv(weight, size, stride, padding))
    bound = OPERATORS[method](weight.double(), Layout(size, stride, padding)).norm()
    assert bound >= truth * (1 - ROUNDING)
    if method == "exact":
        assert bound <= truth * 1.0011 + 1e-6  # a kernel may touch nothing but padding


@pytest.mark.parametrize(("kernel", "stride", "padding"), IN_USE)
@pytest.mark.parametrize("budget", [0, 1e6, math.inf])
def test_layers_in_use(kernel, stride, padding, budget):
    weight = random(4, 3, kernel, kernel)
    truth = largest(dense_conv(weight, (15, 14), (stride, stride), (padding, padding)))
    bound = conv_norm(weight, (15, 14), (stride, stride), (padding, padding), budget=budget)
    assert truth * (1 - ROUNDING) <= bound.value <= truth * (1.0011 if bound.method == "exact" else 1.35)
    if budget == math.inf or kernel <= stride:
        assert bound.method == "exact"


@settings(max_examples=40)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), rank=st.integers(1, 12), power=st.integers(-12, 12))
def test_dense_matrices_of_any_shape_rank_and_scale(rows, columns, rank, power):
    matrix = 10.0**power * random(rows, rank, dtype=torch.float64) @ random(rank, columns, seed=1, dtype=torch.float64)
    truth = largest(matrix)
    assert truth * (1 - ROUNDING) <= dense_norm(matrix).value <= truth * 1.0011


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.99, 1.5])
@pytest.mark.parametrize("method", OPERATORS)
def test_a_wrong_estimate_costs_time_and_never_the_proof(monkeypatch, share, method):
    """Lanczos only says where to look; were it wrong, the proof would fail and be tried again further up."""
    weight = random(3, 2, 3, 3)
    operator = OPERATORS[method](weight.double(), Layout((6, 5), padding=(1, 1)))
    right = operator.norm()
    estimate = operator.largest()
    monkeypatch.setattr(banded.BlockBandedOperator, "largest", lambda self: share * estimate)
    bound = operator.norm()
    assert bound >= largest(dense_conv(weight, (6, 5), padding=(1, 1)))
    assert bound <= right * (1.002 if share < 1 else 1.51)


def test_no_proof_below_the_norm():
    """The heart of it: Cholesky breaks down, or its defect says so, wherever the claim is false."""
    weight = random(3, 2, 3, 3)
    for method in OPERATORS:
        operator = OPERATORS[method](weight.double(), Layout((6, 5), padding=(1, 1)))
        truth = operator.norm(tolerance=1e-9)
        for share in (0.5, 0.9, 0.999, 0.999999):
            assert operator._defect((share * truth) ** 2) is None


def test_the_torus_is_never_above_the_infinite_grid():
    for seed in range(5):
        weight = random(4, 4, 3, 3, seed=seed)
        bound = OPERATORS["torus"](weight.double(), Layout((8, 8), padding=(1, 1))).norm()
        assert bound <= infinite_grid(weight) * 1.001


def test_bounds_come_in_order():
    weight = random(6, 6, 3, 3)
    bounds = [make(weight.double(), Layout((10, 10), padding=(1, 1))).norm() for make in OPERATORS.values()]
    assert bounds[0] < bounds[1] < bounds[2] < bounds[0] * 1.2


def power_iteration(weight, size, stride, padding, steps=2000):
    v = random(1, weight.shape[1], *size, dtype=torch.float64)
    for _ in range(steps):
        u = F.conv2d(v, weight.double(), None, stride, padding)
        v = conv2d_input(v.shape, weight.double(), u, stride, padding)
        v = v / v.norm()
    return float(F.conv2d(v, weight.double(), None, stride, padding).norm())


def test_power_iteration_stays_below():
    """2,000 steps on a layer too large for dense singular values, and how far the bound is above."""
    weight = random(32, 32, 4, 4) / 20
    below = power_iteration(weight, (14, 14), (2, 2), (1, 1))
    bound = conv_norm(weight, (14, 14), (2, 2), (1, 1))
    assert bound.method == "exact"
    assert below <= bound.value <= below * 1.001


@pytest.mark.slow
def test_power_iteration_stays_below_on_all_convolutions_of_4c3f():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ConvNet4C3F((1, 28, 28), 10, activation="minmax", initialization="orthogonal")
    layers = [m for m in model.body if isinstance(m, torch.nn.Conv2d)]
    for layer, side in zip(layers, (28, 28, 14, 14), strict=True):
        below = power_iteration(layer.weight.detach(), (side, side), layer.stride, layer.padding)
        bound = conv_norm(layer.weight, (side, side), layer.stride, layer.padding)
        assert bound.method == "exact"
        assert below <= bound.value <= below * 1.001


def test_zero_and_nonsense():
    assert dense_norm(torch.zeros(3, 2)).value == 0
    assert conv_norm(torch.zeros(2, 2, 3, 3), (5, 5)).value == 0
    with pytest.raises(InputError, match="expected finite numbers"):
        dense_norm(torch.full((2, 2), math.nan))
    with pytest.raises(InputError, match=r"size: expected at least the kernel size \(5, 5\), got \(4, 9\)"):
        conv_norm(torch.zeros(1, 1, 5, 5), (4, 9))
    with pytest.raises(InputError, match=r"size: expected at least the kernel size \(5, 5\), got \(2, 9\)"):
        conv_norm(torch.zeros(1, 1, 5, 5), (2, 9), padding=(1, 1))
    assert conv_norm(torch.zeros(1, 1, 5, 5), (3, 9), padding=(1, 1)).value == 0


def test_the_stride_is_one_and_nothing_is_padded_unless_given():
    weight = random(3, 2, 3, 3)
    truth = largest(dense_conv(weight, (6, 5)))
    assert truth <= conv_norm(weight, (6, 5)).value <= truth * 1.0011
    assert truth <= OPERATORS["exact"](weight.double(), Layout((6, 5))).norm() <= truth * 1.0011
