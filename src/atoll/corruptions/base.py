"""What all corruptions share: names, severities, tables of parameters, and rounding to gray levels.

D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations" (2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll.errors import InputError, check_range
from atoll.registry import Registry
from atoll.rng import PointRNG

CORRUPTIONS = Registry("corruption", "corruptions", "atoll.corruptions.base.Corruption", "atoll.corruptions")

# The benchmark, by group, in the order of the paper.
COMMON = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels of a side
MEDIUM, LARGE = 48, 128  # shorter sides from which on the parameters of Tiny-ImageNet-C and of ImageNet-C apply
CHUNK = 1 << 21  # numbers that are corrupted at a time, so that large batches need little memory


class Corruption(ABC):
    """Base class of corruptions.

    A corruption is computed on the CPU in float64, with one random stream per image.  The result for an image must not
    depend on the rest of the batch, not even in the last bit.

    The benchmark has one table of parameters for each data set: ``small`` (CIFAR-10-C, 32 x 32), ``medium``
    (Tiny-ImageNet-C, 64 x 64) and ``large`` (ImageNet-C, 224 x 224).  ``parameters`` selects a row.
    """

    registry: ClassVar[Registry] = CORRUPTIONS
    small: ClassVar[Sequence[Any]] = ()
    medium: ClassVar[Sequence[Any]] = ()
    large: ClassVar[Sequence[Any]] = ()

    @abstractmethod
    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        """Return the corrupted images in float64, at any gray levels; the caller clips and rounds them.

        Args:
            x: images in float64, ``(batch, 1 or 3, H, W)``; their values are multiples of 1/255 in [0, 1].
            severity: from 1 to 5.
            streams: the random streams of the images.
        """

    def parameters(self, x: Tensor, severity: int) -> Any:
        """The parameters for images of this size."""
        shorter = min(x.shape[2:])
        table = self.small if shorter < MEDIUM else self.medium if shorter < LARGE else self.large
        return table[severity - 1]


def corrupt(
    x: Tensor, corruption: str | Corruption, severity: int, *, seed: object = 0, index: Tensor | None = None
) -> Tensor:
    """Corrupt images as in ImageNet-C.

    Uses the parameters of CIFAR-10-C if the shorter side has fewer than 48 pixels, of Tiny-ImageNet-C if it has fewer
    than 128, and of ImageNet-C otherwise.  As in the benchmark, a corruption maps images with 256 gray levels to
    images with 256 gray levels: the input is rounded, and the result is rounded down.  Unlike the files of ImageNet-C,
    the result is not compressed as JPEG in addition.

    ``frost`` is not the original.  The benchmark overlays photographs of frost; this one overlays a generated texture
    with similar statistics.

    Args:
        x: images in [0, 1], ``(batch, 1 or 3, H, W)`` with sides of at least 8 pixels.
        corruption: a name such as ``gaussian_noise`` (see ``atoll ls corruptions``), ``file.py:Class``, or an instance.
        severity: from 1 to 5.
        seed: seed of the random streams.
        index: indices of the points, ``0 .. batch-1`` by default; the random numbers of a point depend only on
            ``seed``, its index, the corruption and the severity.

    >>> x = torch.full((2, 3, 32, 32), 0.5)
    >>> noisy = corrupt(x, "gaussian_noise", 3)
    >>> noisy.shape, round(noisy.std().item(), 2)  # 0.08 for small images
    (torch.Size([2, 3, 32, 32]), 0.08)
    >>> torch.equal(noisy[1:], corrupt(x[1:], "gaussian_noise", 3, index=torch.tensor([1])))
    True
    """
    if isinstance(corruption, str):
        member = CORRUPTIONS.resolve(corruption)
        change: Corruption = member.cls(**member.arguments)
    else:
        change = corruption
    check_images(x.shape)
    check_range("[1, 5]", severity=severity)
    if not x.is_floating_point() or not ((x >= 0) & (x <= 1)).all():
        raise InputError("images: expected floating-point numbers in [0, 1]")
    index = torch.arange(len(x)) if index is None else index.cpu()
    streams = PointRNG(seed, "corruption", type(change).__name__, severity, index=index)
    levels = (255 * x.detach().double().cpu()).round()
    result = torch.empty_like(levels, dtype=torch.uint8)
    size = max(1, CHUNK // x[0].numel()) if len(x) else 1
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        result[rows] = round_down(change.apply(levels[rows] / 255, severity, streams[rows])).to(torch.uint8)
    return result.to(x.device, x.dtype).div_(255)


def round_down(x: Tensor) -> Tensor:
    """Gray levels 0 to 255 as in the benchmark, which converts floats to uint8.

    The tolerance keeps levels that float64 represents as 28.999999999999996.
    """
    return (255 * x.clamp(0, 1) + 1e-4).floor()


def check_images(shape: Sequence[int]) -> None:
    """Raise an InputError unless a batch has images that can be corrupted."""
    if len(shape) != 4 or shape[1] not in (1, 3) or min(shape[2:]) < SMALLEST:
        raise InputError(
            f"corruptions: expected images (1 or 3, H, W) of at least {SMALLEST} x {SMALLEST} pixels,"
            f" got inputs of shape {tuple(shape[1:])}"
        )
