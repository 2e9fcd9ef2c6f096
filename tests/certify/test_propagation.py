"""How rounding errors travel through a graph: from an error that is much larger than all that follow."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll.certify.lipschitz import lipschitz, propagate
from atoll.graph import capture
from support import Function

SHAPE = (4, 3, 4)
LARGE = 1e6


def rough(x):
    """The input with an error of up to 1/32 in every entry, in float32."""
    return (x + LARGE) - LARGE


def ramp(*shape):
    return torch.linspace(-1, 2, math.prod(shape)).view(shape).sin() + 0.1


class Parts(nn.Module):
    """Several functions of an input at the same time, so that one capture is enough."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        return torch.cat([function(x).flatten(1) for function in self.functions], 1)


# What follows the error; weights are large enough that it grows.
AFTER = {
    "nothing": lambda z: z,
    "linear": lambda z: F.linear(z, ramp(5, 4).to(z)),
    "two linear": lambda z: F.linear(F.linear(z, ramp(5, 4).to(z)), ramp(3, 5).to(z)),
    "matrix from the left": lambda z: ramp(5, 3).to(z) @ z,
    "convolution": lambda z: F.conv2d(z, ramp(2, 4, 3, 3).to(z), padding=1),
    "residual": lambda z: z + F.conv2d(z, ramp(4, 4, 3, 3).to(z), padding=1),
    "factor": lambda z: z * ramp(4, 1, 1).to(z) * 3,
    "quotient": lambda z: z / (ramp(4, 1, 1).to(z) + 3),
    "negative": lambda z: -z,
    "sum with itself": lambda z: z + z,
    "sum of functions": lambda z: z.relu() + z.sigmoid(),
    "batch norm": lambda z: F.batch_norm(z, torch.zeros(4).to(z), torch.full((4,), 0.01).to(z)),
    "mean": lambda z: z.mean((2, 3)),
    "sum over pixels": lambda z: z.sum((2, 3)),
    "cumulative sum": lambda z: z.cumsum(1),
    "average": lambda z: F.avg_pool2d(z, 2, 1),
    "relu": F.relu,
    "steep": lambda z: F.leaky_relu(z, 5.0),
    "sine of a layer": lambda z: F.linear(z, ramp(5, 4).to(z)).sin(),
    "flip": lambda z: z.flip(1),
    "repeat": lambda z: z.repeat(1, 3, 1, 1),
    "expand": lambda z: z[:, :1] + torch.zeros(4, 1, 1).to(z),
    "upsampling": lambda z: F.interpolate(z, scale_factor=2),
    "parts": lambda z: torch.cat([z[:, 2:], z[:, :2]], 1),
    "concatenation": lambda z: torch.cat([z, z.relu(), 2 * z], 1),
    "split": lambda z: z.chunk(2, 1)[1],
    "minimum": lambda z: torch.minimum(z[:, :2], z[:, 2:]),
    "minimum of others": lambda z: torch.minimum(z.relu(), z @ ramp(4, 4).to(z)),
    "pairs": lambda z: torch.cat([torch.minimum(z[:, :2], z[:, 2:]), torch.maximum(z[:, :2], z[:, 2:])], 1),
    "maximum of a constant": lambda z: torch.maximum(z, torch.zeros(4, 1, 1).to(z)),
    "sort": lambda z: z.sort(1).values,
    "largest": lambda z: z.amax((2, 3)),
    "max-pooling": lambda z: F.max_pool2d(z, 2, 1),
    "float64": lambda z: z.double().float(),
}
# Operations whose numbers themselves are large.
LARGE_NUMBERS = {
    "bias": lambda x: F.linear(x, ramp(5, 4).to(x), torch.full((5,), LARGE).to(x)),
    "bias of a convolution": lambda x: F.conv2d(x, ramp(2, 4, 3, 3).to(x), torch.full((2,), LARGE).to(x)),
    "constant": lambda x: LARGE - x,
    "mean of batch norm": lambda x: F.batch_norm(x, torch.full((4,), LARGE).to(x), torch.ones(4).to(x)),
    "shift of batch norm": lambda x: F.batch_norm(
        x, torch.zeros(4).to(x), torch.ones(4).to(x), bias=torch.full((4,), LARGE).to(x)
    ),
    "sum": lambda x: (x + LARGE).relu() + (x + 3 * LARGE).relu(),
    "sum of one base": lambda x: (LARGE * x) + (3 * LARGE * x),
    "sums": lambda x: (x + LARGE).sum((2, 3)),
    "sine": lambda x: (x + LARGE).sin(),
    "steep": lambda x: F.leaky_relu(x - LARGE, 5.0),
    "limits": lambda x: x.clamp(-LARGE, LARGE) + LARGE,
    "to float32": lambda x: (x.double() + LARGE).to(x.dtype),
}
CASES = {
    **{f"{name} after an error": lambda x, f=function: f(rough(x)) for name, function in AFTER.items()},
    **{f"{name} of large numbers": function for name, function in LARGE_NUMBERS.items()},
}


@pytest.fixture(scope="module")
def bounds():
    graph = capture(Parts(list(CASES.values())), SHAPE)
    propagation, _ = propagate(graph)
    (last,) = next(iter(reversed(graph.graph_module.graph.nodes))).all_input_nodes
    return {name: propagation.bound(propagation._value(node)) for name, node in zip(CASES, last.args[0], strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_errors_cover_what_becomes_of_a_large_one(bounds, name):
    draw = torch.Generator().manual_seed(0)
    bound, x = bounds[name], torch.randn(20, *SHAPE, generator=draw)
    error = (CASES[name](x).double() - CASES[name](x.double())).flatten(1).norm(dim=1)
    allowed = bound.relative * x.double().flatten(1).norm(dim=1) + bound.absolute
    assert (error <= allowed).all()
    assert (error > 0.0005 * allowed).all()  # without the large error, 1e-5 would be enough


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 2.0), (4.0, 1.0), (0.5, 3.0)])
def test_softplus_jumps_at_its_threshold(beta, threshold):
    net = capture(Function(lambda x: F.softplus(x, beta, threshold)), (1,), dtype=torch.float64)
    bound, x = lipschitz(net).bound, torch.linspace(-5, 9, 1401, dtype=torch.float64)[:, None]
    error = (F.softplus(x, beta, threshold) - torch.log1p(torch.exp(beta * x)) / beta).abs()
    assert (error <= bound.relative * x.abs() + bound.absolute).all()
    assert float(error.max()) > 0.9 * bound.absolute
