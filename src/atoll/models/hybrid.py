"""Hybrid Vision Transformer: a ResNet with group normalization and standardized weights makes the patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import InputError, check_range
from atoll.models.base import MODELS, Classifier, expect_image
from atoll.models.vit import Encoder, Variant, linear_head, size_of

# As in the code the published weights come from.
GROUPS = 32
NORM_EPS = 1e-6
WEIGHT_EPS = 1e-5


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros around ``x``, so that windows of ``kernel`` at ``stride`` give ``ceil(side / stride)`` outputs.

    An odd number of zeros goes to the bottom right.  The published weights were trained this way; symmetric
    padding would shift every map by a pixel.
    """
    height, width = (max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in x.shape[-2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def standardize(weight: Tensor) -> Tensor:
    """Zero mean and unit standard deviation over each filter (Qiao et al., 2019)."""
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    return (weight - mean) / (variance.sqrt() + WEIGHT_EPS)


class StdConv(nn.Conv2d):
    """Convolution with standardized weights, without bias, padded to ``ceil(side / stride)``.

    >>> StdConv(3, 4, 7, stride=2)(torch.zeros(1, 3, 9, 8)).shape
    torch.Size([1, 4, 5, 4])
    """

    def __init__(self, channels: int, out: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(pad_same(x, self.kernel_size[0], self.stride[0]), standardize(self.weight), stride=self.stride)


class SameMaxPool(nn.Module):
    """3x3 max-pooling to ``ceil(side / stride)``, for inputs >= 0, where padding with zeros is neutral."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(pad_same(x, 3, self.stride), 3, self.stride)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=NORM_EPS)


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 block, four times wider outside than inside.

    >>> Bottleneck(32, 32, stride=2)(torch.zeros(1, 32, 6, 6)).shape
    torch.Size([1, 128, 3, 3])
    """

    def __init__(self, channels: int, inner: int, *, stride: int = 1) -> None:
        super().__init__()
        out = 4 * inner
        self.conv1, self.norm1 = StdConv(channels, inner, 1), group_norm(inner)
        self.conv2, self.norm2 = StdConv(inner, inner, 3, stride=stride), group_norm(inner)
        self.conv3, self.norm3 = StdConv(inner, out, 1), group_norm(out)
        # The block starts as its shortcut, as in the original.
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out or stride != 1:
            self.shortcut = nn.Sequential(StdConv(channels, out, 1, stride=stride), group_norm(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.shortcut(x) + self.norm3(self.conv3(y)))


class ResNetStem(nn.Module):
    """Root convolution, pooling and stages of bottlenecks; each stage doubles the channels.

    Args:
        channels: input channels.
        width: channels of the root, and inner width of the first stage.
        blocks: bottlenecks of each stage.
        strides: of the root, the pooling, and every stage but the first, which keeps its size.
        root_kernel: side of the root's kernel.
    """

    def __init__(
        self, channels: int, *, width: int, blocks: Sequence[int], strides: Sequence[int], root_kernel: int
    ) -> None:
        super().__init__()
        root, pool, *later = strides
        self.root = StdConv(channels, width, root_kernel, stride=root)
        self.norm = group_norm(width)
        self.pool = SameMaxPool(pool) if pool > 1 else nn.Identity()
        stages: list[nn.Module] = []
        channels = width
        for stage, (count, stride) in enumerate(zip(blocks, [1, *later], strict=True)):
            inner = width * 2**stage
            first = Bottleneck(channels, inner, stride=stride)
            channels = 4 * inner
            stages.append(nn.Sequential(first, *(Bottleneck(channels, inner) for _ in range(count - 1))))
        self.stages = nn.Sequential(*stages)
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stages(self.pool(F.relu(self.norm(self.root(x)))))
        return y


@MODELS.register()
class HybridViT(Classifier):
    """ResNet-50 and ViT: ``variant="L"`` is Hybrid-L16 (Dosovitskiy et al., 2021; TrH, appendix F).

    The ResNet's fourth stage is folded into the third (3, 4, 9 blocks), which leaves 1024 channels at a
    sixteenth of the resolution; every position is a token.  A 32x32 image would give only 2x2 tokens.  As
    strides are no part of the weights, ``strides=(1, 1, 1, 2)`` gives 16x16 from the same checkpoint, and
    ``root_kernel=3`` takes its first kernel down-sampled, as ViT's patches are.

    Args:
        variant: Ti, S, B or L.
        blocks: bottlenecks in each stage of the ResNet.
        strides: of the root convolution, the pooling (left out at 1), and each stage but the first.
        root_kernel: side of the root convolution's kernel.
        stem_width: channels of the root, a multiple of 32 (the groups of the normalization).
        dropout: rate in the transformer.
        width: in place of the variant's own, as are the next three.
        depth: number of blocks.
        heads: of the attention.
        mlp_ratio: hidden units of a block's MLP, in units of the width.

    >>> small = {"stem_width": 32, "blocks": (1, 1, 1), "width": 16, "depth": 1, "heads": 2}
    >>> model = HybridViT((3, 32, 32), 10, strides=(1, 2, 2, 2), **small)
    >>> model.body.grid, model(torch.zeros(2, 3, 32, 32)).shape
    ((4, 4), torch.Size([2, 10]))
    """

    body: Encoder

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        variant: Variant = "L",
        blocks: Sequence[int] = (3, 4, 9),
        strides: Sequence[int] = (2, 2, 2, 2),
        root_kernel: int = 7,
        stem_width: int = 64,
        dropout: float = 0.0,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        mlp_ratio: float | None = None,
        **options: Any,
    ) -> None:
        channels, *sides = expect_image(input_shape, type(self).__name__)
        if not blocks or len(strides) != len(blocks) + 1 or min(*strides, *blocks) < 1:
            raise InputError(
                "blocks, strides: expected positive numbers, one stride each for root, pooling and every"
                f" stage but the first, got blocks={tuple(blocks)} and strides={tuple(strides)}"
            )
        if stem_width < 1 or stem_width % GROUPS:
            raise InputError(f"stem_width: expected a multiple of {GROUPS}, got {stem_width}")
        check_range("[2, inf)", root_kernel=root_kernel)  # one weight cannot be standardized
        super().__init__(input_shape, num_classes, **options)
        size = size_of(variant, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
        stem = ResNetStem(channels, width=stem_width, blocks=blocks, strides=strides, root_kernel=root_kernel)
        for stride in strides:
            sides = [-(-side // stride) for side in sides]
        self.body = Encoder(stem, (stem.channels, *sides), patch=1, stride=1, size=size, dropout=dropout)
        self.head = linear_head(size.width, num_classes)
