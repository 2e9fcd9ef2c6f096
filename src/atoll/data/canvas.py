"""Images of any data set on larger, cluttered canvases, for which the relevant pixels are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from atoll.data.base import DATA, Data, Split, Splits, in_order
from atoll.data.boxes import boxes_of, known
from atoll.errors import LARGEST_SIZE, DataError, InputError, check_count, check_range
from atoll.rng import PointRNG

_WAVES = 8  # number of waves of a texture across a canvas
_CHUNK = 1024


@dataclass(frozen=True)
class CanvasSplit:
    """A split on canvases that are drawn when they are fetched; see ``ClutteredCanvas``.

    Drawing is cheap compared with a training step, and stored canvases would take several times the memory of their
    images.
    """

    whole: Split
    name: str  # name of the split, for its random streams
    classes: int
    size: int  # side of the canvas
    clutter: int  # number of fragments
    fragment: int  # side of a fragment
    own: float | None  # probability that the texture is that of the label; None for no texture
    texture: float  # brightness of the texture
    seed: int

    @property
    def labels(self) -> Tensor:
        return self.whole.labels

    def __len__(self) -> int:
        return len(self.whole)

    def fetch(self, index: Tensor) -> Tensor:
        images = self.whole.fetch(index)
        height, width = images.shape[-2:]
        streams, top, left = self._begin(index, height, width)
        canvas = images.new_zeros(len(index), images.shape[1], self.size, self.size)
        if self.own is not None:
            texture = self._textures(self.labels[index], streams)[:, None]
            canvas += texture.mul(255).round().to(images.dtype) if images.dtype == torch.uint8 else texture
        for fragments, y, x in self._clutter(index, height, width, streams):
            _paste(canvas, fragments, y, x)
        _paste(canvas, images, top, left)
        return canvas

    def _begin(self, index: Tensor, height: int, width: int) -> tuple[PointRNG, Tensor, Tensor]:
        """Return the random streams of the points and the positions of their images, which are drawn first."""
        streams = PointRNG(self.seed, "canvas", self.name, index=index)
        return streams, streams.integers(self.size - height + 1), streams.integers(self.size - width + 1)

    def _clutter(self, index: Tensor, height: int, width: int, streams: PointRNG) -> Iterator[tuple[Tensor, ...]]:
        """Yield fragments of other images, one per point at a time, and their positions."""
        if not self.clutter:
            return
        side = self.fragment
        other = (index[:, None] + 1 + streams.integers(max(len(self) - 1, 1), self.clutter)) % len(self)
        y, x = streams.integers(height - side + 1, self.clutter), streams.integers(width - side + 1, self.clutter)
        fragments = _cut(self.whole.fetch(other.flatten()), y.flatten(), x.flatten(), side)
        place = streams.integers(self.size - side + 1, self.clutter, 2)
        for number, patches in enumerate(fragments.view(*other.shape, *fragments.shape[1:]).unbind(1)):
            yield patches, place[:, number, 0], place[:, number, 1]

    def _textures(self, labels: Tensor, streams: PointRNG) -> Tensor:
        """Return waves whose direction encodes a class, the label or a random one, ``(batch, size, size)``."""
        own = streams.uniform() < (self.own or 0.0)
        angle = torch.where(own, labels, streams.integers(self.classes)) * (math.pi / self.classes)
        place = torch.arange(self.size) * (2 * math.pi * _WAVES / self.size)
        phase = 2 * math.pi * streams.uniform()
        x, y = angle.cos()[:, None, None] * place, angle.sin()[:, None, None] * place[:, None]
        return self.texture * (0.5 + 0.5 * (x + y + phase[:, None, None]).sin())

    @cached_property
    def boxes(self) -> Tensor:
        """Boxes of the pasted images: their own boxes, or else the smallest ones around all nonblack pixels."""
        inner = boxes_of(self.whole)
        boxes = []
        for index in in_order(len(self), _CHUNK):
            images = self.whole.fetch(index)
            _, top, left = self._begin(index, *images.shape[-2:])
            box = _extent(images) if inner is None else inner[index]
            boxes.append(torch.where(known(box)[:, None], box + torch.stack([left, top, left, top], 1), box))
        return torch.cat(boxes)


def _window(images: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """Return the flat indices of the pixels of a window in each image, ``(batch, C, height * width)``."""
    rows, columns = top[:, None] + torch.arange(height), left[:, None] + torch.arange(width)
    pixels = rows[:, :, None] * images.shape[3] + columns[:, None, :]
    return pixels.flatten(1)[:, None].expand(-1, images.shape[1], -1)


def _cut(images: Tensor, top: Tensor, left: Tensor, side: int) -> Tensor:
    """Crop a square from each image."""
    return images.flatten(2).gather(2, _window(images, top, left, side, side)).view(*images.shape[:2], side, side)


def _paste(canvas: Tensor, patches: Tensor, top: Tensor, left: Tensor) -> None:
    """Paste a patch onto each canvas, in place; black is transparent."""
    window, pixels, patches = _window(canvas, top, left, *patches.shape[2:]), canvas.flatten(2), patches.flatten(2)
    pixels.scatter_(2, window, torch.where((patches > 0).any(1, keepdim=True), patches, pixels.gather(2, window)))


def _extent(images: Tensor) -> Tensor:
    """Return the smallest boxes around all nonblack pixels; the whole image if all pixels are black."""
    height, width = images.shape[-2:]
    visible = (images > 0).any(1)
    columns, rows = visible.any(1).byte(), visible.any(2).byte()
    # argmax returns the first maximum
    x1, y1 = columns.argmax(1), rows.argmax(1)
    x2, y2 = width - 1 - columns.flip(1).argmax(1), height - 1 - rows.flip(1).argmax(1)
    return torch.stack([x1, y1, x2, y2], 1)


@DATA.register()
class ClutteredCanvas(Data):
    """Images of another data set at random positions on cluttered canvases, with bounding boxes.

    Generalizes Cluttered MNIST (V. Mnih et al., "Recurrent Models of Visual Attention", 2014) to any images, with an
    optional background that is correlated with the label.  Black is transparent.  The canvas of a point depends only on
    its index and the seed.

    Args:
        data: source of the images; set limit, augment and extra on the canvas, not here.
        size: side of the canvas.
        clutter: number of fragments, which are squares from other images of the same split.
        fragment: side of a fragment; a third of the shorter side of the image if None.
        spurious: if positive, each canvas has a background texture.  Every class has its own texture; a canvas gets the
            texture of its label with this probability and that of a random class otherwise.
        spurious_test: the same for the test set; as in training if None, 0 to remove the correlation.
        texture: brightness of textures.
        seed: seed of positions, clutter and textures.
        options: options of all data sets.

    >>> from atoll.data import Digits
    >>> data = ClutteredCanvas(data=Digits(), size=20)
    >>> data.shape, data.test.fetch(torch.tensor([5, 7])).shape, data.test.boxes[0]
    ((1, 20, 20), torch.Size([2, 1, 20, 20]), tensor([12,  7, 17, 14]))
    """

    def __init__(
        self,
        *,
        data: Data,
        size: int = 56,
        clutter: int = 8,
        fragment: int | None = None,
        spurious: float = 0.0,
        spurious_test: float | None = None,
        texture: float = 0.3,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_count(0, 10_000, clutter=clutter)
        check_count(1, LARGEST_SIZE, fragment=fragment)
        check_range("[0, 1]", spurious=spurious, spurious_test=spurious_test, texture=texture)
        if data.limit is not None or data.augment or data.extra is not None:
            raise InputError("data: limit, augment and extra are options of ClutteredCanvas; move them out of data")
        self.data, self.size, self.seed = data, size, seed
        self.clutter, self.fragment = clutter, fragment
        self.spurious, self.spurious_test, self.texture = spurious, spurious_test, texture

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    def load(self) -> Splits:
        self.data.progress = self.progress
        published = self.data.load()
        test = self.spurious if self.spurious_test is None else self.spurious_test
        textured = self.spurious > 0 or test > 0
        return Splits(
            self._canvases(published.train, "train", self.spurious if textured else None),
            self._canvases(published.test, "test", test if textured else None),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return self.data.notes

    def _canvases(self, split: Split, name: str, own: float | None) -> CanvasSplit:
        shape = tuple(split.fetch(torch.tensor([0])).shape[1:])
        if len(shape) != 3:
            raise DataError(f"data: expected images, got {type(self.data).__name__}, whose inputs have shape {shape}")
        height, width = shape[1:]
        if self.size < max(height, width):
            largest = max(height, width)
            raise InputError(f"size: expected at least {largest} for {width}x{height} images, got {self.size}")
        fragment = max(min(height, width) // 3, 1) if self.fragment is None else self.fragment
        if fragment > min(height, width):
            raise InputError(f"fragment: expected at most {min(height, width)}, the image size, got {fragment}")
        return CanvasSplit(
            split, name, len(self.classes), self.size, self.clutter, fragment, own, self.texture, self.seed
        )
