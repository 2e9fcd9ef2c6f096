"""Blur: defocus, glass, motion and zoom.

All sums run in a fixed order, one tap of a kernel after the other, so that the last bit does not depend on the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atoll.corruptions.base import CORRUPTIONS, Corruption, round_down
from atoll.rng import PointRNG
from atoll.threat import per_point


def gaussian_blur(x: Tensor, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Filter the last two axes with a Gaussian; ``mode`` says how SciPy extends the image at the border.

    >>> gaussian_blur(torch.eye(3, dtype=torch.float64), 0.5).sum()
    tensor(3.0000, dtype=torch.float64)
    """
    from scipy.ndimage import gaussian_filter  # slow to import

    sigmas = [0.0] * (x.dim() - 2) + [sigma, sigma]
    return torch.from_numpy(gaussian_filter(x.numpy(), sigmas, mode=mode, truncate=truncate))


@CORRUPTIONS.register("defocus_blur", own_name=False)
class DefocusBlur(Corruption):
    """Defocus blur: averages over a disk, as an image out of focus."""

    # radius of the disk, and standard deviation of the Gaussian that smooths its edge
    small = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    medium = ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1))
    large = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        from scipy.ndimage import correlate

        kernel = disk(*self.parameters(x, severity))
        return torch.from_numpy(correlate(x.numpy(), kernel[None, None], mode="mirror"))


def disk(radius: float, sigma: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A disk with sum 1, smoothed by a Gaussian of 3 x 3 pixels (5 x 5 if the radius is larger than 8).

    >>> kernel = disk(1, 0.01)
    >>> kernel.shape, kernel[7:10, 7:10].tolist()
    ((17, 17), [[0.0, 0.2, 0.0], [0.2, 0.2, 0.2], [0.0, 0.2, 0.0]])
    """
    from scipy.ndimage import correlate1d

    side = np.arange(-max(radius, 8), max(radius, 8) + 1)
    inside = (side**2 + side[:, None] ** 2 <= radius**2).astype(np.float64)
    reach = 1 if radius <= 8 else 2
    taps = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    kernel = inside / inside.sum()
    for axis in (0, 1):
        kernel = correlate1d(kernel, taps / taps.sum(), axis, mode="mirror")
    return np.asarray(kernel)


@CORRUPTIONS.register("glass_blur", own_name=False)
class GlassBlur(Corruption):
    """Glass blur: moves pixels to random places nearby, as frosted glass does.

    Pixels are visited from the bottom right to the top left, and each is replaced with a random one nearby.  The code
    of the benchmark means to exchange the two, but copies one over the other; its images and ours have copies.
    """

    # standard deviation of the blur before and after, largest distance in pixels, rounds
    small = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
    medium = ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2))
    large = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        sigma, reach, rounds = self.parameters(x, severity)
        height, width = x.shape[2:]
        x = round_down(gaussian_blur(x, sigma)).flatten(2) / 255
        for _ in range(rounds):
            offsets = streams.integers(2 * reach, 2, height - 2 * reach, width - 2 * reach) - reach
            x = x.gather(2, copy_sources(offsets, reach, height, width)[:, None].expand_as(x))
        return gaussian_blur(x.view(*x.shape[:2], height, width), sigma)


def copy_sources(offsets: Tensor, reach: int, height: int, width: int) -> Tensor:
    """Where the value of each pixel comes from after pixels were overwritten in turn, from the last to the first.

    A pixel that copies from one that was overwritten before gets that one's new value, so its source is at the end of a
    chain of copies.  Doubling the length of all chains at once needs a few steps instead of a loop over pixels.

    Args:
        offsets: down and right from each pixel to the one that it copies, ``(batch, 2, rows, columns)``, for rows
            ``reach + 1 .. height - reach`` and columns ``reach + 1 .. width - reach``.
        reach: largest offset.
        height: of the image.
        width: of the image.

    Returns:
        Indices into the flat image, ``(batch, height * width)``.
    """
    count = height * width
    place = torch.arange(count).view(height, width)
    inside = torch.zeros(height, width, dtype=torch.bool)
    inside[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    target = place[inside] + (offsets[:, 0] * width + offsets[:, 1]).flatten(1)
    is_new = inside.flatten()[target] & (target > place[inside])  # overwritten before
    # Numbers below ``count`` are old values, which are final.  The others are new values, which come from elsewhere.
    chain = torch.arange(count).repeat(len(offsets), 2)
    chain[:, count + place[inside]] = target + count * is_new
    while (chain >= count).any():
        chain = chain.gather(1, chain)
    return chain[:, count:]


@CORRUPTIONS.register("motion_blur", own_name=False)
class MotionBlur(Corruption):
    """Motion blur: a moving camera, at a random angle of up to 45 degrees from the horizontal."""

    # radius and standard deviation of the kernel
    small = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    medium = ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3))
    large = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        radius, sigma = self.parameters(x, severity)
        return motion_blur(x, radius, sigma, -45 + 90 * streams.uniform(dtype=x.dtype))


def motion_blur(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Average each pixel with those in one direction, weighted with half a Gaussian, as ImageMagick does.

    Args:
        x: images.
        radius: the kernel has ``2 * radius + 1`` pixels.
        sigma: standard deviation of the Gaussian, in pixels.
        angle: direction for each image, in degrees from right to down.

    >>> x = torch.tensor([0, 0, 1, 0], dtype=torch.float64).view(1, 1, 1, 4)
    >>> (255 * motion_blur(x, 1, 1.0, torch.tensor([0.0]))).round()
    tensor([[[[ 19.,  88., 146.,   0.]]]], dtype=torch.float64)
    """
    weights = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(2 * radius + 1)]
    height, width = x.shape[2:]
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    image = torch.arange(len(x))[:, None, None]
    turns = [(math.cos(math.radians(degrees)), math.sin(math.radians(degrees))) for degrees in angle.tolist()]
    x, total = x.movedim(1, 3), torch.zeros_like(x)
    for k, weight in enumerate(weights):
        right, down = torch.tensor([[math.ceil(k * part - 0.5) for part in turn] for turn in turns]).view(-1, 2).T
        shifted = x[
            image,
            (rows + per_point(down, image)).clamp(0, height - 1),
            (columns + per_point(right, image)).clamp(0, width - 1),
        ]
        total += weight / sum(weights) * shifted.movedim(3, 1)
    return ((65535 * total).round() / 257).floor() / 255  # ImageMagick has 16 bits, and drops half of them at the end


@CORRUPTIONS.register("zoom_blur", own_name=False)
class ZoomBlur(Corruption):
    """Zoom blur: a camera that moves toward the object."""

    # end and step of the zoom factors, which start at 1; the end is included if rounding leads there (1.06, 1.11)
    small = ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))
    medium = small
    large = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        factors = np.arange(1, *self.parameters(x, severity)).tolist()
        total = x.clone()
        for factor in factors:
            total += zoom(x, factor)
        return total / (len(factors) + 1)


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the center of images by linear interpolation.

    >>> zoom(torch.tensor([[[[0.0, 3.0, 6.0, 9.0]] * 4]], dtype=torch.float64), 2)[0, 0, 0]
    tensor([3., 4., 5., 6.], dtype=torch.float64)
    """
    sides = list(x.shape[2:])
    part = [math.ceil(side / factor) for side in sides]
    top, left = ((side - inner) // 2 for side, inner in zip(sides, part, strict=True))
    size = [round(inner * factor) for inner in part]
    inner = x[:, :, top : top + part[0], left : left + part[1]]
    large = functional.interpolate(inner, size=size, mode="bilinear", align_corners=True)
    top, left = ((outer - side) // 2 for outer, side in zip(size, sides, strict=True))
    return large[:, :, top : top + sides[0], left : left + sides[1]]
