"""Images of any data set on larger canvases full of clutter: data where it is known what a model should look at."""

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
from atoll.errors import DataError, InputError, check_range
from atoll.rng import PointRNG

_WAVES = 8  # of a texture, along its direction, on a canvas
_CHUNK = 1024


@dataclass(frozen=True)
class CanvasSplit:
    """A split on canvases, drawn when they are fetched; see ``ClutteredCanvas``.

    Drawing is cheap compared with a training step; in memory, canvases would take several times the room of their
    images.
    """

    whole: Split
    name: str  # of the split, for its random streams
    classes: int
    size: int  # side of the canvas
    clutter: int  # number of fragments
    fragment: int  # their side
    own: float | None  # with which probability the texture is that of the label; None for no texture
    texture: float  # brightness
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
        """The points' streams, and where their images go: the first that is drawn."""
        streams = PointRNG(self.seed, "canvas", self.name, index=index)
        return streams, streams.integers(self.size - height + 1), streams.integers(self.size - width + 1)

    def _clutter(self, index: Tensor, height: int, width: int, streams: PointRNG) -> Iterator[tuple[Tensor, ...]]:
        """Fragments of other images, one for each point at a time, and where they go."""
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
        """Waves whose direction stands for a class: the label's or any, ``(batch, size, size)``."""
        own = streams.uniform() < (self.own or 0.0)
        angle = torch.where(own, labels, streams.integers(self.classes)) * (math.pi / self.classes)
        place = torch.arange(self.size) * (2 * math.pi * _WAVES / self.size)
        phase = 2 * math.pi * streams.uniform()
        x, y = angle.cos()[:, None, None] * place, angle.sin()[:, None, None] * place[:, None]
        return self.texture * (0.5 + 0.5 * (x + y + phase[:, None, None]).sin())

    @cached_property
    def boxes(self) -> Tensor:
        """Of what was pasted: its own box if it has one, otherwise the smallest around all that is not black."""
        inner = boxes_of(self.whole)
        boxes = []
        for index in in_order(len(self), _CHUNK):
            images = self.whole.fetch(index)
            _, top, left = self._begin(index, *images.shape[-2:])
            box = _extent(images) if inner is None else inner[index]
            boxes.append(torch.where(known(box)[:, None], box + torch.stack([left, top, left, top], 1), box))
        return torch.cat(boxes)


def _window(images: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """The numbers of the pixels of a window in each image, ``(batch, C, height * width)``."""
    rows, columns = top[:, None] + torch.arange(height), left[:, None] + torch.arange(width)
    pixels = rows[:, :, None] * images.shape[3] + columns[:, None, :]
    return pixels.flatten(1)[:, None].expand(-1, images.shape[1], -1)


def _cut(images: Tensor, top: Tensor, left: Tensor, side: int) -> Tensor:
    """A square out of each image."""
    return images.flatten(2).gather(2, _window(images, top, left, side, side)).view(*images.shape[:2], side, side)


def _paste(canvas: Tensor, patches: Tensor, top: Tensor, left: Tensor) -> None:
    """Put a patch on each canvas; black is transparent."""
    window, pixels, patches = _window(canvas, top, left, *patches.shape[2:]), canvas.flatten(2), patches.flatten(2)
    pixels.scatter_(2, window, torch.where((patches > 0).any(1, keepdim=True), patches, pixels.gather(2, window)))


def _extent(images: Tensor) -> Tensor:
    """The smallest boxes around all pixels that are not black; the whole image if all are."""
    height, width = images.shape[-2:]
    seen = (images > 0).any(1)
    columns, rows = seen.any(1).byte(), seen.any(2).byte()
    # argmax is the first of the largest
    x1, y1 = columns.argmax(1), rows.argmax(1)
    x2, y2 = width - 1 - columns.flip(1).argmax(1), height - 1 - rows.flip(1).argmax(1)
    return torch.stack([x1, y1, x2, y2], 1)


@DATA.register()
class ClutteredCanvas(Data):
    """Images of another data set, each at a random place of a larger canvas over fragments of others, with its box.

    Cluttered MNIST (V. Mnih et al., "Recurrent Models of Visual Attention", 2014) for any images, with a background
    that can be made to give away the label.  Black is transparent.  The canvas of a point depends on its number and the
    seed alone.

    Args:
        data: source of the images, all published ones; limit, augment and extra are options of the canvas.
        size: side of the canvas.
        clutter: number of fragments, squares cut out of other images of the same split.
        fragment: their side; a third of the image's shorter side if None.
        spurious: more than 0 puts a texture behind everything.  Each class has its own; a canvas has that of its label
            with this probability and otherwise that of any class.
        spurious_test: the same for the test set; as in training if None, 0 takes the hint away.
        texture: brightness of textures.
        seed: of places, clutter and textures.
        options: as for every data set.

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
        check_range("[0, inf)", clutter=clutter)
        check_range("[1, inf)", fragment=fragment)
        check_range("[0, 1]", spurious=spurious, spurious_test=spurious_test, texture=texture)
        if data.limit is not None or data.augment or data.extra is not None:
            raise InputError("data: expected limit, augment and extra as options of the canvas, got them inside")
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
            raise InputError(f"size: expected room for images of {width}x{height} pixels, got {self.size}")
        fragment = max(min(height, width) // 3, 1) if self.fragment is None else self.fragment
        if fragment > min(height, width):
            raise InputError(f"fragment: expected at most the {min(height, width)} pixels of an image, got {fragment}")
        return CanvasSplit(
            split, name, len(self.classes), self.size, self.clutter, fragment, own, self.texture, self.seed
        )
