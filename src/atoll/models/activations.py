"""Nonlinearities that models can be asked for by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from atoll.errors import InputError

# One activation is one name here and one entry of ACTIVATIONS.
Activation = Literal["relu", "gelu", "softplus", "minmax"]


class MinMax(nn.Module):
    """Neighbouring channels in rising order (Anil et al., 2019): a permutation, so gradients keep their norm.

    >>> MinMax()(torch.tensor([[3.0, 1.0, 2.0, 5.0]]))
    tensor([[1., 3., 2., 5.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise InputError(f"MinMax: expected an even number of channels, got {x.shape[1]}")
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
