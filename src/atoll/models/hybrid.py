"""Hybrid Vision Transformer, whose patches come from a ResNet with group normalization and standardized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import LARGEST_SIZE, InputError, check_count
from atoll.models.base import MODELS, Classifier, expect_image
from atoll.models.vit import Encoder, Variant, linear_head, size_of

# As in the original code, which the published weights require.
GROUPS = 32
NORM_EPS = 1e-6
WEIGHT_EPS = 1e-5


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad ``x`` with zeros so that windows of ``kernel`` at ``stride`` give ``ceil(side / stride)`` outputs.

    If the number of zeros is odd, the extra one goes to the bottom right.  The published weights were trained this way;
    symmetric padding would shift every map by a pixel.
    """
    height, width = (max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in x.shape[-2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def standardize(weight: Tensor) -> Tensor:
    """Standardize each filter to zero mean and unit standard deviation (Qiao et al., 2019)."""
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
    """3x3 max-pooling to ``ceil(side / stride)``, for inputs >= 0, for which zero padding has no effect."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(pad_same(x, 3, self.stride), 3, self.stride)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=NORM_EPS)


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet: 1x1, 3x3 and 1x1 convolutions, with a quarter of the channels inside.

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
    """ResNet with a root convolution, pooling and stages of bottlenecks; each stage doubles the channels.

    Args:
        channels: number of input channels.
        width: channels of the root convolution, and inner width of the first stage.
        blocks: number of bottlenecks in each stage.
        strides: strides of the root convolution, the pooling, and every stage except the first, which has stride 1.
        root_kernel: kernel size of the root convolution.
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
    """Hybrid ViT on top of a ResNet-50; ``variant="L"`` is Hybrid-L16 (Dosovitskiy et al., 2021; TrH, appendix F).

    The fourth stage of the ResNet is merged into the third (3, 4, 9 blocks), which gives 1024 channels at a sixteenth
    of the resolution; every position is a token.  A 32x32 image would give only 2x2 tokens.  The weights do not depend
    on the strides, so ``strides=(1, 1, 1, 2)`` gives 16x16 tokens with the same checkpoint, and ``root_kernel=3``
    downsamples the first kernel, like the patches of a ViT.

    Args:
        variant: Ti, S, B or L.
        blocks: number of bottlenecks in each stage of the ResNet.
        strides: strides of the root convolution, the pooling (1 for no pooling), and each stage except the first.
        root_kernel: kernel size of the root convolution.
        stem_width: channels of the root convolution, a multiple of 32 (the number of normalization groups).
        dropout: dropout rate in the transformer.
        width: token width; that of the variant if None, likewise for the next three.
        depth: number of blocks.
        heads: number of attention heads.
        mlp_ratio: hidden units of the MLP in a block, in units of the width.

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
                "blocks, strides: expected positive numbers, with one stride for the root, the pooling and every"
                f" stage except the first, got blocks={tuple(blocks)} and strides={tuple(strides)}"
            )
        if stem_width < 1 or stem_width % GROUPS:
            raise InputError(f"stem_width: expected a multiple of {GROUPS}, got {stem_width}")
        check_count(2, LARGEST_SIZE, root_kernel=root_kernel)  # a single weight cannot be standardized
        super().__init__(input_shape, num_classes, **options)
        size = size_of(variant, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
        stem = ResNetStem(channels, width=stem_width, blocks=blocks, strides=strides, root_kernel=root_kernel)
        for stride in strides:
            sides = [-(-side // stride) for side in sides]
        self.body = Encoder(stem, (stem.channels, *sides), patch=1, stride=1, size=size, dropout=dropout)
        self.head = linear_head(size.width, num_classes)
