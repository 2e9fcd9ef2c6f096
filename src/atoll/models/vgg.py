"""VGG with batch normalization for small images."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from atoll.errors import LARGEST_SIZE, check_count
from atoll.models.base import MODELS, Classifier, choose, expect_image

# Convolutions in each of the five stages.
DEPTHS: dict[int, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


@MODELS.register()
class VGG(Classifier):
    """VGG (Simonyan & Zisserman, 2015) with batch normalization, in the CIFAR variant with only one dense layer.

    The convolutions have no bias, because the following normalization has one.  Pooling rounds up, so that images of
    less than 32 pixels can be halved five times; the remaining map of larger images is averaged.

    Args:
        depth: 11, 13, 16 or 19.
        width: channels of the first stage; the other stages have 2, 4, 8 and 8 times as many.

    >>> import torch
    >>> VGG((1, 28, 28), 10, width=4)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: Literal[11, 13, 16, 19] = 16,
        width: int = 64,
        **options: Any,
    ) -> None:
        channels, *_ = expect_image(input_shape, type(self).__name__)
        check_count(1, LARGEST_SIZE, width=width)
        super().__init__(input_shape, num_classes, **options)
        layers: list[nn.Module] = []
        for convolutions, factor in zip(choose(DEPTHS, depth, "depth"), (1, 2, 4, 8, 8), strict=True):
            out = width * factor
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
                channels = out
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)
