"""Orthogonal layers against dense matrices: singular values, before and after training, gradients, captured graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from atoll.certify.power import LipschitzEstimator
from atoll.errors import InputError
from atoll.graph import capture
from atoll.models import OrthogonalConv2d, OrthogonalLinear, OrthogonalNet
from atoll.models.orthogonal import cayley
from support import TinyData


def conv(channels: int, out: int, kernel: int, stride: int, padding: int, seed: int = 0) -> OrthogonalConv2d:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return OrthogonalConv2d(channels, out, kernel, stride=stride, padding=padding)


def singular_values(layer: OrthogonalConv2d, side: int) -> Tensor:
    """Of the dense matrix, from the kernel that runs in float32 and one image for every input."""
    basis = torch.eye(layer.in_channels * side**2, dtype=torch.float64).view(-1, layer.in_channels, side, side)
    matrix = F.conv2d(basis, layer.kernel.detach().double(), None, layer.stride, layer.padding).flatten(1)
    return torch.linalg.svdvals(matrix)


def train(layer: nn.Module, shape: tuple[int, ...], steps: int = 20) -> None:
    """Large steps on noise, which move every parameter far from where it started."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, *shape, generator=draw)
    target = torch.randn(layer(x).shape, generator=draw)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()


# in, out, kernel, stride, padding, side.  Expanding layers see every input with full padding; others need none.
ORTHOGONAL = [
    (4, 4, 1, 1, 0, 5),
    (4, 4, 3, 1, 0, 6),
    (5, 3, 3, 1, 0, 6),
    (4, 4, 3, 1, 2, 5),
    (3, 7, 3, 1, 2, 5),
    (1, 6, 5, 1, 4, 6),
    (2, 8, 2, 2, 0, 6),
    (2, 5, 4, 2, 0, 8),
    (1, 9, 4, 2, 3, 6),
    (3, 13, 5, 3, 0, 8),
    (1, 1, 2, 1, 0, 4),
]


@pytest.mark.parametrize(("channels", "out", "kernel", "stride", "padding", "side"), ORTHOGONAL)
def test_all_singular_values_are_one(channels, out, kernel, stride, padding, side):
    layer = conv(channels, out, kernel, stride, padding)
    before = layer.kernel.detach()
    values = singular_values(layer, side)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    train(layer, (channels, side, side))
    values = singular_values(layer, side)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    if channels * out > 1:  # one orthogonal channel can only be shifted
        assert (layer.kernel - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "stride", "padding", "side"),
    [(4, 4, 3, 1, 1, 6), (3, 8, 3, 1, 1, 5), (2, 8, 4, 2, 1, 8), (8, 2, 3, 1, 1, 5), (1, 8, 4, 2, 1, 7)],
)
def test_padding_makes_a_layer_shorten_but_never_lengthen(channels, out, kernel, stride, padding, side):
    layer = conv(channels, out, kernel, stride, padding)
    for _ in range(2):
        values = singular_values(layer, side)
        assert 1 - 1e-2 < values.max() <= 1 + 1e-5
        train(layer, (channels, side, side))


def test_padding_is_not_orthogonal_at_the_border():
    assert singular_values(conv(4, 4, 3, 1, 1), 6).min() < 0.5


@pytest.mark.parametrize(("n", "out"), [(6, 6), (7, 3), (3, 7), (5, 1), (200, 40)])
def test_dense_layers_are_orthogonal(n, out):
    torch.manual_seed(0)
    layer = OrthogonalLinear(n, out)
    for _ in range(2):
        values = torch.linalg.svdvals(layer.kernel.detach().double())
        assert len(values) == min(n, out)
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
        train(layer, (n,))


def test_a_cayley_transform_of_a_skew_matrix_is_the_textbook_one():
    u = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, identity = u - u.T, torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(cayley(u), torch.linalg.inv(identity + a) @ (identity - a))


def test_a_start_uses_all_inputs_alike():
    """Each of n inputs has about p / n of the squared norm of p orthonormal columns."""
    torch.manual_seed(0)
    shares = OrthogonalLinear(400, 40).kernel.detach().square().sum(0) * 400 / 40
    assert 0.7 < shares[:40].mean() < 1.3
    assert 0.7 < shares[40:].mean() < 1.3


@pytest.mark.parametrize("layer", [conv(2, 8, 4, 2, 1), conv(3, 2, 3, 1, 1), OrthogonalLinear(5, 3)], ids=str)
def test_gradients_are_those_of_finite_differences(layer):
    layer = layer.double()
    shape = (5,) if isinstance(layer, OrthogonalLinear) else (layer.in_channels, 4, 4)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (x, *parameters))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [pytest.param("minmax", torch.float32, marks=pytest.mark.slow), ("householder", torch.float64)],
)
def test_captured_graphs_have_constant_kernels(activation, dtype):
    torch.manual_seed(0)
    net = OrthogonalNet((1, 8, 8), 3, width=8, depth=1, features=8, activation=activation).to(dtype)
    model = capture(net, (1, 8, 8), dtype=dtype)
    assert not [name for name in model.operations() if "linalg" in name or "matmul" in name or "mm" in name]
    for node in model.graph_module.graph.nodes:
        if "convolution" in str(node.target) or "linear" in str(node.target):
            assert node.args[1].op == "get_attr"
    kernels = [layer.kernel for layer in net.body if isinstance(layer, OrthogonalConv2d)]
    constants = list(model.graph_module.buffers())
    for kernel in kernels:
        assert any(c.shape == kernel.shape and torch.allclose(c, kernel, rtol=0, atol=1e-6) for c in constants)


def test_a_network_never_lengthens_a_difference():
    torch.manual_seed(0)
    net = OrthogonalNet((1, 8, 8), 10, width=16, features=64).double()
    x, y = (torch.rand(64, 1, 8, 8, dtype=torch.float64) for _ in range(2))
    ratio = (net.features(x) - net.features(y)).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert 0.1 < ratio.max() <= 1 + 1e-6


def test_estimated_constants_are_those_of_the_head():
    """The head follows sorted groups of features, and everything before it has norm 1."""
    torch.manual_seed(0)
    net = OrthogonalNet((1, 8, 8), 3, width=4, depth=0, stages=1, features=8, activation="groupsort")
    pairs, _ = LipschitzEstimator(net, iterations=50)()
    head = torch.cdist(net.head.unit_weight, net.head.unit_weight)
    torch.testing.assert_close(pairs.detach(), head.detach(), rtol=0.02, atol=1e-5)


def test_a_network_learns():
    torch.manual_seed(0)
    split = TinyData().load().train
    x, y = split.images.float() / 255, split.labels
    net = OrthogonalNet((1, 8, 8), 3, width=8, features=16)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(10 * net(x), y).backward()
        optimizer.step()
    assert (net(x).argmax(1) == y).float().mean() > 0.95


def test_bad_sizes_are_refused():
    with pytest.raises(InputError, match=r"kernel_size: expected at least 3 \(the stride\), got 2"):
        OrthogonalConv2d(1, 1, 2, stride=3)
    with pytest.raises(InputError, match="out_channels: expected at least 1, got 0"):
        OrthogonalConv2d(1, 0, 3)
    with pytest.raises(InputError, match="padding: expected at least 0, got -1"):
        OrthogonalConv2d(1, 1, 3, padding=-1)
    with pytest.raises(InputError, match="in_features: expected at least 1, got 0"):
        OrthogonalLinear(0, 3)
