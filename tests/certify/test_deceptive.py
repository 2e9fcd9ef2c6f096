"""Networks that deceive: each is refused in one sentence, or its certificates hold against attacks."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from atoll.certify import Smoothed, certifier_for
from atoll.certify.certificate import Proof
from atoll.models import MLP, CentroidNet, Centroids, LiResNet
from atoll.models.liresnet import LinearResidual
from certify.break_certificates import Function, Refusal, Shape, attempt, find_breaks, points

Outcome = Literal["certified", "refused", "any"]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval()


def prove(net: nn.Module, shape: Shape) -> Proof | Refusal:
    return attempt(lambda: certifier_for(net, shape=shape))


def assert_unbroken(certifier: Proof, module: nn.Module | None, x: Tensor) -> None:
    """A certifier may also refuse to certify."""
    breaks = attempt(lambda: find_breaks(certifier, module, x))
    assert isinstance(breaks, Refusal) or not breaks, str(breaks[0])


def dtype_of(net: nn.Module) -> torch.dtype:
    return next((p.dtype for p in net.parameters()), torch.get_default_dtype())


@dataclass(frozen=True)
class Case:
    """A network by name, and what has to happen to it: certified, refused, or any of the two."""

    name: str
    outcome: Outcome
    build: Callable[[], nn.Module]
    shape: Shape = (4,)
    slow: bool = False


class Between(nn.Module):
    """Any function between two linear layers."""

    def __init__(self, function: Function, shape: Shape = (4,), classes: int = 3) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(shape[-1], shape[-1])
        self.head = nn.Linear(function(torch.rand(3, *shape)).flatten(1).shape[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.first(x)).flatten(1))


IMAGE: Shape = (2, 4, 4)


def between(name: str, outcome: Outcome, function: Function, shape: Shape = (4,), slow: bool = False) -> Case:
    return Case(name, outcome, lambda: Between(function, shape), shape, slow)


def dense(*weights: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Diagonal layers 4 to 4 with these weights and a plain head."""
    layers = [nn.Linear(4, 4, bias=False) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight * torch.eye(4, dtype=torch.float64)
    return nn.Sequential(*layers, nn.Linear(4, 3)).to(dtype)


def rectified(*weights: float) -> nn.Module:
    """Diagonal layers 4 to 4 in float64, each followed by a ReLU."""
    return nn.Sequential(*[layer for w in weights for layer in (dense(w, dtype=torch.float64)[0], nn.ReLU())])


# --- (a) to (n): nets that earlier proofs were wrong about


def shared() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.weight.data *= 3
    return nn.Sequential(*[linear] * 3, nn.Linear(4, 3))


def scaled_rows(weight: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    net[0].weight.data *= weight
    return net


class Amplified(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 30 * super()._conv_forward(x, weight, bias)


class Twice(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*super().__iter__()] * 2)


class Louder(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 30 * super().__call__(x)


class Cubed(Centroids):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(30 * z.sin())


def hooked(pre: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    if pre:
        net[2].register_forward_pre_hook(lambda module, inputs: (30 * inputs[0],))
    else:
        net[0].register_forward_hook(lambda module, inputs, output: 30 * output)
    return net


def instance_method(name: str) -> nn.Module:
    net = MLP((4,), 3, hidden=(4,), bounds=None)
    if name == "features":
        net.features = types.MethodType(lambda self, x: 30 * self.body(x), net)
    else:
        net.body[1].forward = types.MethodType(lambda self, x: 30 * F.linear(x, self.weight), net.body[1])
    return net


def other_head() -> nn.Module:
    net = CentroidNet((4,), 3, per_class=2, bounds=None)
    net.head = Cubed(4, 3, 2)
    return net


def swapped_residual() -> nn.Module:
    net = LiResNet((1, 8, 8), 3, depth=1, width=4, features=8)
    block = next(module for module in net.modules() if isinstance(module, LinearResidual))
    block.conv = nn.Sequential(block.conv, nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2))
    block.conv[2].weight.data *= 10
    return net


def contrast(std: float) -> nn.Module:
    net = MLP((4,), 3, hidden=(4,), input_range="centered", bounds=None)
    net.normalize.std.fill_(std)
    return net


class Cancel(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + self.size) - self.size


def cancelled(size: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].weight.data *= 10
    parametrize.register_parametrization(net[0], "weight", Cancel(size))
    return net


def with_weight(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
    net[0].weight.data[1, 2] = value
    return net


def parametrized(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3))


def autocast_region(z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(z, torch.ones(4, 4)).float()


def mixed_precision() -> nn.Module:
    net = Between(torch.Tensor.double)
    net.head.double()
    return net


class Amplifier(nn.Module):
    """Multiplies by an attribute that is neither parameter nor buffer."""

    def __init__(self, factor: Tensor | float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.factor)


def exporting() -> nn.Module:
    return Between(lambda z: z if torch.compiler.is_exporting() else 30 * z)


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(scaled_rows(30.0), {nn.Linear}, dtype=torch.qint8)


HISTORY = [
    Case("shared module", "certified", shared),
    between("residual that broadcasts", "certified", lambda z: z + F.adaptive_avg_pool2d(z, 1), IMAGE),
    Case("float32 overflow", "any", lambda: dense(1e20, 1e15)),
    Case("float32 overflow and back", "any", lambda: dense(1e20, 1e20, 1e-20, 1e-20)),
    Case("float64 overflow", "any", lambda: dense(1e200, 1e150, dtype=torch.float64)),
    Case(
        "float64 softplus", "certified", lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 3)).double()
    ),
    Case("float64 steep softplus", "any", lambda: nn.Sequential(nn.Softplus(1e300), nn.Linear(4, 3)).double()),
    Case("forward hook", "certified", lambda: hooked(pre=False)),
    Case("forward pre-hook", "certified", lambda: hooked(pre=True)),
    Case("forward of an instance", "certified", lambda: instance_method("forward")),
    Case("features of an instance", "certified", lambda: instance_method("features")),
    Case("_conv_forward", "certified", lambda: nn.Sequential(Amplified(2, 2, 3), nn.Flatten(), nn.Linear(8, 3)), IMAGE),
    Case("__iter__", "certified", lambda: Twice(nn.Linear(4, 4), nn.Tanh())),
    Case("__call__", "certified", lambda: nn.Sequential(Louder(4, 4), nn.Linear(4, 3))),
    Case("subclass of Centroids", "any", other_head),
    Case("other convolution in LinearResidual", "any", swapped_residual, (1, 8, 8)),
    Case("standard deviation 255", "certified", lambda: contrast(255.0)),
    Case("standard deviation 1/255", "certified", lambda: contrast(1 / 255), slow=True),
    Case("standard deviation 0", "any", lambda: contrast(0.0)),
    Case("parametrization with cancellation", "any", lambda: cancelled(1e8)),
    Case("parametrization with some cancellation", "certified", lambda: cancelled(1e6)),
    Case("underflow", "any", lambda: dense(1.4e-45, 1e38, 1e7)),
    Case("gradual underflow", "any", lambda: dense(1e-38, 1e38)),
    Case("float64 underflow", "any", lambda: dense(5e-324, 1e300, 1e24, dtype=torch.float64)),
    between("softplus with beta -1", "any", nn.Softplus(-1.0)),
    between("softplus with threshold 1", "any", nn.Softplus(1.0, 1.0), slow=True),
    between("softplus with threshold -5", "any", nn.Softplus(1.0, -5.0)),
    between("softplus with beta 0.01 and threshold 2", "any", nn.Softplus(0.01, 2.0), slow=True),
    Case("bits of another type", "refused", lambda: Between(lambda z: z.view(torch.int32).view(torch.float32))),
    Case("bits of two numbers", "refused", lambda: Between(lambda z: z.view(torch.float64).float().repeat(1, 2))),
    between("leaky relu with NaN", "refused", nn.LeakyReLU(float("nan"))),
    Case("float64 constants that underflow", "refused", lambda: rectified(1e-200, 1e-200, 1e300)),
    Case("float64 constants that underflow together", "refused", lambda: rectified(1e-140, 1e-140, 1e-140, 1e300)),
    Case("float64 weights of 1e155", "any", lambda: dense(1e155, dtype=torch.float64)),
    Case("float64 weights of 1e308", "any", lambda: dense(1e308, dtype=torch.float64)),
    Case("a weight of NaN", "refused", lambda: with_weight(float("nan"))),
    Case("a weight of infinity", "refused", lambda: with_weight(float("inf"))),
    Case("a weight of 3e38", "any", lambda: with_weight(3e38)),
    Case("old spectral norm", "certified", lambda: parametrized(nn.utils.spectral_norm)),
    Case("spectral norm", "certified", lambda: parametrized(parametrizations.spectral_norm)),
    Case("weight norm", "certified", lambda: parametrized(parametrizations.weight_norm)),
    Case("old weight norm", "certified", lambda: parametrized(torch.nn.utils.weight_norm), slow=True),
    Case("orthogonal", "certified", lambda: parametrized(parametrizations.orthogonal)),
    between("autocast region", "refused", autocast_region),
    Case("half weights", "refused", lambda: scaled_rows(1.0).half(), slow=True),
    Case("bfloat16 weights", "refused", lambda: scaled_rows(1.0).bfloat16()),
    Case("float64 head", "any", mixed_precision),
    Case("tensor that is no buffer", "certified", lambda: Amplifier(torch.tensor(30.0))),
    Case("number that is no buffer", "certified", lambda: Amplifier(30.0), slow=True),
    Case("other function in export", "refused", exporting),
    Case(
        "other function with gradients", "refused", lambda: Between(lambda z: 30 * z if torch.is_grad_enabled() else z)
    ),
    Case("other function in large batches", "refused", lambda: Between(lambda z: 30 * z if len(z) > 100 else z)),
    Case("other function in a batch of seven", "refused", lambda: Between(lambda z: 30 * z if len(z) == 7 else z)),
    Case("compiled", "any", lambda: torch.compile(scaled_rows(30.0), backend="eager"), slow=True),
    Case("scripted", "any", lambda: torch.jit.script(scaled_rows(30.0)), slow=True),
    Case("data parallel", "any", lambda: nn.DataParallel(scaled_rows(30.0)), slow=True),
    Case("quantized", "refused", quantized, slow=True),
]

# --- (o) and (p): no function of a single input


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))


MIXTURES = [
    between("mean of the batch", "refused", lambda z: z - z.mean(0)),
    between("sum of the batch", "refused", lambda z: z + z.sum(0, keepdim=True), slow=True),
    between("standard deviation of the batch", "refused", lambda z: z / z.std(0, correction=0), slow=True),
    between("flip of the batch", "refused", lambda z: z.flip(0)),
    between("roll of the batch", "refused", lambda z: z.roll(3, 0), slow=True),
    between("roll of all", "refused", lambda z: z.roll(1)),
    between("cumsum of the batch", "refused", lambda z: z.cumsum(0), slow=True),
    between("sort of the batch", "refused", lambda z: z.sort(0).values, slow=True),
    between("maximum of the batch", "refused", lambda z: z.max(0).values + z, slow=True),
    between("amax of the batch", "refused", lambda z: z.amax((0, 1)) + z, slow=True),
    between("Gram matrix", "refused", lambda z: z @ (z.T @ z)),
    between("first row", "refused", lambda z: z[:1].expand_as(z), slow=True),
    between("first row in a sum", "refused", lambda z: z + z[0], slow=True),
    between("order of rows", "refused", lambda z: torch.cat([z[1:], z[:1]]), slow=True),
    between("index of rows", "refused", lambda z: z[torch.zeros(len(z), dtype=torch.long)]),
    between("fixed rows", "refused", lambda z: z[[1, 0]], slow=True),
    between("batch and channels merged", "refused", lambda z: z.flatten().view(4, -1).T.contiguous()),
    between("batch and channels merged and rolled", "refused", lambda z: z.flatten().roll(1).view_as(z), slow=True),
    between("transposed batch", "refused", lambda z: z.T.reshape(z.shape), slow=True),
    between("gather of rows", "refused", lambda z: z.gather(0, z.argmax(0, keepdim=True).expand_as(z)), slow=True),
    between("softmax of the batch", "refused", lambda z: z.softmax(0), slow=True),
    between("difference of rows", "refused", lambda z: z - z.diff(dim=0, prepend=z[:1]), slow=True),
    between(
        "convolution over the batch", "refused", lambda z: F.conv1d(z.T[None], torch.ones(4, 4, 3), padding=1)[0].T
    ),
    between("pooling over the batch", "refused", lambda z: F.avg_pool1d(z.T, 3, 1, 1).T, slow=True),
    between("attention over the batch", "refused", lambda z: F.scaled_dot_product_attention(z, z, z)),
    between("batch norm in training", "refused", lambda z: F.batch_norm(z, None, None, training=True)),
    Case("batch norm without statistics", "refused", without_statistics),
    between("batch size", "refused", lambda z: z * len(z)),
    between("batch size as a factor", "refused", lambda z: z * z.shape[0]),
    between("fill with the batch size", "refused", lambda z: z * torch.full_like(z, z.shape[0])),
    between("other constant from 4 rows on", "refused", lambda z: z + torch.full((z.shape[0], 1), z.shape[0] // 4)),
    between("new constant from 4 rows on", "refused", lambda z: z * (1 + z.new_full((z.shape[0], 1), z.shape[0] // 4))),
    between("sum with a constant from 4 rows on", "refused", lambda z: z + torch.zeros(len(z), 1) + z.shape[0] // 4),
    between("other entry in large batches", "refused", lambda z: z.select(1, z.shape[0] // 2**19)[:, None] + z),
    between("other slice in large batches", "refused", lambda z: z[:, z.shape[0] // 2**19 :][:, :2].repeat(1, 2)),
    between("one row per point", "certified", lambda z: z + torch.ones(1, 4).repeat(z.shape[0], 1)),
    between("sizes in a view", "certified", lambda z: z.view(z.shape[0], 2, 2).relu().reshape(z.shape[0], -1)),
    Case("dropout in evaluation", "certified", lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))),
    between("dropout that stays", "refused", lambda z: F.dropout(z, 0.5, training=True)),
    between("noise", "refused", lambda z: z + torch.randn_like(z)),
    between("randomized relu that stays", "refused", lambda z: F.rrelu(z, training=True), slow=True),
    between("bernoulli", "refused", lambda z: z * torch.bernoulli(torch.full_like(z, 0.5)), slow=True),
]

# --- (q) to (v): no Lipschitz constant, or one that is easy to get wrong


class Backward(torch.autograd.Function):
    """Ten times the input, with a gradient of a thousandth."""

    @staticmethod
    def forward(ctx: object, z: Tensor) -> Tensor:
        return 10 * z

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / 1000


def branch(z: Tensor) -> Tensor:
    return z if z.sum() > 0 else -z


WITHOUT_CONSTANT: list[tuple[str, Function, bool]] = [
    ("round", torch.round, False),
    ("round to decimals", lambda z: z.round(decimals=2), True),
    ("sign", torch.sign, True),
    ("floor", torch.floor, True),
    ("ceil", torch.ceil, True),
    ("trunc", torch.trunc, True),
    ("frac", torch.frac, True),
    ("remainder", lambda z: z % 1, True),
    ("fmod", lambda z: torch.fmod(z, 1), True),
    ("floor division", lambda z: z // 0.5, True),
    ("argmax", lambda z: F.one_hot(z.argmax(1), 4).float(), True),
    ("comparison", lambda z: (z > 0).float(), False),
    ("jump", nn.Threshold(0.5, -1.0), False),
    ("hardshrink", F.hardshrink, True),
    ("heaviside", lambda z: torch.heaviside(z, torch.zeros(())), True),
    ("isnan", lambda z: z + z.isnan(), True),
    ("sort indices", lambda z: z.sort(1).indices.float(), True),
    ("bucketize", lambda z: torch.bucketize(z, torch.arange(3.0)).float(), True),
    ("product", lambda z: z * z.flip(1), False),
    ("square", lambda z: z**2, True),
    ("matrix product", lambda z: (z[:, None] @ z[..., None]).flatten(1), True),
    ("prod", lambda z: z.prod(1, keepdim=True), True),
    ("division", lambda z: z / (z.flip(1).abs() + 0.1), False),
    ("reciprocal", lambda z: 1 / z, True),
    ("cube", lambda z: z**3, True),
    ("square root", lambda z: z.abs().sqrt(), False),
    ("root", lambda z: z.abs() ** 0.5, True),
    ("exp", torch.exp, True),
    ("log", lambda z: (z.abs() + 1e-9).log(), True),
    ("tan", torch.tan, True),
    ("sinh", torch.sinh, True),
    ("atan2", lambda z: torch.atan2(z, z.flip(1)), True),
    ("gated", lambda z: z * z.flip(1).sigmoid(), True),
    ("glu", F.glu, True),
    ("bilinear", lambda z: F.bilinear(z, z, torch.ones(2, 4, 4)), True),
]
NONLINEAR = [
    between("group norm", "any", lambda z: F.group_norm(z, 2), IMAGE),
    between("layer norm", "any", lambda z: F.layer_norm(z, (4,))),
    between("layer norm with a small eps", "any", lambda z: F.layer_norm(z, (4,), eps=1e-30), slow=True),
    between("instance norm", "any", F.instance_norm, IMAGE),
    between("rms norm", "any", lambda z: F.rms_norm(z, (4,)), slow=True),
    between("normalize", "any", F.normalize),
    between("local response norm", "any", lambda z: F.local_response_norm(z, 2), IMAGE, slow=True),
    between("branch", "refused", branch),
    between("where as relu", "any", lambda z: torch.where(z > 0, z, 0.0)),
    between("where with a jump", "refused", lambda z: torch.where(z > 0, z, 1 - z)),
    between("where with another condition", "refused", lambda z: torch.where(z.flip(1) > 0, z, 3 * z)),
    between("where between signs", "refused", lambda z: torch.where(z > 0, 1.0, -1.0), slow=True),
    between("masked fill", "refused", lambda z: z.masked_fill(z > 0.5, 3.0)),
    between("mask as a factor", "any", lambda z: z * (z > 0)),
    between("mask of another input", "refused", lambda z: z * (z.flip(1) > 0), slow=True),
    between("other backward", "certified", Backward.apply),
    between("straight-through", "refused", lambda z: z + (z.round() - z).detach()),
    between("detach", "certified", lambda z: 10 * z.detach()),
    between("no_grad", "certified", torch.no_grad()(lambda z: 10 * z), slow=True),
    between("half", "refused", lambda z: z.half().float()),
    between("bfloat16", "refused", lambda z: z.bfloat16().float()),
    between("integers", "refused", lambda z: (8 * z).int().float()),
    between("float64 inside", "any", lambda z: (3 * z.double()).float()),
    between("complex", "any", lambda z: torch.view_as_real(torch.complex(z, z.flip(1)) * 1j)),
    between("Fourier transform", "any", lambda z: torch.fft.fft(z).real),
    between("bits", "refused", lambda z: z.view(torch.int32).bitwise_and(-256).view(torch.float32)),
    *(between(name, "refused", function, slow=slow) for name, function, slow in WITHOUT_CONSTANT),
    between("nan_to_num", "any", torch.nan_to_num),
    between("sine", "any", lambda z: torch.sin(10 * z)),
    between("own silu", "any", lambda z: z * z.sigmoid(), slow=True),
    between("sum of squares", "refused", lambda z: z.square().sum(1, keepdim=True), slow=True),
    between("distance", "any", lambda z: torch.cdist(z, torch.ones(3, 4)), slow=True),
    between("norm", "any", lambda z: z.norm(dim=1, keepdim=True), slow=True),
    between("root of squares", "any", lambda z: z.square().sum(1, keepdim=True).sqrt(), slow=True),
    between("softmax", "any", lambda z: (10 * z).softmax(1)),
    between("hardswish", "any", F.hardswish, slow=True),
    between("leaky relu of slope -5", "certified", lambda z: F.leaky_relu(z, -5.0)),
    between("elu of alpha 30", "any", lambda z: F.elu(z, 30.0)),
    between("elu of alpha -30", "any", lambda z: F.elu(z, -30.0), slow=True),
    between("celu of alpha 0.01", "any", lambda z: F.celu(z, 0.01), slow=True),
    between("hardtanh with swapped limits", "any", lambda z: z.clamp(1.0, -1.0)),
    between("softshrink of a large lambda", "any", lambda z: F.softshrink(z, 100.0), slow=True),
    between("prelu of weight 30", "any", lambda z: F.prelu(z, torch.full((4,), 30.0))),
]

# --- (w): logits without a winner


def head_rows(function: Callable[[Tensor], Tensor], classes: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, classes))
    net[2].weight.data = function(net[2].weight.data)
    net[2].bias.data = function(net[2].bias.data)
    return net


HEADS = [
    Case("duplicate rows", "certified", lambda: head_rows(lambda w: w[[0, 0, 1]])),
    Case("equal rows", "any", lambda: head_rows(lambda w: w[[1, 1, 1]])),
    Case("zero rows", "any", lambda: head_rows(torch.zeros_like)),
    Case("almost equal rows", "certified", lambda: head_rows(lambda w: torch.stack([w[0], w[0] * (1 + 2e-7), w[1]]))),
    Case("one class", "any", lambda: head_rows(torch.clone, classes=1)),
    Case("no linear head", "any", lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    Case("no layer at all", "any", nn.Flatten, slow=True),
    Case("linear head in two parts", "certified", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))),
    between("constant logits", "any", lambda z: 0 * z),
    between("no path to the input", "any", torch.zeros_like),
]

# --- (x) to (z): linear operations and pooling; tests/certify/test_lipschitz.py compares most of them with Jacobians

OPERATIONS: list[tuple[str, Function, bool]] = [
    ("max pooling that overlaps", lambda z: F.max_pool2d(z, 3, 1), True),
    ("max pooling with padding", lambda z: F.max_pool2d(z, 3, 1, 1), True),
    ("max pooling with dilation", lambda z: F.max_pool2d(z, 2, 1, dilation=2), True),
    ("max pooling with ceil_mode", lambda z: F.max_pool2d(z, 3, 2, ceil_mode=True), True),
    ("average pooling that overlaps", lambda z: F.avg_pool2d(z, 3, 1), True),
    ("average pooling with padding", lambda z: F.avg_pool2d(z, 3, 1, 1), True),
    ("average pooling without the padding", lambda z: F.avg_pool2d(z, 3, 1, 1, count_include_pad=False), True),
    ("average pooling with ceil_mode", lambda z: F.avg_pool2d(z, 3, 2, ceil_mode=True), True),
    ("average pooling with all", lambda z: F.avg_pool2d(z, 3, 2, 1, ceil_mode=True, count_include_pad=False), True),
    ("average pooling by 1", lambda z: F.avg_pool2d(z, 3, 1, divisor_override=1), False),
    ("adaptive pooling that overlaps", lambda z: F.adaptive_avg_pool2d(z, 3), False),
    ("adaptive pooling that repeats", lambda z: F.adaptive_avg_pool2d(z, 7), True),
    ("adaptive max pooling that repeats", lambda z: F.adaptive_max_pool2d(z, 7), True),
    ("zero padding", lambda z: F.pad(z, (1, 2, 0, 3)), True),
    ("constant padding", lambda z: F.pad(z, (1, 2), value=1e3), True),
    ("negative padding", lambda z: F.pad(z, (-1, 2, 3, -2)), True),
    ("reflection", lambda z: F.pad(z, (3, 3, 3, 3), mode="reflect"), False),
    ("replication", lambda z: F.pad(z, (9, 9, 9, 9), mode="replicate"), False),
    ("circular padding", lambda z: F.pad(z, (4, 4, 4, 4), mode="circular"), True),
    ("concatenation with itself", lambda z: torch.cat([z, z, z], 1), True),
    ("sum with itself", lambda z: z + z, True),
    ("difference with itself", lambda z: z - z, True),
    ("difference with its half", lambda z: z - 0.5 * z, True),
    ("expand", lambda z: z[:, None].expand(-1, 5, -1, -1, -1), False),
    ("expand that broadcasts in a sum", lambda z: z.sum(1, keepdim=True) + z, True),
    ("repeat", lambda z: z.repeat(1, 3, 1, 2), True),
    ("repeat_interleave", lambda z: z.repeat_interleave(5, 2), True),
    ("repeated index", lambda z: z.index_select(2, torch.tensor([0, 0, 0, 0, 1])), True),
    ("repeated index by brackets", lambda z: z[:, :, [0, 0, 0, 1], [1, 1, 1, 1]], True),
    ("gather", lambda z: z.gather(3, torch.zeros_like(z, dtype=torch.long)), True),
    ("unfold", lambda z: z.unfold(2, 3, 1), True),
    ("image to columns", lambda z: F.unfold(z, 3, padding=1), True),
    ("columns to image", lambda z: F.fold(z.flatten(2).reshape(len(z), 8, 4), (3, 3), 2), True),
    ("flip", lambda z: z.flip(2) + z, True),
    ("transpose", lambda z: z.transpose(2, 3) + z, True),
    ("roll", lambda z: z.roll((1, 2), (2, 3)) + z, True),
    ("pixel shuffle", lambda z: F.pixel_shuffle(z.repeat(1, 2, 1, 1), 2), True),
    ("nearest upsampling", lambda z: F.interpolate(z, scale_factor=3), True),
    ("bilinear upsampling", lambda z: F.interpolate(z, size=(9, 5), mode="bilinear"), True),
    ("aligned upsampling", lambda z: F.interpolate(z, size=(9, 5), mode="bilinear", align_corners=True), True),
    ("bicubic upsampling", lambda z: F.interpolate(z, size=(9, 5), mode="bicubic"), True),
    ("area downsampling", lambda z: F.interpolate(z, size=(3, 3), mode="area"), True),
    ("cumulative sum", lambda z: z.cumsum(3), True),
    ("sum over pixels", lambda z: z.sum((2, 3)), True),
    ("sum of parts of one", lambda z: z[:, :, :3] + z[:, :, 1:], True),
    ("writes of slices", lambda z: torch.stack([z[:, 0], 3 * z[:, 0]], 1), True),
    ("a sum that cancels", lambda z: (z + 1e8) - 1e8, False),
    ("a product that overflows", lambda z: (z * 1e30) * 1e-30, False),
    ("a product that underflows", lambda z: (z * 1e-42) * 1e42, False),
    ("grouped convolution", lambda z: F.conv2d(z, 10 * torch.ones(2, 1, 3, 3), groups=2), True),
    ("dilated convolution", lambda z: F.conv2d(z, torch.ones(1, 2, 2, 2), dilation=3, padding=2), True),
    ("transposed convolution", lambda z: F.conv_transpose2d(z, torch.ones(2, 1, 3, 3), stride=2), True),
    ("transposed grouped convolution", lambda z: F.conv_transpose2d(z, torch.ones(2, 2, 3, 3), groups=2), True),
    ("in-place writes", lambda z: z.clone().index_fill_(1, torch.tensor([0]), 2.0), True),
]
LINEAR = [between(name, "any", function, IMAGE, slow) for name, function, slow in OPERATIONS]

CASES = [*HISTORY, *MIXTURES, *NONLINEAR, *HEADS, *LINEAR]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name.replace(" ", "-"), marks=[pytest.mark.slow] * c.slow) for c in CASES]
)
def test_refused_or_unbroken(case):
    net = seeded(case.build)
    proof = prove(net, case.shape)
    if isinstance(proof, Refusal):
        assert case.outcome != "certified", proof.message
        return
    assert case.outcome != "refused"
    x = points(proof.model, case.shape, dtype_of(net), seed=1)
    assert_unbroken(proof, net, x)
    if case.outcome == "certified":
        assert (proof(x).radius > 0).any()


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


# --- states of the process


@contextlib.contextmanager
def global_hook(pre: bool) -> Iterator[None]:
    """Every linear layer 30 times as large."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> Tensor | None:
        value = inputs[0] if output is None else output
        return torch.sin(30 * value) if isinstance(value, Tensor) and value.dim() == 2 else None

    modules = torch.nn.modules.module
    register = modules.register_module_forward_pre_hook if pre else modules.register_module_forward_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Subnormal numbers count as zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "global forward hook": lambda: global_hook(pre=False),
    "global forward pre-hook": lambda: global_hook(pre=True),
    "bfloat16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "subnormal numbers flushed": flushed,
    "inference mode": torch.inference_mode,
    "default float64": lambda: default_dtype(torch.float64),
    "medium precision": lambda: matmul_precision("medium"),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: scaled_rows(1.0),
    "underflow": lambda: dense(1.4e-45, 1e38, 1e7),
    "small": lambda: dense(1e-30, 1e-8, 1e30, 1e8),
    "centroids": lambda: CentroidNet(
        (4,), 3, per_class=2, bounds=None, encoder=lambda *shape: MLP(*shape, hidden=(4,))
    ),
}


@functools.cache
def proof_before(net: str) -> Proof | Refusal:
    """The proof of a network in the usual state, which the states after it share."""
    return prove(seeded(NETS[net]), (4,))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("net", "when"),
    [
        *((net, when) for net in ("dense", "underflow") for when in ("before and after", "after")),
        pytest.param("centroids", "before and after", marks=pytest.mark.slow),
        ("centroids", "after"),
        *(pytest.param("small", when, marks=pytest.mark.slow) for when in ("before and after", "after")),
    ],
)
def test_states_of_the_process(net, state, when):
    """Also if they change after the proof, certificates are about what the certified object computes."""
    module, proof = seeded(NETS[net]), proof_before(net)
    assert not isinstance(proof, Refusal), proof.message
    with contextlib.ExitStack() as stack:
        stack.enter_context(STATES[state]())
        if when == "before and after":
            proof = prove(module, (4,))
            if isinstance(proof, Refusal):
                return
        with torch.inference_mode(False):
            x = points(proof.model, (4,), torch.float32, seed=1)
        assert_unbroken(proof, None, x)


# --- weights that change after the proof


def by_data(net: nn.Module, proof: Proof) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(-30)


def by_load_state_dict(net: nn.Module, proof: Proof) -> None:
    net.load_state_dict({name: 30 * value.flip(0) for name, value in net.state_dict().items()})


def by_optimizer(net: nn.Module, proof: Proof) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=100.0)
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def by_buffers(net: nn.Module, proof: Proof) -> None:
    net[1].running_mean.add_(30)
    net[1].running_var.mul_(1e-3)


def by_new_layers(net: nn.Module, proof: Proof) -> None:
    net[0] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net[2].weight = nn.Parameter(-30 * net[2].weight)


def by_hooks(net: nn.Module, proof: Proof) -> None:
    net[0].register_forward_hook(lambda module, inputs, output: -30 * output)


def by_constants(net: nn.Module, proof: Proof) -> None:
    with torch.no_grad():
        for buffer in proof.model.buffers():
            buffer.mul_(30)


def by_constants_of_the_graph(net: nn.Module, proof: Proof) -> None:
    with torch.no_grad():
        for buffer in proof.model.graph_module.buffers():
            buffer.data = 30 * buffer.flip(0)


def by_forward_of_the_object(net: nn.Module, proof: Proof) -> None:
    graph = copy.deepcopy(proof.model.graph_module)
    proof.model.forward = lambda x: graph(torch.sin(30 * x))


def by_hook_of_the_object(net: nn.Module, proof: Proof) -> None:
    proof.model.register_forward_pre_hook(lambda module, inputs: (torch.sin(30 * inputs[0]),))


OUTSIDE = [by_data, by_load_state_dict, by_optimizer, by_buffers, by_new_layers, by_hooks]
INSIDE = [by_constants, by_constants_of_the_graph, by_forward_of_the_object, by_hook_of_the_object]


def with_buffers() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[1].running_var.mul_(4)
    return net


@pytest.mark.parametrize("change", OUTSIDE, ids=lambda change: change.__name__)
def test_changes_of_the_module_do_not_matter(change):
    net = seeded(with_buffers)
    proof = certifier_for(net, shape=(4,))
    x = points(proof.model, (4,), torch.float32, seed=1)
    before = proof(x)
    change(net, proof)
    after = proof(x)
    assert torch.equal(before.prediction, after.prediction)
    assert torch.equal(before.radius, after.radius)
    assert (after.radius > 0).any()
    assert_unbroken(proof, None, x)


@pytest.mark.parametrize("change", INSIDE, ids=lambda change: change.__name__)
def test_changes_of_the_certified_object_are_noticed(change):
    net = seeded(with_buffers)
    proof = certifier_for(net, shape=(4,))
    x = points(proof.model, (4,), torch.float32, seed=1)
    change(net, proof)
    assert_unbroken(proof, None, x)


# --- inputs

INWARDS = (1 - 1e-6) * torch.tensor([[1.0, -1.0]], dtype=torch.float64)


def test_inputs_that_are_not_finite_have_no_certificate():
    proof = certifier_for(seeded(NETS["dense"]), shape=(4,))
    x = torch.ones(4, 4)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row, 2] = value
    certificate = proof(x)
    assert (certificate.radius[:3] == 0).all()
    assert certificate.radius[3] > 0


def test_inputs_of_another_precision():
    """A float32 network sees rounded inputs, so distances between the inputs that were given are different ones."""
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[0].bias.zero_()
    proof = certifier_for(net, shape=(2,))
    gap = torch.logspace(-9, -1, 200, dtype=torch.float64)  # rounding to float32 moves these inputs by up to 3e-5
    x = torch.stack([1000 + gap, torch.full_like(gap, 1000)], 1)
    certificate = proof(x)
    assert 20 < (certificate.radius > 0).sum() < 180
    for y in (x - INWARDS * (certificate.radius / 2**0.5)[:, None], x):
        other = net(y.float()).argmax(1) != certificate.prediction
        assert not (other & (certificate.radius > 0)).any()


@pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 2, 2), (1, 4, 1)])
def test_inputs_of_another_shape_are_refused(shape):
    proof = certifier_for(seeded(NETS["dense"]), shape=(4,))
    assert isinstance(attempt(lambda: proof(torch.ones(shape))), Refusal)


def test_an_empty_batch():
    certificate = certifier_for(seeded(NETS["dense"]), shape=(4,))(torch.ones(0, 4))
    assert certificate.prediction.shape == certificate.radius.shape == (0,)


def test_strides_of_the_input_do_not_matter():
    net = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    proof = certifier_for(net, shape=IMAGE)
    x = points(proof.model, IMAGE, torch.float32, seed=1)[:10]
    expected = proof(x)
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        certificate = proof(other)
        assert torch.equal(certificate.prediction, expected.prediction)
        torch.testing.assert_close(certificate.radius, expected.radius, rtol=1e-3, atol=1e-6)
        assert_unbroken(proof, net, other)


# --- smoothing, and the eta layer


class AllNaN(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3] * float("nan")


def test_smoothing_does_not_certify_nan():
    smoothed = Smoothed(AllNaN(), sigma=0.5, n0=10, n=200)
    certificate = smoothed(torch.rand(2, 4))
    assert (certificate.radius == 0).all()


def close_centroids(dtype: torch.dtype, offset: float) -> CentroidNet:
    """Two centroids far from the origin, so that computed distances are rough."""
    net = CentroidNet((2,), 2, per_class=1, bounds=None).to(dtype)
    with torch.no_grad():
        net.head.centroids.copy_(torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64) + offset)
    return net


ETAS = [(0.3, 0.0), (0.01, 1e3), (0.3, 1e6)]
MORE_ETAS = [(eta, offset) for eta in (0.01, 0.3, 0.9) for offset in (0.0, 1e3, 1e6) if (eta, offset) not in ETAS]


@pytest.mark.parametrize(
    ("eta", "offset"), [*ETAS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_ETAS)]
)
def test_radii_of_the_eta_layer_hold_with_rounding(eta, offset):
    """Inputs on the line between two centroids: global and local radius against the accepted ends of the classes."""
    net = close_centroids(torch.float32, offset)
    proof = certifier_for(net, eta=eta)
    t = torch.linspace(-0.5, 1.5, 4001, dtype=torch.float64)
    x = (torch.stack([t, torch.zeros_like(t)], 1) + offset).float().unique(dim=0)
    accepted, prediction = proof.accepts(x), net(x).argmax(1)
    place = x[:, 0].double()
    ends = [place[accepted & (prediction == 0)], place[accepted & (prediction == 1)]]
    assert min(map(len, ends)) > 0
    assert float(ends[1].min() - ends[0].max()) >= proof.global_radius
    for inside, other in ((ends[0], place[prediction == 1]), (ends[1], place[prediction == 0])):
        assert float((inside[:, None] - other).abs().min()) >= proof.local_radius
    certificate = proof(x)
    assert (certificate.radius[~accepted] == 0).all()
    assert_unbroken(proof, net, x[:: max(1, len(x) // 200)])
