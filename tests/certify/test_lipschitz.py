"""Constants of operations and networks against dense Jacobians, and the error of rounding against what is measured."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll.certify.bounds import Bound, Selection, TracedConstant, hypot
from atoll.certify.lipschitz import lipschitz
from atoll.certify.rules import ERF_SLOPE, GELU_SLOPE, MISH_SLOPE, SILU_SLOPE
from atoll.errors import InputError
from atoll.models import MLP, LiResNet, MinMax, Normalize, SmallConvNet
from atoll.models.hybrid import HybridViT
from atoll.models.liresnet import ChannelScale, LinearResidual, Residual, UnitLinear
from support import Function


def batch_norm(channels):
    layer = nn.BatchNorm2d(channels)
    layer.running_mean.data, layer.running_var.data = torch.randn(channels), torch.rand(channels) + 0.1
    layer.weight.data, layer.bias.data = torch.randn(channels), torch.randn(channels)
    return layer


def function(f, shape=(4, 3, 4), tight=True):
    return lambda: Function(f), shape, tight


WEIGHT = torch.linspace(-1, 2, 12).view(4, 3, 1)
MATRIX = torch.linspace(-1, 1, 12).view(3, 4).sin()

# An operation joins by one line: how to make it, the shape of its input, whether the bound is tight.
LAYERS = {
    "dense": (lambda: nn.Linear(6, 4), (6,), True),
    "unit": (lambda: UnitLinear(6, 4), (6,), True),
    "dense-on-tokens": (lambda: nn.Linear(4, 3), (2, 4), True),
    "matmul": function(lambda x: x @ MATRIX.T.to(x)),
    "matmul-left": function(lambda x: MATRIX.to(x) @ x, (2, 4, 3)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 5, 6), True),
    "conv-stride": (lambda: nn.Conv2d(2, 4, 4, 2, 1), (2, 6, 7), True),
    "conv-patches": (lambda: nn.Conv2d(2, 4, 2, 2), (2, 4, 6), True),
    "conv-groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 4), True),
    "conv-depthwise": (lambda: nn.Conv2d(3, 3, 3, stride=2, groups=3), (3, 7, 6), True),
    "conv-dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2), (2, 6, 6), True),
    "conv-same": (lambda: nn.Conv2d(2, 2, 4, padding="same"), (2, 5, 5), False),
    "conv-circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 4, 5), False),
    "conv-reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 4, 5), False),
    "conv-1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 7), True),
    "conv-transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, 2, 1, output_padding=1), (3, 4, 3), True),
    "conv-transposed-groups": (lambda: nn.ConvTranspose2d(4, 2, 2, 2, groups=2), (4, 3, 3), True),
    "conv-transposed-dilated": (lambda: nn.ConvTranspose1d(2, 2, 3, dilation=2), (2, 5), True),
    "linear-residual": (lambda: shaken(LinearResidual(4, depth=3)), (4, 5, 5), True),
    "linear-residual-cancels": (lambda: cancelling(LinearResidual(4, depth=1)), (4, 5, 5), False),
    "dense-residual": (lambda: Residual(nn.Linear(5, 5)), (5,), True),
    "conv-minus-identity": function(lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3).to(x), padding=1) - 2 * x, (4, 4, 4)),
    "two-convolutions": function(
        lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3).to(x), padding=1) - F.conv2d(x, 5 * torch.ones(2, 2, 1, 1).to(x)),
        (2, 4, 4),
    ),
    "identity-minus-itself": function(lambda x: x - x + 0.5 * x),
    "channel-scale": (lambda: shaken(ChannelScale(4, 1.0)), (4, 2, 2), True),
    "batch-norm": (lambda: batch_norm(3), (3, 2, 2), True),
    "batch-norm-cancels": (lambda: cancelling_norm(3), (3, 2, 2), True),
    "conv-batch-norm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), batch_norm(3)), (2, 5, 5), True),
    "normalize": (lambda: Normalize([0.5, 0.4], [0.25, 0.5]), (2, 3, 3), True),
    "normalize-conv": (lambda: nn.Sequential(Normalize([0.5, 9], [0.2, 5]), nn.Conv2d(2, 3, 3)), (2, 4, 4), True),
    "average": (lambda: nn.AvgPool2d(2), (2, 4, 6), True),
    "average-overlap": (lambda: nn.AvgPool2d(3, 2, 1), (2, 5, 6), True),
    "average-uneven": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 5, 6), False),
    "average-ceil": (lambda: nn.AvgPool2d(2, 2, ceil_mode=True), (2, 5, 5), True),
    "average-1d": (lambda: nn.AvgPool1d(2, 1), (2, 6), True),
    "global-average": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 5), True),
    "adaptive-average": (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 5), False),
    "max-pool": (lambda: nn.MaxPool2d(2), (2, 4, 4), True),
    "max-pool-overlap": (lambda: nn.MaxPool2d(3, 1, 1), (2, 5, 5), False),
    "max-pool-dilated": (lambda: nn.MaxPool2d(2, 1, dilation=2), (2, 5, 5), False),
    "adaptive-max": (lambda: nn.AdaptiveMaxPool2d(2), (2, 5, 5), False),
    "upsample": (lambda: nn.Upsample(scale_factor=2), (2, 3, 3), True),
    "upsample-bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 3), False),
    "cumsum": function(lambda x: x.cumsum(1), tight=False),
    "mean": function(lambda x: x.mean((2, 3))),
    "sum": function(lambda x: x.sum(1)),
    "scale": function(lambda x: x * WEIGHT.to(x)),
    "divide": function(lambda x: x / (WEIGHT.to(x) + 3)),
    "negate": function(lambda x: 1 - x),
    "broadcast-add": function(lambda x: x + x.mean((2, 3), keepdim=True), tight=False),
    "broadcast-constant": function(lambda x: x[:, :1] + WEIGHT.to(x)),
    "double": function(lambda x: x + x),
    "flip-sum": function(lambda x: x + x.flip(1)),
    "concatenate": function(lambda x: torch.cat([x, x, 2 * x], 1), tight=False),
    "concatenate-parts": function(lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)),
    "concatenate-constant": function(lambda x: torch.cat([x, torch.zeros_like(x[:, :1]) + 3], 1)),
    "stack": function(lambda x: torch.stack([x, x.abs()], 2)),
    "repeat": function(lambda x: x.repeat(1, 2, 1, 3)),
    "index": function(lambda x: x.index_select(1, torch.tensor([0, 0, 2]))),
    "permute": function(lambda x: x.permute(0, 3, 1, 2).flatten(1)),
    "slice": function(lambda x: x[:, ::2, 1:, :3]),
    "unfold": function(lambda x: F.unfold(x, 2), tight=True),
    "pixel-shuffle": (lambda: nn.PixelShuffle(2), (4, 3, 3), True),
    "roll": function(lambda x: x.roll(1, 2)),
    "pad": function(lambda x: F.pad(x, (1, 2), value=5.0)),
    "pad-reflect": function(lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"), tight=True),
    "pad-replicate": function(lambda x: F.pad(x, (2, 1, 1, 1), mode="replicate")),
    "pad-circular": function(lambda x: F.pad(x, (1, 1, 1, 1), mode="circular")),
    "chunk": function(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    "flatten": (nn.Flatten, (2, 3, 3), True),
    "identity": (nn.Identity, (3,), True),
    "dropout": (lambda: nn.Dropout(0.5), (3,), True),
    "minmax": (MinMax, (4, 2, 2), True),
    "minmax-of-others": function(
        lambda x: torch.cat([torch.minimum(x, x.flip(1)), torch.maximum(x, x.flip(1))], 1), tight=False
    ),
    "minimum": function(lambda x: torch.minimum(x[:, :2], x[:, 2:])),
    "maximum-constant": function(lambda x: torch.maximum(x, WEIGHT.to(x))),
    "amax": function(lambda x: x.amax((2, 3))),
    "groupsort": function(lambda x: x.flatten(1).unflatten(1, (-1, 4)).sort(2).values),
    "max-dim": function(lambda x: x.max(2).values),
    "householder": (lambda: Householder(), (4, 3), True),
    **{
        name: (make, (8,), tight)
        for name, make, tight in [
            ("relu", nn.ReLU, True), ("relu6", nn.ReLU6, True), ("leaky-relu", lambda: nn.LeakyReLU(3.0), True),
            ("prelu", lambda: nn.PReLU(init=-2.0), True), ("elu", lambda: nn.ELU(1.5), False),
            ("celu", lambda: nn.CELU(2.0), True), ("selu", nn.SELU, False), ("hardtanh", nn.Hardtanh, True),
            ("hardsigmoid", nn.Hardsigmoid, False), ("hardswish", nn.Hardswish, False),
            ("softplus", nn.Softplus, False),
            ("softplus-beta", lambda: nn.Softplus(3.0, 5.0), False), ("gelu", nn.GELU, False),
            ("gelu-tanh", lambda: nn.GELU("tanh"), False), ("silu", nn.SiLU, False), ("mish", nn.Mish, False),
            ("tanh", nn.Tanh, False), ("sigmoid", nn.Sigmoid, False), ("logsigmoid", nn.LogSigmoid, False),
            ("threshold", lambda: nn.Threshold(0.5, 0.5), True),
            ("abs", lambda: Function(torch.abs), True), ("sin", lambda: Function(torch.sin), False),
            ("cos", lambda: Function(torch.cos), False), ("atan", lambda: Function(torch.atan), False),
            ("erf", lambda: Function(torch.erf), False),
            ("clamp", lambda: Function(lambda x: x.clamp(-0.1, 0.7)), True),
        ]
    },
    "residual": (lambda: Residual(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))), (5,), False),
    "shared": (lambda: nn.Sequential(*[nn.Linear(5, 5)] * 3), (5,), False),
}  # fmt: skip


class Householder(nn.Module):
    """Reflects pairs of channels: rotated, the absolute value of the first, rotated back."""

    def forward(self, x):
        angle = torch.tensor([0.3, 2.0], dtype=x.dtype)
        one, two = torch.stack([angle.cos(), angle.sin()], 1), torch.stack([-angle.sin(), angle.cos()], 1)
        rotation = torch.stack([one, two], 1).view(4, 2, 1)
        back = torch.stack([torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)], 1)
        y = F.conv1d(x, rotation, groups=2)
        y = torch.stack([y[:, ::2].abs(), y[:, 1::2]], 2).flatten(1, 2)
        return F.conv1d(y, back.view(4, 2, 1), groups=2)


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape)
    return module


def cancelling(block):
    """The convolution is almost minus the identity, so the sum is dominated by rounding."""
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
        return nn.Sequential(make(), nn.Flatten()).eval(), shape, tight


def jacobian_norms(module, shape, points=8, scale=2.0):
    """The norm of the Jacobian at some points, in float64."""
    module = copy.deepcopy(module).double()
    x = scale * torch.randn(points, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # A point does not depend on the others, so the Jacobian of the sum over points has one block per point.
    jacobian = torch.func.jacrev(lambda x: module(x).flatten(1).sum(0))(x).detach()
    return torch.linalg.matrix_norm(jacobian.flatten(2).movedim(1, 0), 2).tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_jacobians_and_rounding_are_below_their_bounds(name):
    module, shape, tight = built(name)
    bound = lipschitz(module, shape).bound
    truth = max(jacobian_norms(module, shape))
    assert truth <= bound.lipschitz * (1 + 1e-12)
    if tight:
        assert bound.lipschitz <= truth * 1.0011
    check_rounding(module, shape, bound)


def check_rounding(net, shape, bound):
    """float32 against float64, from inputs small to large; and float64 is as good as exact."""
    exact = copy.deepcopy(net).double()
    for scale in (1e-3, 1.0, 30.0):
        x = scale * torch.randn(16, *shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            error = (net(x).double() - exact(x.double())).flatten(1).norm(dim=1)
        assert (error <= bound.relative * x.double().flatten(1).norm(dim=1) + bound.absolute).all()
        size = exact(x.double()).detach().flatten(1).norm(dim=1)
        assert (size <= bound.lipschitz * x.double().flatten(1).norm(dim=1) + bound.offset + 1e-12).all()
    assert bound.relative < 0.01 * max(1, bound.lipschitz)


@pytest.mark.parametrize(
    ("function", "largest"),
    [
        (F.gelu, GELU_SLOPE), (lambda x: F.gelu(x, approximate="tanh"), GELU_SLOPE), (F.silu, SILU_SLOPE),
        (F.mish, MISH_SLOPE), (torch.erf, ERF_SLOPE),
    ],
)  # fmt: skip
def test_slopes(function, largest):
    x = torch.linspace(-10, 10, 400_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    assert largest - 0.01 < float(slope.abs().max()) < largest


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


SIMILAR = ("small", "plain", "centered")  # to other networks or layers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in NETWORKS]
)
def test_networks_are_the_product_of_their_layers_and_above_every_jacobian(name):
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = make().eval()
    net = nn.Sequential(model.normalize, model.body)
    result = lipschitz(net, shape)
    assert max(jacobian_norms(net, shape)) <= result.bound.lipschitz
    if name not in ("resnet",):
        assert result.bound.lipschitz == pytest.approx(math.prod(layer.lipschitz for layer in result.layers))
    check_rounding(net, shape, result.bound)
    fine = lipschitz(copy.deepcopy(net).double(), shape).bound
    assert fine.relative < 1e-8 * max(result.bound.relative, 1e-3)


def test_a_residual_branch_adds_one():
    branch = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    alone, whole = lipschitz(branch, (5,)).bound, lipschitz(Residual(branch), (5,)).bound
    assert whole.lipschitz == 1 + alone.lipschitz


def test_inputs_that_may_overflow_are_known():
    net = nn.Linear(2, 2)
    net.weight.data = torch.diag(torch.tensor([1e30, 1.0]))
    largest = lipschitz(net, (2,)).largest_input
    assert 1e7 < largest < 3.5e8
    assert net(torch.tensor([[largest, 0.0]])).isfinite().all()
    assert not net(torch.tensor([[5 * largest, 0.0]])).isfinite().all()


def test_repeated_entries_count_as_often():
    assert Selection(torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0])).gain == 2
    assert Selection(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 4.0])).gain == pytest.approx(5)
    assert hypot(3.0, 4.0) == 5
    assert Bound(2.0, 1.0, 0.1, 0.2).error.times(0).relative == 0


def test_constants_are_computed_again():
    sigma, tau = TracedConstant(2.0, "sigma"), TracedConstant(5.0, "tau")
    total = hypot(3.0 * sigma, sigma * tau + 1)
    assert total == pytest.approx(math.hypot(6, 11))
    assert isinstance(total, TracedConstant)
    values = {"sigma": torch.tensor(1.0), "tau": torch.tensor(3.0)}
    assert float(total.evaluate(values)) == pytest.approx(5)


REFUSED = {
    "layer-norm": (nn.LayerNorm(8), "native_layer_norm cannot be certified: it has no certification rule"),
    "group-norm": (nn.GroupNorm(1, 2), "native_group_norm cannot be certified"),
    "batch-statistics": (nn.BatchNorm2d(2, track_running_stats=False), "cannot be certified"),
    "product": (Function(lambda x: x * x.mean(1, keepdim=True)), "mul cannot be certified: it combines two values"),
    "quotient": (Function(lambda x: 1 / (1 + x.abs())), "cannot be certified"),
    "softplus": (nn.Softplus(beta=-1), "softplus cannot be certified: expected beta > 0"),
    "threshold": (nn.Threshold(0.5, 0.0), "threshold cannot be certified: it jumps"),
    "sign": (Function(torch.sign), "sign cannot be certified: it has no certification rule (support.py, line"),
    "batch-mean": (Function(lambda x: x - x.mean(0)), "mixes the points of a batch"),
    "batch-flip": (Function(lambda x: x.flip(0)), "mixes the points of a batch"),
    "batch-roll": (Function(lambda x: x.roll(6, 0)), "it computes with the batch size"),
    "negative-average": (
        Function(lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=-1)),
        "avg_pool2d cannot be certified: its weights",
    ),
    "nan": (nn.LeakyReLU(float("nan")), "leaky_relu cannot be certified: negative_slope is not a number"),
    "batch-sort": (Function(lambda x: x.sort(0).values), "mixes the points of a batch"),
    "batch-all": (Function(lambda x: x - x.mean()), "mixes the points of a batch"),
    "batch-transposed": (Function(lambda x: x.flatten(1) @ x.flatten(1).T @ x.flatten(1)), "cannot be certified"),
    "infinite": (Function(lambda x: x * torch.inf), "not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_a_bound_is_named(name):
    module, sentence = REFUSED[name]
    with pytest.raises(InputError) as info:
        lipschitz(nn.Sequential(module, nn.Flatten()), (2, 8, 8))
    assert sentence in str(info.value)
    assert "\n" not in str(info.value)


def test_attention_and_group_norm_are_refused():
    model = HybridViT((3, 16, 16), 3, stem_width=32, blocks=(1,), strides=(2, 1), width=16, depth=1, heads=2)
    with pytest.raises(InputError, match="native_group_norm cannot be certified"):
        lipschitz(model)
