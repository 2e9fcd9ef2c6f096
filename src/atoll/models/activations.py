"""Activation functions by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import InputError

# To add an activation, add a name here and an entry in ACTIVATIONS.
Activation = Literal["relu", "gelu", "softplus", "minmax", "groupsort", "householder"]


class MinMax(nn.Module):
    """Sorts pairs of neighboring channels (Anil et al., 2019); a permutation, so it preserves gradient norms.

    >>> MinMax()(torch.tensor([[3.0, 1.0, 2.0, 5.0]]))
    tensor([[1., 3., 2., 5.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise InputError(f"MinMax: expected an even number of channels, got {x.shape[1]}")
        pairs: Tensor = _SortPairs.apply(x, x[:, ::2] > x[:, 1::2])  # type: ignore[no-untyped-call]
        return pairs


class _SwapPairs(torch.autograd.Function):
    """Swaps the channels of selected pairs; a linear map that is its own transpose."""

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
    """Returns the smaller and the larger of each pair; the backward pass is four times faster than PyTorch's."""

    @staticmethod
    def forward(x: Tensor, swapped: Tensor) -> Tensor:
        first, second = x[:, ::2], x[:, 1::2]
        return torch.stack([torch.minimum(first, second), torch.maximum(first, second)], 2).flatten(1, 2)


class GroupSort(nn.Module):
    """Sorts groups of neighboring channels (Anil et al., 2019); a permutation, so it preserves gradient norms.

    Args:
        group: number of channels in a group.

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
    r"""Reflects pairs of neighboring channels into a half-plane (Singla et al., 2021), which preserves gradient norms.

    .. math:: \sigma_v(z) = z \text{ if } v^T z > 0 \text{ else } (I - 2 v v^T) z
              = v\,|v^T z| + w\,w^T z, \quad v = (\sin\tfrac\theta2, -\cos\tfrac\theta2),\ w \perp v

    The angle of each pair is learned.  It starts at 90 degrees, which sorts each pair in descending order.  The
    implementation follows the right-hand side: rotate each pair, take the absolute value of its first channel, rotate
    back.

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


# Functions that create a layer for a number of channels.
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda channels: nn.ReLU(),
    "gelu": lambda channels: nn.GELU(),
    "softplus": lambda channels: nn.Softplus(),
    "minmax": lambda channels: MinMax(),
    "groupsort": lambda channels: GroupSort(),
    "householder": Householder,
}
GROUPS = {"minmax": 2, "groupsort": 4, "householder": 2}  # number of channels in a group


def expect_groups(activation: str, *widths: int) -> None:
    """Raise an InputError if a width is not divisible by the group size of the activation.

    >>> expect_groups("minmax", 4, 6)
    """
    group = GROUPS.get(activation, 1)
    if any(width % group for width in widths):
        got = ", ".join(map(str, widths))
        raise InputError(f"activation: {activation} requires widths divisible by {group}, got {got}")
