"""Augmentations of whole batches, with one random stream per point and without loops over images."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from atoll.data.boxes import rectangles
from atoll.errors import InputError, check_count, check_range
from atoll.registry import Registry
from atoll.rng import PointRNG
from atoll.threat import per_point

AUGMENTATIONS = Registry("augmentation", "augmentations", "atoll.data.augment.Augmentation", "atoll.data")


class Augmentation(ABC):
    """Base class of augmentations, which map float images ``(batch, C, H, W)`` in [0, 1] to the same shape and range.

    The result depends only on the image and its random stream, never on the rest of the batch.
    """

    registry: ClassVar[Registry] = AUGMENTATIONS

    @abstractmethod
    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor: ...


def check_images(x: Tensor) -> None:
    """Raise an InputError unless the input is a batch of float images."""
    if x.dim() != 4 or not x.is_floating_point():
        raise InputError(f"augmentation: expected float images (batch, C, H, W), got {x.dtype} {tuple(x.shape)}")


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class RandomCrop(Augmentation):
    """Random crop: pads with black and crops a random window of the original size.

    The standard augmentation for CIFAR since Lee et al., "Deeply-Supervised Nets" (2015).

    Args:
        padding: width of the border on each side.

    >>> crop = RandomCrop(padding=4)
    >>> crop(torch.rand(2, 3, 32, 32), PointRNG("crop", index=torch.arange(2))).shape
    torch.Size([2, 3, 32, 32])
    """

    padding: int = 4

    def __post_init__(self) -> None:
        check_count(0, 10_000, padding=self.padding)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        places = 2 * self.padding + 1
        place = streams.integers(places * places)  # one number for both axes
        if not len(x):
            return x
        padded = functional.pad(x, [self.padding] * 4).contiguous()
        _, channels, height, width = padded.shape
        rows = torch.arange(x.shape[2], device=x.device) * width
        planes = torch.arange(len(x) * channels, device=x.device).view(len(x), channels, 1) * (height * width)
        first = place // places * width + place % places
        # View the image as all runs of pixels with the length of a row of the result.  A crop then selects runs, which
        # copies whole rows instead of single pixels.
        length = x.shape[3]
        runs = padded.as_strided((padded.numel() - length + 1, length), (1, 1))
        return runs.index_select(0, (per_point(first, planes) + planes + rows).flatten()).view(x.shape)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class HorizontalFlip(Augmentation):
    """Horizontal flip with probability ``p``.

    >>> flip = HorizontalFlip(p=1.0)
    >>> flip(torch.tensor([[[[0.0, 0.5, 1.0]]]]), PointRNG("flip", index=torch.arange(1)))
    tensor([[[[1.0000, 0.5000, 0.0000]]]])
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        check_range("[0, 1]", p=self.p)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        rows = (streams.uniform() < self.p).nonzero().squeeze(1)
        return x.index_copy(0, rows, x.index_select(0, rows).flip(-1))


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class Brightness(Augmentation):
    """Random brightness: adds a number from ``[-strength, strength]`` to all pixels and clips to [0, 1].

    Together with ``HorizontalFlip`` this is 'fb' (flip and random brightness) of Wang et al., "Improving Robust
    Generalization by Direct PAC-Bayesian Bound Minimization" (2023), who do not state the strength.

    >>> Brightness(strength=0.2)(torch.full((1, 1, 1, 1), 0.5), PointRNG("b", index=torch.arange(1))).shape
    torch.Size([1, 1, 1, 1])
    """

    strength: float = 0.1

    def __post_init__(self) -> None:
        check_range("[0, 1]", strength=self.strength)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        shift = (2 * streams.uniform(dtype=x.dtype) - 1) * self.strength
        return (x + per_point(shift, x)).clamp_(0, 1)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class Cutout(Augmentation):
    """Cutout: fills a square at a random position, which may extend beyond the border.

    T. DeVries and G. Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout" (2017).

    Args:
        size: side of the square (in the paper, 16 for CIFAR-10 and 8 for CIFAR-100).
        fill: gray level of the square.  The paper uses zero after normalization, the mean of the data.

    >>> cut = Cutout(size=2)(torch.ones(1, 1, 4, 4), PointRNG("cut", index=torch.arange(1)))
    >>> cut.unique()
    tensor([0.5000, 1.0000])
    """

    size: int = 8
    fill: float = 0.5

    def __post_init__(self) -> None:
        check_count(1, size=self.size)
        check_range("[0, 1]", fill=self.fill)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        height, width = x.shape[2:]
        center = streams.integers(height * width)  # one number for both axes
        top, left = center // width - self.size // 2, center % width - self.size // 2
        square = rectangles(top, left, top + self.size, left + self.size, height, width)
        return x.masked_fill(square[:, None], self.fill)


def affine(x: Tensor, matrix: Tensor, fill: float = 0.5, shift: Tensor | None = None) -> Tensor:
    """Transform images: the pixel at ``p`` is sampled at ``matrix @ (p, 1)``, in pixels relative to the center.

    Args:
        x: images.
        matrix: one matrix per image, ``(batch, 2, 3)``.
        fill: gray level of pixels from outside.
        shift: added to the sampling positions, right and down, ``(batch, 2, H, W)``.

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
    # grid_sample expects x before y, and -1 and 1 at the outer edges of the border pixels.
    grid = torch.stack([source[:, 0] * (2 / width), source[:, 1] * (2 / height)], dim=-1)
    return functional.grid_sample(x - fill, grid, align_corners=False).add_(fill).clamp_(0, 1)


@dataclass(frozen=True, kw_only=True)
@AUGMENTATIONS.register()
class RandomAffine(Augmentation):
    r"""Random rotation and scaling around the center; pixels from outside are black.

    With t uniform up to the tangent of half the largest angle, the rotation is

    .. math:: \frac{1}{1 + t^2} \begin{pmatrix} 1 - t^2 & -2t \\ 2t & 1 - t^2 \end{pmatrix},

    which is close to a uniform angle for small angles and needs no vectorized sine, whose result may depend on the
    batch size.

    Args:
        degrees: largest angle.
        scale: largest relative change of size.

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
    """Elastic deformation: shifts pixels by a smooth random displacement field; pixels from outside are black.

    P. Simard, D. Steinkraus and J. Platt, "Best Practices for Convolutional Neural Networks Applied to Visual Document
    Analysis" (2003).  Uses cubic interpolation of normal displacements on a coarse grid, which is as smooth as their
    Gaussian filter and needs fewer random numbers.

    Args:
        strength: standard deviation of the displacements at the grid points, in pixels.
        nodes: number of grid points along each side.

    >>> bend = Elastic(strength=0.6)
    >>> bend(torch.rand(2, 1, 28, 28), PointRNG("elastic", index=torch.arange(2))).shape
    torch.Size([2, 1, 28, 28])
    """

    strength: float = 0.6
    nodes: int = 6

    def __post_init__(self) -> None:
        check_range("[0, inf)", strength=self.strength)
        check_count(2, 1000, nodes=self.nodes)

    def __call__(self, x: Tensor, streams: PointRNG) -> Tensor:
        check_images(x)
        if not len(x):
            return x
        coarse = self.strength * streams.normal(2, self.nodes, self.nodes, dtype=x.dtype)
        field = functional.interpolate(coarse, size=x.shape[2:], mode="bicubic", align_corners=True)
        still = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        return affine(x, still, fill=0.0, shift=field)
