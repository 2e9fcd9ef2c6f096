"""Pre-activation ResNet for small images, the standard network for adversarial training on CIFAR and SVHN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from atoll.errors import LARGEST_SIZE, check_count
from atoll.models.base import MODELS, Classifier, choose, expect_image

DEPTHS: dict[int, tuple[int, int, int, int]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each preceded by normalization and activation, plus a shortcut.

    If the shape changes, the shortcut is a 1x1 convolution of the *activated* input (He et al., 2016).

    >>> import torch
    >>> PreActBlock(4, 8, stride=2)(torch.zeros(2, 4, 6, 6)).shape
    torch.Size([2, 8, 3, 3])
    """

    def __init__(self, channels: int, out: int, *, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.residual = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
        )
        same = stride == 1 and channels == out
        self.shortcut = None if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        y: Tensor = self.residual(activated)
        return y + (x if self.shortcut is None else self.shortcut(activated))


def preact_body(channels: int, stem: int, stages: Sequence[tuple[int, int]], dropout: float = 0.0) -> nn.Sequential:
    """Return a 3x3 stem, stages of (blocks, channels), which halve the image except for the first, and pooling."""
    layers: list[nn.Module] = [nn.Conv2d(channels, stem, 3, padding=1, bias=False)]
    channels = stem
    for stage, (blocks, out) in enumerate(stages):
        for block in range(blocks):
            layers.append(PreActBlock(channels, out, stride=2 if stage and not block else 1, dropout=dropout))
            channels = out
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@MODELS.register()
class PreActResNet(Classifier):
    """Pre-activation ResNet (He et al., 2016), CIFAR variant with a 3x3 stem and only global pooling.

    Uses PyTorch's default initialization, as the published robust models of this family do.

    Args:
        depth: 18 or 34.
        width: channels of the first stage, doubled in each of the other three.

    >>> PreActResNet((3, 32, 32), 10).num_parameters
    11172170
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: Literal[18, 34] = 18,
        width: int = 64,
        **options: Any,
    ) -> None:
        # Three stages halve the image; below eight pixels, the last one would mostly see padding.
        channels, *_ = expect_image(input_shape, type(self).__name__, at_least=8)
        check_count(1, LARGEST_SIZE, width=width)
        super().__init__(input_shape, num_classes, **options)
        stages = [(blocks, width * 2**stage) for stage, blocks in enumerate(choose(DEPTHS, depth, "depth"))]
        self.body = preact_body(channels, width, stages)
        self.head = nn.Linear(8 * width, num_classes)
