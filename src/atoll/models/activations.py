"""Nonlinearities by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import InputError

# One activation is one name here and one entry of ACTIVATIONS.
Activation = Literal["relu", "gelu", "softplus", "minmax", "groupsort", "householder"]


class MinMax(nn.Module):
    """Sorts neighboring channels (Anil et al., 2019): a permutation, so gradients keep their norm.

    >>> MinMax()(torch.tensor([[3.0, 1.0, 2.0, 5.0]]))
    tensor([[1., 3., 2., 5.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise InputError(f"MinMax: expected an even number of channels, got {x.shape[1]}")
        pairs: Tensor = _SortPairs.apply(x, x[:, ::2] > x[:, 1::2])  # type: ignore[no-untyped-call]
        return pairs


class _SwapPairs(torch.autograd.Function):
    """Linear, and its own transpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, swapped: Tensor) -> Tensor:
        first, second = x[:, ::2], x[:, 1::2]
        pair = [torch.where(swapped, second, first), torch.where(swapped, first, second)]
        return torch.stack(pair, 2).flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _SwapPairs.apply(gradient, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return _SwapPairs.apply(tangent, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _SortPairs(_SwapPairs):
    """Smaller and larger of each pair; backwards a permutation, where those of PyTorch take four times as long."""

    @staticmethod
    def forward(x: Tensor, swapped: Tensor) -> Tensor:
        first, second = x[:, ::2], x[:, 1::2]
        return torch.stack([torch.minimum(first, second), torch.maximum(first, second)], 2).flatten(1, 2)


class GroupSort(nn.Module):
    """Sorts groups of neighboring channels (Anil et al., 2019): a permutation, so gradients keep their norm.

    Args:
        group: number of channels that are sorted together.

    >>> GroupSort(4)(torch.tensor([[3.0, 1.0, 2.0, 0.0, 7.0, 6.0, 5.0, 4.0]]))
    tensor([[0., 1., 2., 3., 4., 5., 6., 7.]])
    """

    def __init__(self, group: int = 4) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % self.group:
            raise InputError(f"GroupSort: expected channels divisible by {self.group}, got {x.shape[1]}")
        return torch.unflatten(x, 1, (-1, self.group)).sort(2).values.flatten(1, 2)

    def extra_repr(self) -> str:
        return str(self.group)


class Householder(nn.Module):
    r"""Reflects pairs of neighboring channels into a half-plane (Singla et al., 2021), so gradients keep their norm.

    .. math:: \sigma_v(z) = z \text{ if } v^T z > 0 \text{ else } (I - 2 v v^T) z
              = v\,|v^T z| + w\,w^T z, \quad v = (\sin\tfrac\theta2, -\cos\tfrac\theta2),\ w \perp v

    The angle of each pair is learned.  It starts at 90 degrees: the larger channel of a pair first, then the smaller.
    The form on the right is computed: rotate each pair, take the absolute value of its first channel, rotate back.

    Args:
        channels: even number of channels.

    >>> Householder(4)(torch.tensor([[3.0, 1.0, 2.0, 5.0]])).detach().round(decimals=4)
    tensor([[3., 1., 5., 2.]])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % 2:
            raise InputError(f"Householder: expected an even number of channels, got {channels}")
        self.angle = nn.Parameter(torch.full((channels // 2,), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        pairs = len(self.angle)
        if x.shape[1] != 2 * pairs:
            raise InputError(f"Householder: expected {2 * pairs} channels, got {x.shape[1]}")
        a, b = (self.angle / 2).sin(), -(self.angle / 2).cos()
        rotation = torch.stack([a, b, -b, a], 1).view(2 * pairs, 2, 1)
        inverse = torch.stack([a, -b, b, a], 1).view(2 * pairs, 2, 1)
        y = F.conv1d(x.reshape(x.shape[0], 2 * pairs, -1), rotation, groups=pairs)
        y = torch.stack([y[:, ::2].abs(), y[:, 1::2]], 2).flatten(1, 2)
        return F.conv1d(y, inverse, groups=pairs).view(x.shape)

    def extra_repr(self) -> str:
        return str(2 * len(self.angle))


# Each entry makes a layer for a number of channels.
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda channels: nn.ReLU(),
    "gelu": lambda channels: nn.GELU(),
    "softplus": lambda channels: nn.Softplus(),
    "minmax": lambda channels: MinMax(),
    "groupsort": lambda channels: GroupSort(),
    "householder": Householder,
}
GROUPS = {"minmax": 2, "groupsort": 4, "householder": 2}  # channels that are combined


def expect_groups(activation: str, *widths: int) -> None:
    """Refuse widths that an activation cannot divide into its groups of channels.

    >>> expect_groups("minmax", 4, 6)
    """
    group = GROUPS.get(activation, 1)
    if any(width % group for width in widths):
        got = ", ".join(map(str, widths))
        raise InputError(f"activation: {activation} needs widths divisible by {group}, got {got}")
