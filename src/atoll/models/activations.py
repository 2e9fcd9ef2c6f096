"""Nonlinearities by name."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from atoll.errors import InputError

# One activation is one name here and one entry of ACTIVATIONS.
Activation = Literal["relu", "gelu", "softplus", "minmax"]


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


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "minmax": MinMax,
}


def expect_pairs(activation: str, *widths: int) -> None:
    """Refuse layers that MinMax cannot pair up, before they are built."""
    if activation == "minmax" and any(width % 2 for width in widths):
        raise InputError(f"activation: minmax pairs channels and needs even widths, got {', '.join(map(str, widths))}")
