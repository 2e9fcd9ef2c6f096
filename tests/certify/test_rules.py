"""Rules in float32 where rounding decides: sums in the worst order, numbers that vanish, and exact constants."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll.certify import GloRo
from atoll.certify.lipschitz import lipschitz, propagate
from atoll.errors import InputError
from atoll.graph import capture
from support import Function

N = 256


def bound_of(function, *shape):
    module = function if isinstance(function, nn.Module) else Function(function)
    return lipschitz(nn.Sequential(module, nn.Flatten()).eval(), shape).bound


def bounds_of(functions, *shape):
    """The bounds of several functions of one input, with one capture."""
    graph = capture(Function(lambda x: torch.cat([function(x).flatten(1) for function in functions], 1)), shape)
    propagation, _ = propagate(graph)
    (last,) = next(iter(reversed(graph.graph_module.graph.nodes))).all_input_nodes
    return [propagation.bound(propagation._value(node)) for node in last.args[0]]


def unlucky():
    """Numbers close to 1 whose sum, one after the other in float32, loses almost half a unit in every step."""
    numbers, total = np.ones(N, np.float32), np.float32(0)
    for k in range(N):
        half = np.spacing(total + np.float32(1)) / np.float32(2)
        numbers[k] = np.nextafter(np.float32(1) + half, np.float32(0)) if half > 2**-22 else np.float32(1)
        total = total + numbers[k]
    return numbers, float(total) - math.fsum(numbers.tolist())


# Each result is the sum of all entries, divided by a power of two, which is exact.  For `cumsum`, the last one is.
SUMS = {
    "linear": (lambda x: F.linear(x, torch.ones(1, N)), (N,), 1),
    "matmul": (lambda x: torch.ones(1, N) @ x, (N, 1), 1),
    "matmul from the right": (lambda x: x @ torch.ones(N, 1), (N,), 1),
    "convolution": (lambda x: F.conv2d(x, torch.ones(1, 4, 8, 8), stride=8), (4, 8, 8), 1),
    "transposed convolution": (lambda x: F.conv_transpose1d(x, torch.ones(N, 1, 1)), (N, 1), 1),
    "sum": (lambda x: x.sum((2, 3)), (1, 16, 16), 1),
    "mean": (lambda x: x.mean(2), (1, N), N),
    "cumsum": (lambda x: x.cumsum(1), (N,), 1),
    "average": (lambda x: F.avg_pool2d(x, 16), (1, 16, 16), N),
    "average without padding": (lambda x: F.avg_pool2d(x, 16, count_include_pad=False, ceil_mode=True), (1, 16, 16), N),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 16, 16), N),
}


@pytest.mark.parametrize("name", SUMS)
def test_errors_cover_sums_in_the_worst_order(name):
    """Kernels may add in any order; one after the other, this sum loses a third of what the bound allows."""
    function, shape, divisor = SUMS[name]
    numbers, error = unlucky()
    bound = bound_of(function, *shape)
    allowed = bound.relative * float(np.linalg.norm(numbers.astype(float))) + bound.absolute
    assert abs(error) / divisor <= allowed
    if name != "cumsum":  # there, all of the results may be wrong
        assert abs(error) / divisor > 0.25 * allowed


@pytest.mark.parametrize("function", [lambda x: x + 1.0, lambda x: 1 - x, lambda x: x + torch.ones(1).to(x)])
def test_errors_cover_a_number_that_is_added_to_many_entries(function):
    """Every entry is half a unit of 1 in the last place, and all of them are lost."""
    count = 3000
    sign = -0.5 if float(function(torch.zeros(1)) - function(torch.ones(1))) > 0 else 1.0
    bound, x = bound_of(function, count), torch.full((1, count), sign * 2.0**-24)
    error = float((function(x).double() - function(x.double())).norm())
    assert error == 2.0**-24 * abs(sign) * count**0.5
    assert error <= bound.relative * float(x.double().norm()) + bound.absolute <= 12 * error


TINY = torch.finfo(torch.float32).tiny
SHARE = 0.9  # of the smallest normal number: a processor may replace such numbers by zero

# A function of 64 entries that is zero if numbers of this kind vanish, and the size of the entries.
VANISHING = {
    "weights": (SHARE * TINY, 1e6),
    "inputs": (1.0, SHARE * TINY),
    "products": (SHARE * TINY**0.5, TINY**0.5),
}
MAPS = {
    "linear": (lambda w: lambda x: F.linear(x, torch.full((3, 64), w)), (64,)),
    "convolution": (lambda w: lambda x: F.conv2d(x, torch.full((3, 4, 4, 4), w)), (4, 4, 4)),
    "factor": (lambda w: lambda x: x * torch.full((64,), w), (64,)),
}


@pytest.mark.parametrize("kind", VANISHING)
@pytest.mark.parametrize("name", MAPS)
def test_errors_cover_numbers_that_are_flushed_to_zero(name, kind):
    make, shape = MAPS[name]
    weight, size = VANISHING[kind]
    bound, x = bound_of(make(weight), *shape), torch.full((1, *shape), size, dtype=torch.float64)
    # All of the exact result is lost.
    exact = float(make(weight)(torch.ones(1, *shape)).double().norm()) * size if kind != "products" else 0.0
    if kind == "products":
        exact = weight * size * (64.0 * 3**0.5 if name != "factor" else 8.0)
    assert exact <= bound.relative * float(x.norm()) + bound.absolute <= (5 if name == "linear" else 100) * exact


# Functions of one number and their largest slopes, which are mathematical facts.
SLOPES = {
    "abs": (torch.abs, 1), "atan": (torch.atan, 1), "cos": (torch.cos, 1), "sin": (torch.sin, 1),
    "erf": (torch.erf, 2 / math.pi**0.5), "tanh": (torch.tanh, 1), "sigmoid": (torch.sigmoid, 1 / 4),
    "log-sigmoid": (F.logsigmoid, 1), "softplus": (F.softplus, 1), "relu": (F.relu, 1), "clamp": (F.hardtanh, 1),
    "hardsigmoid": (F.hardsigmoid, 1 / 6), "hardswish": (F.hardswish, 1.5), "silu": (F.silu, 1.0998393),
    "gelu": (F.gelu, 1.1289043), "mish": (F.mish, 1.0885), "leaky-relu": (lambda x: F.leaky_relu(x, -3.0), 3),
    "small-leaky-relu": (lambda x: F.leaky_relu(x, 0.1), 1), "elu": (lambda x: F.elu(x, 2.5), 2.5),
    "small-elu": (lambda x: F.elu(x, 0.5), 1), "celu": (lambda x: F.celu(x, 0.3), 1),
    "selu": (F.selu, 1.0507009873554805 * 1.6732632423543772), "threshold": (lambda x: F.threshold(x, 0.3, 0.3), 1),
    "prelu": (lambda x: F.prelu(x, torch.tensor([-4.0]).to(x)), 4), "hardtanh": (lambda x: F.hardtanh(x, -3, 2), 1),
    "small-prelu": (lambda x: F.prelu(x, torch.tensor([0.25]).to(x)), 1),
}  # fmt: skip


def test_constants_of_functions_are_their_largest_slopes():
    bounds = bounds_of([function for function, _ in SLOPES.values()], 1)
    for (name, (_, slope)), bound in zip(SLOPES.items(), bounds, strict=True):
        assert slope * (1 - 1e-12) <= bound.lipschitz <= slope * 1.004, name


def test_moving_entries_costs_nothing():
    for function in (nn.Identity(), lambda x: x.flip(1), lambda x: x.transpose(1, 2)):
        bound = bound_of(function, 3, 4)
        assert (bound.lipschitz, bound.offset, bound.relative, bound.absolute) == (1, 0, 0, 0)


# Differences in which a wrong claim of equal entries would cancel, and the exact constant.
DIFFERENCES = {
    "flipped": (lambda x: x - x.flip(1), (4,), 2),
    "transposed": (lambda x: x - x.transpose(1, 2), (3, 3), 2),
    "absolute": (lambda x: x - x.abs(), (4,), 2),
    "repeated": (lambda x: x - x[:, :1], (3,), 1 + 3**0.5),
    "same": (lambda x: x - x, (4,), 0),
    "shifted": (lambda x: x + (x - 1), (4,), 2),
    "shifted twice": (lambda x: x + torch.sub(x, torch.ones(4).to(x), alpha=3), (4,), 2),
    "reflected": (lambda x: x + (1 - x), (4,), 0),
    "reflected and scaled": (lambda x: x + torch.sub(torch.ones(4).to(x), x, alpha=3), (4,), 2),
    "flattened": (lambda x: x.flatten(1) - F.linear(x.flatten(1), torch.eye(4).to(x)), (2, 2), 0),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_of_moved_entries(name):
    function, shape, constant = DIFFERENCES[name]
    assert bound_of(function, *shape).lipschitz == pytest.approx(constant, rel=1e-3)


ROW = torch.tensor([100.0, 1, 1, 1])
KERNEL = torch.diag(torch.tensor([0.0, 1, 1, 1]))  # ignores the first channel
# Factors of 100 on the first row, column or entry, of as many as there are channels.
FACTORS = {
    "rows before a convolution": (
        lambda x: F.conv2d(x * ROW.view(4, 1).to(x), KERNEL[..., None, None].to(x)),
        (4, 4, 5),
    ),
    "rows after a convolution": (
        lambda x: F.conv2d(x, KERNEL[..., None, None].to(x)) * ROW.view(4, 1).to(x),
        (4, 4, 5),
    ),
    "columns before a convolution": (lambda x: F.conv2d(x * ROW.to(x), KERNEL[..., None, None].to(x)), (4, 5, 4)),
    "entries before a convolution": (lambda x: F.conv1d(x * ROW.to(x), KERNEL[..., None].to(x)), (4, 4)),
    "rows before a matrix": (lambda x: F.linear(x * ROW.view(4, 1).to(x), KERNEL.to(x)), (4, 4)),
    "rows after a matrix": (lambda x: F.linear(x, KERNEL.to(x)) * ROW.view(4, 1).to(x), (4, 4)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_rows_are_not_those_of_channels(name):
    function, shape = FACTORS[name]
    assert 100 <= bound_of(function, *shape).lipschitz <= 100.2


@pytest.mark.parametrize("name", ["convolution", "matrix"])
def test_factors_of_rows_in_a_sum_are_not_those_of_channels(name):
    """The first channel of x times (100, 1, 1, 1) minus a layer that removes the other channels."""
    kernel, shape = (KERNEL[..., None, None], (4, 4, 5)) if name == "convolution" else (KERNEL, (4, 4))
    layer = F.conv2d if name == "convolution" else F.linear
    assert bound_of(lambda x: x * ROW.view(4, 1).to(x) + layer(x, kernel.to(x)), *shape).lipschitz >= 101


def test_factors_of_channels_join_a_layer():
    """Then the channel that the layer ignores does not count."""
    for factor, shape in ((ROW.view(4, 1, 1), (4, 2, 3)), (ROW.view(1, 4, 1, 1), (4, 4, 1))):
        constant = bound_of(lambda x, w=factor: F.conv2d(x * w.to(x), KERNEL[..., None, None].to(x)), *shape).lipschitz
        assert constant == pytest.approx(1, rel=1.1e-3)
    constant = bound_of(lambda x: F.conv1d(x * ROW.view(4, 1).to(x), KERNEL[..., None].to(x)), 4, 3).lipschitz
    assert constant == pytest.approx(1, rel=1.1e-3)
    assert bound_of(lambda x: x * ROW.view(1, 4).to(x), 4).lipschitz == 100  # a constant with a batch dimension


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + F.pad(x[:, :1], (0, 0, 1, -1)),
        lambda x: x + F.pad(x[:, :1].reshape(-1), (1, -1))[:, None],
        lambda x: x + F.pad(x, (0, 0, 1, -1)),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_neighbors_in_the_batch_are_not_constants(function, count):
    """Every point gets an entry of the point before or after it."""
    with pytest.raises(InputError, match="pad cannot be certified: it mixes the points of a batch"):
        bound_of(function, count)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_sizes_may_be_given_once_for_both_sides(pool):
    truth = 2 if pool is F.max_pool2d else math.cos(math.pi / 8) * math.cos(math.pi / 12)
    for sizes in (([2], [1]), (2, 1)):
        bound = bound_of(lambda x, sizes=sizes: pool(x, *sizes), 1, 4, 6)
        assert bound.lipschitz == pytest.approx(truth, rel=1.1e-3)


def test_minimum_and_maximum_count_as_a_pair_only_together():
    """Only the minimum and the maximum of a and 3 b together are no longer than a and 3 b."""
    tripled = nn.LeakyReLU(3.0)

    def extremes(first, second):
        def function(x):
            a, b = x[:, :2], tripled(x[:, 2:])
            return torch.cat([first(a, b), second(a, b)], 1)

        return function

    assert bound_of(extremes(torch.minimum, torch.maximum), 4).lipschitz == pytest.approx(3)

    def separate(x):
        a, b = x[:, :2], tripled(x[:, 2:])
        return torch.cat([torch.minimum(a, b), torch.maximum(a, b), 4 * x], 1)

    # The third value has nothing to do with the pair.
    assert bound_of(separate, 4).lipschitz == pytest.approx((3**2 + 3**2 + 4**2) ** 0.5)
    assert bound_of(extremes(torch.minimum, torch.minimum), 4).lipschitz >= 3 * 2**0.5 * (1 - 1e-9)
    assert bound_of(extremes(torch.maximum, torch.maximum), 4).lipschitz >= 3 * 2**0.5 * (1 - 1e-9)


def test_dead_channels_of_batch_norm():
    """A variance of 0 is possible, since eps is added; without eps it is refused, as is a negative one."""
    layer = nn.BatchNorm1d(2)
    layer.running_var.data = torch.tensor([0.0, 4.0])
    assert bound_of(layer, 2).lipschitz == pytest.approx(layer.eps**-0.5)
    for variance, eps in ((0.0, 0.0), (-1e-6, 1e-5), (-2e-5, 1e-5)):
        layer.running_var.data[0], layer.eps = variance, eps
        with pytest.raises(InputError, match="expected positive running variances"):
            bound_of(layer, 2)


def test_batch_norm_is_not_below_the_exact_constant():
    """The factor w / sqrt(variance + eps) is rounded several times."""
    layer, below = nn.BatchNorm1d(1, eps=0.0).double(), 0
    for variance in (0.3, 0.7, 1.9, 5.0, 1e-7, 3e5):
        layer.running_var.data[0], layer.weight.data[0] = variance, 0.1
        constant = bound_of(layer, 1).lipschitz
        exact = Fraction(0.1) ** 2 / Fraction(variance)
        assert exact <= Fraction(constant) ** 2 <= exact * (1 + Fraction(1, 10**13))
        below += Fraction(0.1 * variance**-0.5) ** 2 < exact
    assert below > 0  # the rounded factor alone is not a bound


@pytest.mark.parametrize("alpha", [1e-3, 30.0])
@pytest.mark.parametrize("rough", ["first", "second"])
def test_errors_of_scaled_sums_count_the_scaled_part(alpha, rough):
    """One of two terms has an error of about 0.03, because 1e6 is added and subtracted."""

    def function(x):
        rounded = (x + 1e6) - 1e6
        return torch.add(rounded, x, alpha=alpha) if rough == "first" else torch.add(x, rounded, alpha=alpha)

    bound, x = bound_of(function, 50), torch.linspace(-1, 1, 50)[None]
    exact = (1 + alpha) * x.double()
    error = float((function(x) - exact).norm())
    assert error > 0.1 * min(1.0, alpha if rough == "second" else 1.0)
    assert error <= bound.relative * float(x.double().norm()) + bound.absolute <= 100 * error
    assert bound.lipschitz == pytest.approx(1 + alpha)


def test_errors_cover_the_sum_of_a_value_and_its_multiple():
    """One operation with two roundings, of values without any."""
    bound, x = bound_of(lambda x: torch.add(x, x, alpha=0.7), 50), torch.linspace(0.1, 1, 50)[None]
    error = float((torch.add(x, x, alpha=0.7) - torch.add(x.double(), x.double(), alpha=0.7)).norm())
    assert 0 < error <= bound.relative * float(x.double().norm()) + bound.absolute <= 10 * error


def limited(x):
    """Limits that may be rounded, by 1/16: an error of the operation itself, of known size."""
    return x.clamp(-1e6, 1e6)


def pair(x):
    a, b = x.split(2, 1)
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], 1)


# What becomes of this error, relative to that of four entries.
TRAVELS = {
    "steep": (lambda x: F.leaky_relu(limited(x), 5.0), 5),
    "flip": (lambda x: limited(x).flip(1), 1),
    "repeat": (lambda x: limited(x).repeat(1, 3), 3**0.5),
    "expanded": (lambda x: torch.maximum(limited(x[:, :1]), torch.zeros(4).to(x)), 1),
    "pair": (lambda x: pair(limited(x)), 1),
    "minimum": (lambda x: torch.minimum(*limited(x).split(2, 1)), 1),
    "concatenation": (lambda x: (z := limited(x), torch.cat([z, z.relu()], 1))[1], 2**0.5),
    "layer": (lambda x: F.linear(limited(x), 2 * torch.eye(4).to(x)), 2),
    "factor": (lambda x: 3 * limited(x), 3),
    "sum": (lambda x: (z := limited(x)) + z, 2),
}


def test_errors_of_single_operations_travel():
    alone, *bounds = bounds_of([limited, *(function for function, _ in TRAVELS.values())], 4)
    assert alone.absolute == pytest.approx(2.0**-24 * 1e6 * 4**0.5, rel=1e-3)
    for (name, (_, factor)), bound in zip(TRAVELS.items(), bounds, strict=True):
        assert 1 - 1e-9 <= bound.absolute / (factor * alone.absolute) <= 1.5, name


def test_a_quotient_is_above_the_exact_one():
    """1/w is rounded; the constant of x / w is not below the exact value."""
    for value in (3.0, 0.1, 49.0):
        divisor = torch.tensor([value], dtype=torch.float64)
        net = Function(lambda x, w=divisor: x / w).double()
        net.register_buffer("precision", torch.zeros(1, dtype=torch.float64))
        constant = lipschitz(net, (1,)).bound.lipschitz
        assert 1 / Fraction(value) <= Fraction(constant) <= (1 + Fraction(1, 10**14)) / Fraction(value)


@pytest.mark.parametrize(("size", "out"), [(4, 2), (5, 2), (4, 7), (3, 8)])
def test_adaptive_max_pooling_counts_windows(size, out):
    """The largest number may be the maximum of all windows that contain it."""
    starts = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
    windows = max(sum(low <= entry < high for low, high in starts) for entry in range(size))
    assert bound_of(nn.AdaptiveMaxPool2d((out, 1)), 1, size, 3).lipschitz == pytest.approx(windows**0.5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(x.shape[0]).to(x)[:, None],
        lambda x: torch.cat([x, torch.arange(x.shape[0]).to(x)[:, None]], 1),
    ],
)
def test_constants_that_differ_between_the_points_of_a_batch_are_refused(function):
    with pytest.raises(InputError, match="arange cannot be certified: it computes with the batch size"):
        bound_of(function, 4)


def test_errors_of_a_repeated_extreme_count_as_often_as_it_is_repeated():
    """With this threshold, softplus is log 2 at 0, and 1e-6 just above it; the sum of 200 such errors is a logit."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(200, 2)
            self.head.weight.data = torch.stack([torch.zeros(200), torch.ones(200)])
            self.head.bias.data = torch.tensor([0.0, -90.0])

        def forward(self, x):
            a, b = F.softplus(x, 1.0, 0.0).chunk(2, 1)
            pair = [torch.minimum(a, b).repeat(1, 100), torch.maximum(a, b).repeat(1, 100)]
            return self.head(torch.cat(pair, 1))

    certifier = GloRo.proven(Repeated().eval(), (2,))
    x, close = torch.zeros(1, 2), torch.full((1, 2), 1e-6)
    assert certifier.model(x).argmax() != certifier.model(close).argmax()
    assert float(certifier(x).radius) < 1e-6


LARGE_SUMS = {
    "mean": (lambda x: x.mean(1, keepdim=True), (100,)),
    "average": (lambda x: F.avg_pool2d(x, 10).flatten(1), (1, 10, 10)),
    "average with rounded sizes": (lambda x: F.avg_pool2d(x, 10, ceil_mode=True).flatten(1), (1, 10, 10)),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), (1, 10, 10)),
}


@pytest.mark.parametrize("name", LARGE_SUMS)
def test_sums_that_overflow_before_they_are_divided_are_not_certified(name):
    function, shape = LARGE_SUMS[name]
    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[0.5], [1.0]])
    certifier = GloRo.proven(nn.Sequential(Function(function), head).eval(), shape)
    for size, certified in ((1.0, True), (3.3e36, False)):
        assert bool(certifier(torch.full((1, *shape), size)).radius > 0) == certified
