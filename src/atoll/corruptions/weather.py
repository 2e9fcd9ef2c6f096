"""Weather: snow, frost, fog and brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.corruptions.base import CORRUPTIONS, Corruption, round_down
from atoll.corruptions.blur import motion_blur, zoom
from atoll.rng import PointRNG
from atoll.threat import per_point


@CORRUPTIONS.register("snow", own_name=False)
class Snow(Corruption):
    """Snow: falling flakes, and a whitened image."""

    # mean and standard deviation of the noise, its zoom, the threshold for flakes, radius and standard deviation of
    # their motion blur, and the weight of the image that is not whitened
    small = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )
    medium = tuple((*row[:6], weight) for row, weight in zip(small, (0.8, 0.8, 0.7, 0.65, 0.6), strict=True))
    large = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        mean, deviation, factor, threshold, radius, sigma, weight = self.parameters(x, severity)
        layer = zoom(mean + deviation * streams.normal(1, *x.shape[2:], dtype=x.dtype), factor)
        layer = round_down(layer.masked_fill(layer < threshold, 0)) / 255
        layer = motion_blur(layer, radius, sigma, -135 + 90 * streams.uniform(dtype=x.dtype))
        x = weight * x + (1 - weight) * torch.maximum(x, 1.5 * gray(x) + 0.5)
        return x + layer + layer.flip(2, 3)


def gray(x: Tensor) -> Tensor:
    """Luma (ITU-R BT.601) of gray or RGB images."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x[:, 0:1], x[:, 1:2], x[:, 2:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


@CORRUPTIONS.register("frost", own_name=False)
class Frost(Corruption):
    """Frost: overlays a generated texture of ice, not the photographs of ImageNet-C.

    The photographs are not ours to distribute.  The texture has a similar mean, contrast, spectrum and color, but no
    crystals, so accuracies under ``frost`` are not comparable with published ones.
    """

    # weights of the image and of the texture
    small = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
    medium = ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55))
    large = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        image, texture = self.parameters(x, severity)
        result: Tensor = image * x + texture * ice(x, streams)
        return result


def ice(x: Tensor, streams: PointRNG) -> Tensor:
    """A bluish texture with bright veins, for images of this shape; its brightness and contrast are random."""
    brightness, contrast = streams.uniform(2, dtype=x.dtype).unbind(1)
    height = fractal(x, 1.0, streams)
    veins = torch.minimum(1.5 * height, 1 - 0.5 * height)  # bright along the contour line at 1/2
    # One by one, because the last bit of a sum over a batch may depend on the batch.
    veins = torch.stack([(image - image.mean()) / image.std() for image in veins])
    texture = per_point(0.40 + 0.47 * brightness, x) + per_point(0.05 + 0.09 * contrast, x) * veins
    tint = torch.tensor([-0.07, 0.01, 0.06] if x.shape[1] == 3 else [0.0], dtype=x.dtype)
    return (texture + tint[:, None, None]).clamp(0, 1)


@CORRUPTIONS.register("fog", own_name=False)
class Fog(Corruption):
    """Fog: adds a bright random fractal."""

    # strength, and how fast the fractal gets smoother
    small = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
    medium = ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75))
    large = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        strength, decay = self.parameters(x, severity)
        highest = x.amax((1, 2, 3), keepdim=True)
        result: Tensor = (x + strength * fractal(x, decay, streams)) * highest / (highest + strength)
        return result


def fractal(x: Tensor, decay: float, streams: PointRNG) -> Tensor:
    """A random height map in [0, 1] for each image, ``(batch, 1, H, W)``, by the diamond-square algorithm.

    Starts with a coarse periodic grid and doubles its resolution again and again.  Each new point is the mean of its
    four neighbors plus a uniform number.  From one resolution to the next, the uniform numbers get smaller by a factor
    of ``decay ** 2``.

    A. Fournier, D. Fussell and L. Carpenter, "Computer Rendering of Stochastic Models" (1982).
    """
    side = 1 << (max(x.shape[2:]) - 1).bit_length()
    heights = torch.zeros(len(x), side, side, dtype=x.dtype)
    step, size = side, 1.0
    while step > 1:
        half = step // 2
        corners = heights[:, ::step, ::step]
        sums = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = _displace(sums + sums.roll(-1, 2), size, streams)
        centers = heights[:, half::step, half::step]
        across = corners + corners.roll(-1, 2) + centers + centers.roll(1, 1)
        down = corners + corners.roll(-1, 1) + centers + centers.roll(1, 2)
        heights[:, ::step, half::step] = _displace(across, size, streams)
        heights[:, half::step, ::step] = _displace(down, size, streams)
        step, size = half, size / decay**2
    heights -= heights.amin((1, 2), keepdim=True)
    heights /= heights.amax((1, 2), keepdim=True)
    return heights[:, None, : x.shape[2], : x.shape[3]]


def _displace(sums: Tensor, size: float, streams: PointRNG) -> Tensor:
    return sums / 4 + size * (2 * streams.uniform(*sums.shape[1:], dtype=sums.dtype) - 1)


@CORRUPTIONS.register("brightness", own_name=False)
class AddedBrightness(Corruption):
    """Brightness: increases the value (V) of the HSV color model."""

    # added to the value
    small = (0.05, 0.1, 0.15, 0.2, 0.3)
    medium = (0.1, 0.2, 0.3, 0.4, 0.5)
    large = medium

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        value = x.amax(1, keepdim=True)  # with hue and saturation fixed, all channels are proportional to it
        brighter = (value + self.parameters(x, severity)).clamp(max=1)
        return torch.where(value > 0, x * (brighter / value), brighter)
