"""Small nets for the tests of capture and digest: odd ones by name, random ones by seed."""

from __future__ import annotations

import random
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Apply(nn.Module):
    """A net whose forward pass is any function of itself and the input."""

    def __init__(self, function: Callable[[Apply, Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1))
        self.calls = 0

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Cancel(nn.Module):
    """Float32 loses most bits of the weights here, so a proof with recomputed weights is wrong."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + 1e4) - 1e4


class ScaledConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 3 * super()._conv_forward(x, weight, bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 3, 4)
        y, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.layer(tokens + y).mean(1)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def images(shape: tuple[int, ...], batch: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(seed))


def shared() -> nn.Module:
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), linear, linear)


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_forward_hook(lambda module, inputs, output: 10 * output)
    return net


def pre_hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] - 1,))
    return net


def overridden() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[1].forward = types.MethodType(lambda self, x: 7 * x, net[1])
    return net


def conv_forward() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), ScaledConv(1, 3, 2), nn.Flatten())


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def cayley() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        identity, weight = torch.eye(3), net.linear.weight[:, :3]
        return x[:, :3] @ torch.linalg.inv_ex(identity + weight - weight.T).inverse

    return Apply(forward)


def cancel() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    parametrize.register_parametrization(net[0], "weight", Cancel())
    return net


def old_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)))


def autocast() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.linear(x).float()

    return Apply(forward)


def writes_slices() -> nn.Module:
    def forward(net: Apply, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:, :2] = x[:, 2:]
        y[:, 2:] = net.linear(x)[:, :1]
        return y

    return Apply(forward)


def straight_through() -> nn.Module:
    return Apply(lambda net, x: net.linear(x + ((4 * x).round() / 4 - x).detach()))


def plain_tensor() -> nn.Module:
    offsets = torch.arange(4.0)
    return Apply(lambda net, x: net.linear(x + offsets) * net.scale.item())


ODD_NETS = [
    shared, hooked, pre_hooked, overridden, conv_forward, weight_norm, cayley, cancel, old_spectral_norm,
    autocast, writes_slices, straight_through, plain_tensor,
]  # fmt: skip
ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Softplus, nn.SiLU, nn.Tanh, nn.ELU, nn.Mish, lambda: nn.LeakyReLU(0.2), nn.Sigmoid]


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Concatenate(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


def random_net(seed: int) -> nn.Module:
    """Convolutions, norms, activations, residual sums, pooling and concatenation on inputs of shape (2, 6, 6)."""
    draw = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        width = 2
        for _ in range(draw.randint(2, 4)):
            layer, width = _random_layer(draw, width)
            layers.append(layer)
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 3))
        for buffer in net.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))  # running statistics that matter
    return net


def _random_layer(draw: random.Random, width: int) -> tuple[nn.Module, int]:
    kind = draw.choice(["conv", "norm", "activation", "residual", "pool", "concatenate"])
    if kind == "conv":
        padding = draw.choice(["zeros", "circular", "reflect"])
        return nn.Conv2d(width, 4, 3, padding=1, dilation=1, groups=draw.choice([1, 2]), padding_mode=padding), 4
    if kind == "norm":
        return draw.choice(
            [nn.BatchNorm2d(width), nn.GroupNorm(2, width), nn.InstanceNorm2d(width, affine=True)]
        ), width
    if kind == "activation":
        return draw.choice(ACTIVATIONS)(), width
    if kind == "residual":
        return Residual(nn.Sequential(nn.Conv2d(width, width, 1), draw.choice(ACTIVATIONS)())), width
    if kind == "pool":
        return draw.choice([nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(2, 1)]), width
    return Concatenate(nn.Conv2d(width, 2, 1), draw.choice(ACTIVATIONS)()), width + 2
