"""Digital: contrast, elastic transform, pixelation and JPEG compression."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from atoll.corruptions.base import CORRUPTIONS, Corruption
from atoll.corruptions.blur import gaussian_blur
from atoll.rng import PointRNG


@CORRUPTIONS.register("contrast", own_name=False)
class Contrast(Corruption):
    """Contrast: moves all values toward the mean of their channel."""

    # factor of the distance to the mean
    small = (0.75, 0.5, 0.4, 0.3, 0.15)
    medium = (0.4, 0.3, 0.2, 0.1, 0.05)
    large = medium

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        levels = (255 * x).round()  # sums of integers are exact in any order
        mean = levels.sum((2, 3), keepdim=True) / (255 * x[0, 0].numel())
        factor: float = self.parameters(x, severity)
        return mean + factor * (x - mean)


@CORRUPTIONS.register("elastic_transform", own_name=False)
class ElasticTransform(Corruption):
    """Elastic transform: a random affine map, then smooth random displacements."""

    # size of the displacements before smoothing, standard deviation of the Gaussian that smooths them, largest
    # displacement of the corners by the affine map; all as shares of the shorter side
    small = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    medium = ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02))
    # The benchmark uses these shares of 244 pixels for images of 224.
    large = tuple(
        tuple(share * 244 / 224 for share in row)
        for row in ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    )

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        height, width = x.shape[2:]
        strength, sigma, corner = (min(height, width) * share for share in self.parameters(x, severity))
        matrix = affine_matrix(height, width, corner * (2 * streams.uniform(3, 2, dtype=x.dtype) - 1))
        down, right = torch.arange(height, dtype=x.dtype)[:, None], torch.arange(width, dtype=x.dtype)
        m = matrix[..., None, None]
        x = sample(x, *(m[:, axis, 0] * right + m[:, axis, 1] * down + m[:, axis, 2] for axis in (0, 1)), centers=True)
        noise = 2 * streams.uniform(2, height, width, dtype=x.dtype) - 1
        shift = strength * gaussian_blur(noise, sigma, mode="reflect", truncate=3.0)
        return sample(x, right + shift[:, 0], down + shift[:, 1], centers=False)


def affine_matrix(height: int, width: int, displacements: Tensor) -> Tensor:
    """For each image, the affine map that moves three displaced corners of a square in its center back.

    Args:
        height: of the image.
        width: of the image.
        displacements: right and down, ``(batch, 3, 2)``.

    Returns:
        Matrices ``(batch, 2, 3)`` that map a place in the result (right, down, 1) to where it is sampled.
    """
    center, half = torch.tensor([width // 2, height // 2]), min(height, width) // 3
    corners = (center + half * torch.tensor([[1, 1], [1, -1], [-1, -1]])).to(displacements)
    # Cramer's rule, because the last bit of a batched solver may depend on the batch.
    (ax, ay), (bx, by), (cx, cy) = ((corners + displacements)[:, k].T for k in range(3))
    determinant = (bx - ax) * (cy - ay) - (cx - ax) * (by - ay)
    rows = []
    for axis in (0, 1):
        a, b, c = corners[:, axis]
        right = ((b - a) * (cy - ay) - (c - a) * (by - ay)) / determinant
        down = ((c - a) * (bx - ax) - (b - a) * (cx - ax)) / determinant
        rows.append(torch.stack([right, down, a - right * ax - down * ay], 1))
    return torch.stack(rows, 1)


def sample(x: Tensor, right: Tensor, down: Tensor, *, centers: bool) -> Tensor:
    """Sample images at places in pixels ``(batch, H, W)`` by linear interpolation.

    Outside, the image is mirrored at the centers of its border pixels, or at their outer edges.

    >>> x = torch.tensor([[[[1.0, 2.0, 4.0]]]]).expand(1, 1, 2, 3)
    >>> right, down = torch.tensor([[[-1.0, 0.5, 3.0]]]), torch.zeros(1, 1, 3)
    >>> sample(x, right, down, centers=True), sample(x, right, down, centers=False)
    (tensor([[[[2.0000, 1.5000, 2.0000]]]]), tensor([[[[1.0000, 1.5000, 4.0000]]]]))
    """
    height, width = x.shape[2:]
    if centers:  # -1 and 1 are the centers of the border pixels
        u, v = 2 * right / (width - 1) - 1, 2 * down / (height - 1) - 1
    else:  # or their outer edges
        u, v = (2 * right + 1) / width - 1, (2 * down + 1) / height - 1
    places = torch.stack([u, v], -1)
    return functional.grid_sample(x, places, padding_mode="reflection", align_corners=centers)


@CORRUPTIONS.register("pixelate", own_name=False)
class Pixelate(Corruption):
    """Pixelate: reduces the resolution, and enlarges the image again without interpolation."""

    # new size as a share of the old
    small = (0.95, 0.9, 0.85, 0.75, 0.65)
    medium = (0.9, 0.8, 0.7, 0.6, 0.5)
    large = (0.6, 0.5, 0.4, 0.3, 0.25)

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        share, (height, width) = self.parameters(x, severity), x.shape[2:]

        def pixelate(image: Image.Image) -> Image.Image:
            small = image.resize((int(width * share), int(height * share)), Image.Resampling.BOX)
            return small.resize((width, height), Image.Resampling.BOX)

        return _with_pillow(x, pixelate)


@CORRUPTIONS.register("jpeg_compression", own_name=False)
class JPEGCompression(Corruption):
    """JPEG compression at low quality."""

    # quality
    small = (80, 65, 58, 50, 40)
    medium = (65, 58, 50, 40, 25)
    large = (25, 18, 15, 10, 7)

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        def compress(image: Image.Image) -> Image.Image:
            file = io.BytesIO()
            image.save(file, "jpeg", quality=self.parameters(x, severity))
            return Image.open(file)

        return _with_pillow(x, compress)


def _with_pillow(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    levels = (255 * x).round().to(torch.uint8).movedim(1, 3)  # channels last, as Pillow wants them
    images = [np.asarray(change(Image.fromarray(image.squeeze(2).numpy()))) for image in levels.contiguous()]
    return torch.from_numpy(np.stack(images)).view(levels.shape).movedim(3, 1).double() / 255
