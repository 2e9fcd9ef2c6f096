"""Image files to pixels."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from atoll.errors import DataError

# What Pillow raises on broken files depends on the format and on where it breaks.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Frame:
    """An image is scaled to ``width`` x ``height``; of that a window of ``size`` (width, height) is kept."""

    width: int
    height: int
    left: int
    top: int
    size: tuple[int, int]


def frame(width: int, height: int, resize: int | None, size: int | None) -> Frame:
    """The shorter side scaled to ``resize`` pixels, then the middle square of ``size`` pixels.

    >>> frame(20, 10, 8, 6)
    Frame(width=16, height=8, left=5, top=1, size=(6, 6))
    """
    if resize is not None:
        short = min(width, height)
        width, height = resize * width // short, resize * height // short
    if size is None:
        return Frame(width, height, 0, 0, (width, height))
    return Frame(width, height, round((width - size) / 2), round((height - size) / 2), (size, size))


def decode(file: Path | IO[bytes], source: str, *, resize: int | None = None, size: int | None = None) -> Tensor:
    """An image file as uint8 RGB ``(3, H, W)``.

    Args:
        file: path or opened file.
        source: its name in error messages.
        resize: scale the shorter side to this many pixels (bilinear, antialiased).
        size: then cut this square out of the middle.

    >>> import io
    >>> file = io.BytesIO()
    >>> Image.new("L", (20, 10), 7).save(file, "png")
    >>> decode(file, "gray.png", resize=8, size=6).shape
    torch.Size([3, 6, 6])
    """
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except _BROKEN as error:
        raise DataError(f"{source}: not an image, broken or truncated: {error}") from None
    to = frame(*image.size, resize, size)
    if resize is not None:
        image = image.resize((to.width, to.height), Image.Resampling.BILINEAR)
    if size is not None:
        image = image.crop((to.left, to.top, to.left + size, to.top + size))
    pixels: NDArray[np.uint8] = np.array(image)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def image_size(file: Path) -> tuple[int, int]:
    """Width and height of an image file, from its first bytes."""
    try:
        with Image.open(file) as opened:
            return opened.size
    except _BROKEN as error:
        raise DataError(f"{file}: not an image, broken or truncated: {error}") from None
