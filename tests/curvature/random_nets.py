"""Random small nets of all operations of our models, in float64, with the truth of their Hessian."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from atoll.curvature import EmpiricalRisk
from support import LOSSES

WIDTH = 6


class Attention(nn.Module):
    """Self-attention over three tokens, fused, as nn.MultiheadAttention, or written out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(2, 1, batch_first=True) if kind == "module" else nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (3, 2))
        if self.kind == "module":
            return self.inner(tokens, tokens, tokens, need_weights=False)[0].flatten(1)
        q, k, v = self.inner(tokens).chunk(3, -1)
        if self.kind == "fused":
            return nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).flatten(1)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    """One module used two times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).relu())


class Product(nn.Module):
    """Two layers multiplied: linear in each, not in both together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


class Standardized(nn.Linear):
    """Weights standardized by a fused kernel, as in nets without normalization."""

    def forward(self, x: Tensor) -> Tensor:
        weight = nn.functional.batch_norm(self.weight[None], None, None, training=True)[0]
        return nn.functional.linear(x, weight, self.bias)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def as_image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers, nn.Flatten())


def dense_layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# Every entry maps six features to six features.
BLOCKS = {
    "linear": dense_layer,
    "convolution": lambda: as_image(nn.Conv2d(1, 1, 3, padding=1)),
    "reflected convolution": lambda: as_image(nn.Conv2d(1, 1, (1, 3), padding=(0, 1), padding_mode="reflect")),
    "transposed convolution": lambda: as_image(nn.ConvTranspose2d(1, 1, 3, padding=1)),
    "max pooling": lambda: as_image(nn.MaxPool2d(2, stride=1, padding=1), nn.AdaptiveAvgPool2d((2, 3))),
    "average pooling": lambda: as_image(nn.AvgPool2d(3, stride=1, padding=1)),
    "ReLU": nn.ReLU,
    "leaky ReLU": lambda: nn.LeakyReLU(0.3),
    "PReLU": nn.PReLU,
    "hard tanh": nn.Hardtanh,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "hardswish": nn.Hardswish,
    "softmax": lambda: nn.Softmax(1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "RMS norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(dense_layer()),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(dense_layer()),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(dense_layer(), orthogonal_map="cayley"),
    "standardized weights": lambda: Standardized(WIDTH, WIDTH),
    "fused attention": lambda: Attention("fused"),
    "attention module": lambda: Attention("module"),
    "attention": lambda: Attention("plain"),
    "residual": lambda: Residual(nn.Sequential(dense_layer(), nn.ReLU(), dense_layer())),
    "tied": lambda: Twice(dense_layer()),
    "product": Product,
    "unused parameter": Unused,
    "dropout": lambda: nn.Dropout(0.3),
}


def random_risk(seed: int, blocks: int = 2) -> tuple[EmpiricalRisk, list[str]]:
    """A risk of a random net, and the names of its blocks; every name comes up in turn."""
    draw = random.Random(seed)
    names = [list(BLOCKS)[seed % len(BLOCKS)], *draw.sample(list(BLOCKS), blocks - 1)]
    draw.shuffle(names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(*(BLOCKS[name]() for name in names), nn.Linear(WIDTH, 3)).double()
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        x_adv = x + 0.1 * torch.randn_like(x)
        for parameter in net.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        net(x)  # statistics of batch norm
    loss = draw.choice(list(LOSSES))
    risk = EmpiricalRisk(net.eval(), LOSSES[loss](), x, torch.arange(5) % 3, None if loss == "standard" else x_adv)
    return risk, names


def true_hessian(risk: EmpiricalRisk) -> Tensor:
    """By differences of gradients in float64, for all weights: neither double backward nor Gauss-Newton is involved."""
    flat = torch.cat([p.detach().flatten() for p in risk.parameters])
    columns = []
    for i in range(len(flat)):
        gradients = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[i] += sign * 1e-6
            with torch.no_grad():
                for p, part in zip(risk.parameters, risk.split(moved), strict=True):
                    p.copy_(part)
            gradients.append(torch.cat([g.flatten() for g in risk.gradient()]))
        columns.append((gradients[0] - gradients[1]) / 2e-6)
    with torch.no_grad():
        for p, part in zip(risk.parameters, risk.split(flat), strict=True):
            p.copy_(part)
    return torch.stack(columns)
