"""Other starting points than PyTorch's."""

from __future__ import annotations

from typing import Literal

from torch import nn

Initialization = Literal["default", "orthogonal"]


def initialize(model: nn.Module, kind: Initialization) -> None:
    """Start dense layers and convolutions from orthogonal matrices (a kernel as one matrix) and zero biases.

    Networks that are trained on the product of their layers' norms start where all singular values are alike.

    >>> layer = nn.Linear(3, 2)
    >>> initialize(layer, "orthogonal")
    >>> (layer.weight @ layer.weight.T).detach().round(decimals=5).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """
    if kind == "default":
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
