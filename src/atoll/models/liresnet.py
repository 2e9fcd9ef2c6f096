"""LiResNet (Hu et al., 2023): linear residual blocks, whose norm can be computed instead of only bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import LARGEST_SIZE, check_count
from atoll.models.activations import ACTIVATIONS, Activation, expect_groups
from atoll.models.base import MODELS, Classifier, Initialization, choose, expect_image, initialize

Block = Literal["linear", "conventional", "plain"]


class LinearResidual(nn.Module):
    r"""Linear residual block :math:`y = x + \beta\,\mathrm{conv}(x) / \sqrt{L}`, with a 3x3 convolution.

    L is the depth of the network, and :math:`\beta` has one learned factor per channel.

    >>> LinearResidual(4, depth=6)(torch.zeros(2, 4, 5, 5)).shape
    torch.Size([2, 4, 5, 5])
    """

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.beta = nn.Parameter(torch.ones(channels))
        self.scale = 1 / math.sqrt(depth)

    @property
    def kernel(self) -> Tensor:
        """The whole block as one convolution; the identity is a kernel with a one in the center."""
        kernel = self.conv.weight * (self.scale * self.beta)[:, None, None, None]
        identity = torch.zeros_like(kernel)
        identity[:, :, 1, 1] = torch.eye(len(kernel)).to(kernel)
        return kernel + identity

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.conv(x)
        return x + residual * (self.scale * self.beta)[:, None, None]


class Residual(nn.Module):
    """Residual connection ``x + branch(x)``.

    >>> Residual(nn.Identity())(torch.ones(1))
    tensor([2.])
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.branch(x)
        return x + residual


class ChannelScale(nn.Module):
    """Multiplies each channel by a learned factor."""

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None]


class UnitLinear(nn.Linear):
    """Dense layer whose rows have norm 1, known as last-layer normalization (Singla et al., 2022).

    >>> UnitLinear(3, 2).unit_weight.norm(dim=1).detach().round(decimals=4)
    tensor([1., 1.])
    """

    @property
    def unit_weight(self) -> Tensor:
        return F.normalize(self.weight, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.unit_weight, self.bias)


def _block(kind: Block, width: int, depth: int, activation: Callable[[int], nn.Module]) -> nn.Module:
    if kind == "linear":
        return LinearResidual(width, depth)
    if kind == "plain":
        return nn.Conv2d(width, width, 3, padding=1)
    # The factor starts at zero, which works best in the thesis (C.2).
    inner = [nn.Conv2d(width, width, 3, padding=1), activation(width), nn.Conv2d(width, width, 3, padding=1)]
    return Residual(nn.Sequential(*inner, ChannelScale(width, 0.0)))


@MODELS.register()
class LiResNet(Classifier):
    r"""LiResNet LxW: a stem, ``depth`` linear residual blocks with MinMax, a neck and a unit-norm head (thesis, C.1.2).

    The stem maps images of 32 (5x5, stride 2), 64 (7x7, stride 4) and 224 pixels (14x14, stride 14) to 16x16.

    The Lipschitz bound grows with every layer, so training depends on the initialization.  ``published`` is the one of
    the thesis: residual kernels from :math:`N(0, 1/(9W)^2)`, so that a block is close to the identity, other layers
    orthogonal, and zero biases.

    Args:
        depth: number of blocks.
        width: number of channels.
        features: width of the dense layer in the neck (thesis: 4096 for ImageNet).
        block: ``linear`` (LiResNet), ``conventional`` (``x + beta conv(MinMax(conv(x)))``) or ``plain`` (one
            convolution, the ConvNet of the thesis).
        activation: activation after stem, blocks and neck, and inside conventional blocks.
        neck_activation: whether an activation follows the dense layer of the neck; in the thesis, it follows only the
            convolution.
        initialization: initialization of convolutions and dense layers: ``default`` (PyTorch's), ``orthogonal`` or
            ``published``.

    >>> LiResNet((3, 32, 32), 10, depth=6, width=128).num_parameters
    9831690
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: int = 12,
        width: int = 256,
        features: int = 2048,
        block: Block = "linear",
        activation: Activation = "minmax",
        neck_activation: bool = True,
        initialization: Initialization | Literal["published"] = "default",
        **options: Any,
    ) -> None:
        # For smaller images, the output of the stem would be smaller than the kernel of the neck.
        channels, height, side = expect_image(input_shape, type(self).__name__, at_least=7)
        check_count(1, LARGEST_SIZE, depth=depth, width=width, features=features)
        nonlinearity = choose(ACTIVATIONS, activation, "activation")
        expect_groups(activation, width, *[features] * neck_activation)
        super().__init__(input_shape, num_classes, **options)
        choose({"linear": 0, "conventional": 0, "plain": 0}, block, "block")
        choose({"default": 0, "orthogonal": 0, "published": 0}, initialization, "initialization")
        small = min(height, side)
        kernel, stride, padding = (5, 2, 2) if small < 64 else (7, 4, 3) if small < 224 else (14, 14, 0)
        height, side = ((n + 2 * padding - kernel) // stride + 1 for n in (height, side))
        layers: list[nn.Module] = [nn.Conv2d(channels, width, kernel, stride, padding), nonlinearity(width)]
        for _ in range(depth):
            layers += [_block(block, width, depth, nonlinearity), nonlinearity(width)]
        layers += [nn.Conv2d(width, 2 * width, 4, 4), nonlinearity(2 * width), nn.Flatten()]
        layers += [nn.Linear(2 * width * (height // 4) * (side // 4), features)]
        self.body = nn.Sequential(*layers, *[nonlinearity(features)] * neck_activation)
        self.head = UnitLinear(features, num_classes)
        initialize(self, "orthogonal" if initialization == "published" else initialization)
        for module in self.modules() if initialization == "published" else ():
            if isinstance(module, LinearResidual):
                nn.init.normal_(module.conv.weight, std=1 / (9 * width))
