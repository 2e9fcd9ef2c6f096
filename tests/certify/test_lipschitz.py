"""Constants of layers and networks against dense Jacobians, and the error of rounding against what is measured."""

import copy
import math

import pytest
import torch
from torch import nn

from atoll.certify.layers import GELU_SLOPE, linear_map
from atoll.certify.lipschitz import Bound, lipschitz
from atoll.errors import InputError
from atoll.models import MLP, LiResNet, MinMax, Normalize, SmallConvNet
from atoll.models.hybrid import HybridViT
from atoll.models.liresnet import ChannelScale, LinearResidual, Residual, UnitLinear


def batch_norm(channels):
    layer = nn.BatchNorm2d(channels)
    layer.running_mean.data, layer.running_var.data = torch.randn(channels), torch.rand(channels) + 0.1
    layer.weight.data, layer.bias.data = torch.randn(channels), torch.randn(channels)
    return layer


# A layer with a bound joins by one line: how to make it, the shape of its input, whether the bound is tight.
LAYERS = {
    "dense": (lambda: nn.Linear(6, 4), (6,), True),
    "unit": (lambda: UnitLinear(6, 4), (6,), True),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 5, 6), True),
    "conv-stride": (lambda: nn.Conv2d(2, 4, 4, 2, 1), (2, 6, 7), True),
    "conv-patches": (lambda: nn.Conv2d(2, 4, 2, 2), (2, 4, 6), True),
    "linear-residual": (lambda: shaken(LinearResidual(4, depth=3)), (4, 5, 5), True),
    "linear-residual-cancels": (lambda: cancelling(LinearResidual(4, depth=1)), (4, 5, 5), False),
    "channel-scale": (lambda: shaken(ChannelScale(4, 1.0)), (4, 2, 2), True),
    "batch-norm": (lambda: batch_norm(3), (3, 2, 2), True),
    "batch-norm-cancels": (lambda: cancelling_norm(3), (3, 2, 2), True),
    "normalize": (lambda: Normalize([0.5, 0.4], [0.25, 0.5]), (2, 3, 3), True),
    "average": (lambda: nn.AvgPool2d(2), (2, 4, 6), True),
    "average-overlap": (lambda: nn.AvgPool2d(3, 2, 1), (2, 5, 6), True),
    "global-average": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 5), True),
    "flatten": (nn.Flatten, (2, 3, 3), True),
    "identity": (nn.Identity, (3,), True),
    "dropout": (lambda: nn.Dropout(0.5), (3,), True),
    "minmax": (MinMax, (4, 2, 2), True),
    "relu": (nn.ReLU, (8,), True),
    "softplus": (nn.Softplus, (8,), False),
    "gelu": (nn.GELU, (8,), False),
    "gelu-tanh": (lambda: nn.GELU("tanh"), (8,), False),
    "residual": (lambda: Residual(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))), (5,), False),
}


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape)
    return module


def cancelling(block):
    """The convolution is minus the identity, nearly: what is left is all rounding."""
    with torch.no_grad():
        block.conv.weight.mul_(1e-6)
        block.conv.weight[:, :, 1, 1] -= torch.eye(4)
    return block


def cancelling_norm(channels):
    """The mean is large, and the shift undoes it."""
    layer = batch_norm(channels)
    layer.running_mean.data += 1e4
    layer.bias.data = layer.running_mean * layer.weight.data * (layer.running_var + layer.eps).rsqrt()
    return layer


def built(name):
    make, shape, tight = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().eval(), shape, tight


def jacobian_norms(module, shape, points=8, scale=2.0):
    """The norm of the Jacobian at some points, in float64."""
    module = copy.deepcopy(module).double()
    x = scale * torch.randn(points, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = []
    for point in x:
        jacobian = torch.func.jacrev(lambda p: module(p[None]).flatten())(point).detach()
        norms.append(float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)))
    return norms


@pytest.mark.parametrize("name", LAYERS)
def test_no_jacobian_is_above_the_bound(name):
    module, shape, tight = built(name)
    truth, bound = max(jacobian_norms(module, shape)), lipschitz(module, shape).bound.lipschitz
    assert truth <= bound * (1 + 1e-12)
    if tight:
        assert bound <= truth * 1.0011


def test_slope_of_gelu():
    x = torch.linspace(-10, 10, 400_001, dtype=torch.float64, requires_grad=True)
    for kind in ("none", "tanh"):
        (slope,) = torch.autograd.grad(nn.functional.gelu(x, approximate=kind).sum(), x)
        assert 1.128 < float(slope.abs().max()) < GELU_SLOPE


NETWORKS = {
    "mlp": (lambda: MLP((2,), 3, hidden=(8, 8), activation="minmax"), (2,)),
    "small": (lambda: SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=8, activation="minmax"), (1, 8, 8)),
    "small-bn-softplus": (
        lambda: SmallConvNet((1, 8, 8), 3, widths=(4,), hidden=8, batch_norm=True, activation="softplus"),
        (1, 8, 8),
    ),
    "liresnet": (lambda: LiResNet((1, 8, 8), 3, depth=2, width=4, features=8), (1, 8, 8)),
    "resnet": (lambda: shaken(LiResNet((1, 8, 8), 3, depth=2, width=4, features=8, block="conventional")), (1, 8, 8)),
    "plain": (lambda: LiResNet((2, 9, 8), 3, depth=2, width=4, features=8, block="plain"), (2, 9, 8)),
    "centered": (lambda: SmallConvNet((1, 8, 8), 3, widths=(4,), hidden=8, input_range="centered"), (1, 8, 8)),
}


def network(name):
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = make().eval()
    return nn.Sequential(model.normalize, model.body), shape


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_product_of_their_layers_and_above_every_jacobian(name):
    net, shape = network(name)
    result = lipschitz(net, shape)
    assert max(jacobian_norms(net, shape)) <= result.bound.lipschitz
    if name != "resnet":
        assert result.bound.lipschitz == pytest.approx(math.prod(layer.lipschitz for layer in result.layers))


def test_a_residual_branch_adds_one():
    branch = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    alone, whole = lipschitz(branch, (5,)).bound, lipschitz(Residual(branch), (5,)).bound
    assert whole.lipschitz == 1 + alone.lipschitz


@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_rounding_is_below_its_bound(name):
    """float32 against float64, from inputs small to large; and float64 is as good as exact."""
    net, shape = network(name) if name in NETWORKS else built(name)[:2]
    bound = lipschitz(net, shape).bound
    exact = copy.deepcopy(net).double()
    for scale in (1e-3, 1.0, 30.0):
        x = scale * torch.randn(16, *shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            error = (net(x).double() - exact(x.double())).flatten(1).norm(dim=1)
        assert (error <= bound.relative * x.double().flatten(1).norm(dim=1) + bound.absolute).all()
        size = exact(x.double()).detach().flatten(1).norm(dim=1)
        assert (size <= bound.lipschitz * x.double().flatten(1).norm(dim=1) + bound.offset + 1e-12).all()
    fine = lipschitz(exact, shape, dtype=torch.float64).bound
    assert fine.relative < 1e-8 * max(bound.relative, 1e-3)
    assert bound.relative < 0.01 * max(1, bound.lipschitz)


def test_composition_of_bounds():
    first, second = Bound(2.0, 1.0, 0.1, 0.2), Bound(3.0, 5.0, 0.01, 0.02)
    both = first.then(second)
    assert both.lipschitz == 6
    assert both.offset == 8
    assert both.relative == pytest.approx(3.01 * 0.1 + 0.01 * 2)
    assert both.absolute == pytest.approx(3.01 * 0.2 + 0.01 * 1 + 0.02)


class Standardized(nn.Conv2d):
    """A convolution in name only."""

    def forward(self, x):
        return nn.functional.conv2d(x, 100 * self.weight, self.bias)


REFUSED = {
    "groups": (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)), "0 (Conv2d) cannot be certified: expected a convolution"),
    "dilation": (nn.Sequential(nn.Conv2d(2, 2, 3, dilation=2)), "without groups or dilation"),
    "circular": (nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")), "zero padding"),
    "same": (nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")), "expected padding as numbers"),
    "subclass": (nn.Sequential(nn.ReLU(), Standardized(2, 2, 3)), "1 (Standardized) cannot be certified: no Lipschitz"),
    "layer-norm": (nn.Sequential(nn.LayerNorm(8)), "0 (LayerNorm) cannot be certified"),
    "max-pool": (nn.Sequential(nn.MaxPool2d(3, 1)), "0 (MaxPool2d) cannot be certified"),
    "batch-statistics": (nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "running statistics"),
    "uneven-average": (nn.Sequential(nn.AvgPool2d(3, 2, 1, count_include_pad=False)), "average pooling"),
    "early-softplus": (nn.Sequential(nn.Softplus(threshold=2)), "softplus jumps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_without_a_bound_is_named(name):
    net, sentence = REFUSED[name]
    with pytest.raises(InputError) as info:
        lipschitz(net, (2, 8, 8))
    assert sentence in str(info.value)


def test_weight_standardized_convolutions_are_not_taken_for_plain_ones():
    model = HybridViT((3, 16, 16), 3, stem_width=32, blocks=(1,), strides=(2, 1), width=16, depth=1, heads=2)
    changed = [m for m in model.modules() if isinstance(m, nn.Conv2d) and type(m).forward is not nn.Conv2d.forward]
    assert changed
    assert all(linear_map(module) is None for module in changed)
