"""RandAugment for whole batches, with separate operations for every image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.data.augment import AUGMENTATIONS, Augmentation, affine, check_images
from atoll.errors import check_count, check_range
from atoll.rng import PointRNG
from atoll.threat import per_point

# The operations work on floats.  If Pillow's definition needs 8-bit levels (histograms, bit masks, grayscale), they are
# first rounded to integers.  This also makes sums exact; a floating-point sum could depend on the batch size.  For the
# same reason, no operation uses a convolution or a vectorized sine.


def _levels(x: Tensor) -> Tensor:
    return (x * 255).round_().long()


def _gray(x: Tensor) -> Tensor:
    """Return luminance as integer levels, ``(batch, 1, H, W)``: ITU-R 601 for RGB, otherwise the mean of channels."""
    levels = _levels(x)
    if x.shape[1] == 1:
        return levels
    if x.shape[1] != 3:
        return (levels.sum(1, keepdim=True) * 2 + x.shape[1]) // (2 * x.shape[1])
    # Pillow's weights, in fixed-point arithmetic.
    gray = 19595 * levels[:, :1] + 38470 * levels[:, 1:2] + 7471 * levels[:, 2:] + 32768
    return gray.bitwise_right_shift(16)


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Interpolate between ``other`` (factor 0) and ``x`` (factor 1), or extrapolate, and clip."""
    return ((x - other) * per_point(factor, x) + other).clamp_(0, 1)


def autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to the full range.

    >>> autocontrast(torch.tensor([[[[0.25, 0.5, 0.75]]]]))
    tensor([[[[0.0000, 0.5000, 1.0000]]]])
    """
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1), x)


def equalize(x: Tensor) -> Tensor:
    """Equalize the histogram of each channel.

    >>> (equalize(torch.tensor([[[[10.0, 11.0, 12.0, 13.0]]]]) / 255) * 255).round()
    tensor([[[[10., 11., 12., 13.]]]])
    """
    levels = _levels(x).flatten(2)
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1) * 256
    histogram = (levels + planes).flatten().bincount(minlength=256 * planes.numel()).view(*x.shape[:2], 256)
    last = histogram.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - last) // 255
    before = histogram.cumsum(2) - histogram
    table = ((before + step // 2) // step.clamp_min(1)).clamp_(max=255)
    result = table.gather(2, levels).to(x.dtype).div_(255).view_as(x)
    return torch.where((step > 0)[..., None], result, x)  # unchanged if there are too few pixels or a single level


def solarize(x: Tensor, threshold: float) -> Tensor:
    """Invert pixels of at least ``threshold``.

    >>> solarize(torch.tensor([[[[0.25, 0.75]]]]), 0.5)
    tensor([[[[0.2500, 0.2500]]]])
    """
    return torch.where(x >= threshold, 1 - x, x)


def posterize(x: Tensor, bits: int) -> Tensor:
    """Keep the upper ``bits`` of each 8-bit level.

    >>> (posterize(torch.tensor([[[[200.0]]]]) / 255, 1) * 255).item()
    128.0
    """
    return ((_levels(x) >> (8 - bits)) << (8 - bits)).to(x.dtype).div_(255)


def color(x: Tensor, factor: Tensor) -> Tensor:
    """Change the saturation; images that are not RGB do not change.

    >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    >>> (color(red, torch.zeros(1)) * 255).flatten().tolist()
    [76.0, 76.0, 76.0]
    """
    return _blend(x, _gray(x).to(x.dtype) / 255, factor) if x.shape[1] == 3 else x


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Change the contrast: scale the difference from the mean gray of the image.

    >>> (contrast(torch.tensor([[[[0.0, 60.0]]]]) / 255, torch.tensor([0.5])) * 255).round()
    tensor([[[[15., 45.]]]])
    """
    gray = _gray(x)
    count = gray[0].numel()
    mean = (2 * gray.sum((1, 2, 3), keepdim=True) + count) // (2 * count)
    return _blend(x, mean.to(x.dtype) / 255, factor)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Change the brightness: scale all pixels.

    >>> brightness(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([2.0]))
    tensor([[[[0.5000, 1.0000]]]])
    """
    return (x * per_point(factor, x)).clamp_(0, 1)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Change the sharpness: scale the difference from the image smoothed by a 3x3 kernel.

    The kernel is 5/13 in the center and 1/13 elsewhere.

    >>> dot = torch.zeros(1, 1, 3, 3).index_fill_(2, torch.tensor([1]), 0.13)
    >>> sharpness(dot, torch.zeros(1))[0, 0, 1]
    tensor([0.1300, 0.0700, 0.1300])
    """
    if min(x.shape[2:]) < 3:
        return x
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = x.clone()  # border pixels do not change
    smooth[:, :, 1:-1, 1:-1] = (box + 4 * x[:, :, 1:-1, 1:-1]) / 13
    return _blend(x, smooth, factor)


_GEOMETRY = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
# Functions of images, the strength in [0, 1], and a factor for each image (1 for no change).
_TONE: dict[str, Callable[[Tensor, float, Tensor], Tensor]] = {
    "autocontrast": lambda x, level, factor: autocontrast(x),
    "equalize": lambda x, level, factor: equalize(x),
    "solarize": lambda x, level, factor: solarize(x, 1 - level),
    "posterize": lambda x, level, factor: posterize(x, 8 - round(4 * level)),
    "color": lambda x, level, factor: color(x, factor),
    "contrast": lambda x, level, factor: contrast(x, factor),
    "brightness": lambda x, level, factor: brightness(x, factor),
    "sharpness": lambda x, level, factor: sharpness(x, factor),
}
OPERATIONS = ("identity", *_GEOMETRY, *_TONE)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class RandAugment(Augmentation):
    """RandAugment: applies a few random operations out of fourteen, all with the same strength.

    E. Cubuk et al., "RandAugment: Practical Automated Data Augmentation with a Reduced Search Space" (2020).
    In each round, every image draws an operation and a direction.  Each operation then runs once on all images that
    drew it, and all geometric operations share one resampling.

    Args:
        num_ops: number of operations per image.
        magnitude: strength from 0 to 30.

    >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> RandAugment()(images, PointRNG("augment", index=torch.arange(4))).shape
    torch.Size([4, 3, 32, 32])
    """

    num_ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        check_count(0, 1000, num_ops=self.num_ops)
        check_range("[0, 30]", magnitude=self.magnitude)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        draws = streams.integers(2 * len(OPERATIONS), self.num_ops)  # operation and direction in one number
        level = self.magnitude / 30
        x = x.clone()
        for draw in draws.unbind(1):
            operation, sign = draw // 2, (draw % 2) * 2 - 1
            moved = ((operation >= 1) & (operation <= len(_GEOMETRY))).nonzero().squeeze(1)
            if len(moved):
                x[moved] = affine(x[moved], _matrices(level, operation[moved], sign[moved], *x.shape[2:]))
            factor = 1 + sign.to(x.dtype) * (0.9 * level)
            for number, tone in enumerate(_TONE.values(), start=1 + len(_GEOMETRY)):
                rows = (operation == number).nonzero().squeeze(1)
                if len(rows):
                    x[rows] = tone(x[rows], level, factor[rows])
        return x


def _matrices(level: float, operation: Tensor, sign: Tensor, height: int, width: int) -> Tensor:
    """Return the matrix of each image's geometric operation, from a table of both directions."""
    angle, shear, shift = math.radians(30 * level), 0.3 * level, 150 / 331 * level
    table = [
        [
            [[math.cos(angle), -s * math.sin(angle), 0], [s * math.sin(angle), math.cos(angle), 0]],
            [[1, s * shear, 0], [0, 1, 0]],
            [[1, 0, 0], [s * shear, 1, 0]],
            [[1, 0, s * shift * width], [0, 1, 0]],
            [[1, 0, 0], [0, 1, s * shift * height]],
        ]
        for s in (-1, 1)
    ]
    return torch.tensor(table, device=sign.device)[(sign + 1) // 2, operation - 1]
