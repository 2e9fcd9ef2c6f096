"""Vision Transformer, with patches that may overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from atoll.errors import LARGEST_SIZE, InputError, check_count, check_range
from atoll.models.base import MODELS, Classifier, choose, expect_image

Variant = Literal["Ti", "S", "B", "L"]


@dataclass(frozen=True)
class EncoderSize:
    """Size of an encoder: token width, number of blocks, attention heads, and MLP width relative to the token width."""

    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        check_count(1, LARGEST_SIZE, width=self.width, depth=self.depth, heads=self.heads)
        check_range("(0, 1024]", mlp_ratio=self.mlp_ratio)
        check_count(1, mlp=round(self.width * self.mlp_ratio))
        if self.width % self.heads:
            raise InputError(f"heads: expected a divisor of the width {self.width}, got {self.heads}")


VARIANTS: dict[str, EncoderSize] = {
    "Ti": EncoderSize(192, 12, 3),
    "S": EncoderSize(384, 12, 6),
    "B": EncoderSize(768, 12, 12),
    "L": EncoderSize(1024, 24, 16),
}


def size_of(variant: str, **changes: float | None) -> EncoderSize:
    """Return the size of a variant with the changes that are not None.

    >>> size_of("Ti", depth=2, heads=None)
    EncoderSize(width=192, depth=2, heads=3, mlp_ratio=4.0)
    """
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    return replace(choose(VARIANTS, variant, "variant"), **given)


class Attention(nn.Module):
    """Multi-head self-attention, ``softmax(q k^T / sqrt(d)) v`` for each head.

    Not fused, because PyTorch's fused kernel has no second derivative and no forward mode on CPUs, and curvature needs
    both.

    >>> Attention(6, heads=2)(torch.zeros(1, 5, 6)).shape
    torch.Size([1, 5, 6])
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        # Initialize the three maps separately, because the bound of Xavier initialization depends on the shape.
        for weight in self.qkv.weight.detach().chunk(3):
            nn.init.xavier_uniform_(weight)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Transformer block: attention and MLP, each with normalization before and a residual connection."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__()
        hidden = round(size.width * size.mlp_ratio)
        self.norm1 = nn.LayerNorm(size.width, eps=1e-6)
        self.attention = Attention(size.width, heads=size.heads)
        self.norm2 = nn.LayerNorm(size.width, eps=1e-6)
        self.fc1 = nn.Linear(size.width, hidden)
        self.fc2 = nn.Linear(hidden, size.width)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = self.dropout(self.gelu(self.fc1(self.norm2(x))))
        y: Tensor = x + self.dropout(self.fc2(hidden))
        return y


class Encoder(nn.Module):
    """Stem, patches, position embeddings and blocks; returns the class token after the final norm.

    Args:
        stem: maps images to the feature maps that are divided into patches.
        stem_shape: shape of the feature maps, ``(channels, height, width)``.
        patch: side of a patch.
        stride: distance between patches.
        size: size of the encoder.
        dropout: dropout rate after the position embeddings, attention and both MLP layers.
    """

    def __init__(
        self,
        stem: nn.Module,
        stem_shape: Sequence[int],
        *,
        patch: int,
        stride: int,
        size: EncoderSize,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, *sides = stem_shape
        self.stem = stem
        self.patch = nn.Conv2d(channels, size.width, patch, stride)
        self.grid: tuple[int, ...] = tuple((side - patch) // stride + 1 for side in sides)
        self.cls = nn.Parameter(torch.zeros(1, 1, size.width))
        self.position = nn.Parameter(torch.empty(1, 1 + math.prod(self.grid), size.width))
        check_range("[0, 1)", dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(size, dropout) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        nn.init.normal_(self.position, std=0.02)
        nn.init.trunc_normal_(self.patch.weight, std=(channels * patch**2) ** -0.5)
        if self.patch.bias is not None:
            nn.init.zeros_(self.patch.bias)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(self.stem(x)).flatten(2).transpose(1, 2)
        cls = self.cls.expand(x.shape[0], -1, -1)  # len(x) would fix the batch size of an exported graph
        tokens = torch.cat([cls, patches], dim=1)
        tokens = self.blocks(self.dropout(tokens + self.position))
        token: Tensor = self.norm(tokens[:, 0])
        return token


def linear_head(width: int, num_classes: int) -> nn.Linear:
    """Return a linear head with small random weights.

    The original head starts at zero, which is good for fine-tuning.  But then the gradient with respect to the input is
    also zero, and the first attacks of adversarial training would fail.  With small weights, initial predictions are
    almost as uniform.
    """
    head = nn.Linear(width, num_classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


@MODELS.register()
class ViT(Classifier):
    """Vision Transformer (Dosovitskiy et al., 2021); the features are the class token after the final norm.

    For 32x32 images, TrH uses ``patch_size=4, stride=2``: overlapping patches and 225 tokens.

    Args:
        variant: Ti, S, B or L.
        patch_size: side of the square patches.
        stride: distance between patches, by default the patch size; patches must reach the edge of the image.
        dropout: dropout rate after the position embeddings, attention and both MLP layers.
        width: token width; that of the variant if None, likewise for the next three.
        depth: number of blocks.
        heads: number of attention heads.
        mlp_ratio: hidden units of the MLP in a block, in units of the width.

    >>> model = ViT((3, 32, 32), 10, patch_size=4, stride=2, width=16, depth=1, heads=2)
    >>> model.body.grid, model(torch.zeros(2, 3, 32, 32)).shape
    ((15, 15), torch.Size([2, 10]))
    """

    body: Encoder

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        variant: Variant = "B",
        patch_size: int = 16,
        stride: int | None = None,
        dropout: float = 0.0,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        mlp_ratio: float | None = None,
        **options: Any,
    ) -> None:
        stride = patch_size if stride is None else stride
        check_count(1, LARGEST_SIZE, patch_size=patch_size, stride=stride)
        shape = expect_image(input_shape, type(self).__name__, at_least=patch_size)
        if any((side - patch_size) % stride for side in shape[1:]):
            raise InputError(
                f"ViT: patches of {patch_size} pixels with stride {stride} do not reach the edge of"
                f" {shape[1]}x{shape[2]} images; expected patch_size plus a multiple of stride"
            )
        super().__init__(input_shape, num_classes, **options)
        size = size_of(variant, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
        self.body = Encoder(nn.Identity(), shape, patch=patch_size, stride=stride, size=size, dropout=dropout)
        self.head = linear_head(size.width, num_classes)
