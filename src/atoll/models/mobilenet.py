"""MobileNetV2 for small images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from atoll.errors import check_range
from atoll.models.base import MODELS, Classifier, expect_image

# Expansion, channels, number of blocks, stride of the first block.  The ImageNet version also has stride 2 in the stem
# and in the second row, which would reduce 32x32 images to a single pixel.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def rounded(channels: float) -> int:
    """Round to a multiple of 8 without losing more than a tenth, as in the published networks.

    >>> rounded(24 * 0.75), rounded(3)
    (24, 8)
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def convolution(channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution followed by batch normalization."""
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class InvertedResidual(nn.Module):
    """Inverted bottleneck: expand, convolve each channel, project without activation; a shortcut for stride 1.

    >>> import torch
    >>> InvertedResidual(8, 16, expansion=6, stride=2)(torch.zeros(2, 8, 6, 6)).shape
    torch.Size([2, 16, 3, 3])
    """

    def __init__(
        self, channels: int, out: int, *, expansion: int, stride: int = 1, project_shortcut: bool = True
    ) -> None:
        super().__init__()
        wide = channels * expansion
        self.residual = nn.Sequential(
            *convolution(channels, wide),
            nn.ReLU(),
            *convolution(wide, wide, kernel=3, stride=stride, groups=wide),
            nn.ReLU(),
            *convolution(wide, out),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1 and channels == out:
            self.shortcut = nn.Identity()
        elif stride == 1 and project_shortcut:
            self.shortcut = nn.Sequential(*convolution(channels, out))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.residual(x)
        return y if self.shortcut is None else y + self.shortcut(x)


@MODELS.register()
class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al., 2018), in the usual CIFAR version.

    This version halves the image three times instead of five, uses ReLU instead of ReLU6 (whose limit only helps
    fixed-point arithmetic), and projects the shortcut of blocks with stride 1 that change the number of channels.

    Args:
        width_multiplier: factor on all widths, which are rounded to multiples of 8.
        project_shortcut: False for the blocks of the paper, without a shortcut if the number of channels changes.

    >>> MobileNetV2((3, 32, 32), 10).num_parameters
    2296922
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width_multiplier: float = 1.0,
        project_shortcut: bool = True,
        **options: Any,
    ) -> None:
        channels, *_ = expect_image(input_shape, type(self).__name__, at_least=8)
        check_range("(0, 100]", width_multiplier=width_multiplier)
        super().__init__(input_shape, num_classes, **options)
        out = rounded(32 * width_multiplier)
        layers: list[nn.Module] = [*convolution(channels, out, kernel=3), nn.ReLU()]
        channels = out
        for expansion, base, blocks, first_stride in STAGES:
            out = rounded(base * width_multiplier)
            for block in range(blocks):
                stride = 1 if block else first_stride
                layers.append(
                    InvertedResidual(
                        channels, out, expansion=expansion, stride=stride, project_shortcut=project_shortcut
                    )
                )
                channels = out
        # Narrow nets keep the wide last layer, as in the paper.
        out = rounded(1280 * max(1.0, width_multiplier))
        layers += [*convolution(channels, out), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(out, num_classes)
