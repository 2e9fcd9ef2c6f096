"""Images rotated, stretched and moved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from atoll.data.augment import AUGMENTATIONS, Augmentation, check_images
from atoll.errors import check_range
from atoll.rng import PointRNG


def affine(x: Tensor, matrix: Tensor, fill: float = 0.5, shift: Tensor | None = None) -> Tensor:
    """Moves the images: the pixel at ``p`` comes from ``matrix @ (p, 1)``, in pixels from the center.

    Args:
        x: images.
        matrix: ``(batch, 2, 3)``.
        fill: gray level of pixels from outside.
        shift: added to where each pixel comes from, right and down, ``(batch, 2, H, W)``.

    >>> left = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    >>> affine(torch.tensor([[[[0.0, 0.25, 1.0]]]]), left)
    tensor([[[[0.2500, 1.0000, 0.5000]]]])
    """
    height, width = x.shape[2:]
    down = torch.arange(height, dtype=x.dtype, device=x.device) - (height - 1) / 2
    right = torch.arange(width, dtype=x.dtype, device=x.device) - (width - 1) / 2
    m = matrix.to(x.dtype)[:, :, :, None, None]
    source = m[:, :, 0] * right + m[:, :, 1] * down[:, None] + m[:, :, 2]
    if shift is not None:
        source = source + shift
    # grid_sample wants x before y, and -1 and 1 at the outer edges of the border pixels.
    grid = torch.stack([source[:, 0] * (2 / width), source[:, 1] * (2 / height)], dim=-1)
    return functional.grid_sample(x - fill, grid, align_corners=False).add_(fill).clamp_(0, 1)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class RandomAffine(Augmentation):
    r"""Rotates and scales images a little around the center; pixels from outside are black.

    With t uniform up to the tangent of half the largest angle, the rotation is

    .. math:: \frac{1}{1 + t^2} \begin{pmatrix} 1 - t^2 & -2t \\ 2t & 1 - t^2 \end{pmatrix},

    which for small angles is as good as a uniform angle, and needs no sine: vectorized ones may depend on the size of
    the batch.

    Args:
        degrees: largest angle.
        scale: largest change of size, as a share of it.

    >>> turn = RandomAffine(degrees=5, scale=0.05)
    >>> turn(torch.rand(2, 1, 28, 28), PointRNG("affine", index=torch.arange(2))).shape
    torch.Size([2, 1, 28, 28])
    """

    degrees: float = 5.0
    scale: float = 0.05

    def __post_init__(self) -> None:
        check_range("[0, 180]", degrees=self.degrees)
        check_range("[0, 1)", scale=self.scale)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        turn, size = (2 * streams.uniform(2, dtype=x.dtype) - 1).unbind(1)
        t = turn * math.tan(math.radians(self.degrees / 2))
        factor = (1 + self.scale * size) / (1 + t * t)
        straight, across, zero = factor * (1 - t * t), factor * 2 * t, torch.zeros_like(t)
        rows = [torch.stack(row, 1) for row in ((straight, -across, zero), (across, straight, zero))]
        return affine(x, torch.stack(rows, 1), fill=0.0)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class Elastic(Augmentation):
    """Bends images: every pixel comes from a place nearby, neighbors from neighboring places; outside is black.

    P. Simard, D. Steinkraus and J. Platt, "Best Practices for Convolutional Neural Networks Applied to Visual Document
    Analysis" (2003), with a coarse grid of normal displacements and cubic interpolation between them, which is as
    smooth as their Gaussian filter and takes fewer random numbers.

    Args:
        strength: standard deviation of the displacements at the nodes of the grid, in pixels.
        nodes: of the grid, along each side.

    >>> bend = Elastic(strength=0.6)
    >>> bend(torch.rand(2, 1, 28, 28), PointRNG("elastic", index=torch.arange(2))).shape
    torch.Size([2, 1, 28, 28])
    """

    strength: float = 0.6
    nodes: int = 6

    def __post_init__(self) -> None:
        check_range("[0, inf)", strength=self.strength)
        check_range("[2, inf)", nodes=self.nodes)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        if not len(x):
            return x
        coarse = self.strength * streams.normal(2, self.nodes, self.nodes, dtype=x.dtype)
        field = functional.interpolate(coarse, size=x.shape[2:], mode="bicubic", align_corners=True)
        still = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        return affine(x, still, fill=0.0, shift=field)
