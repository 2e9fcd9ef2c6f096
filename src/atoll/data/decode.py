"""Image files to pixels."""

from __future__ import annotations

import struct
import zlib
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
    >>> decode(file, "grey.png", resize=8, size=6).shape
    torch.Size([3, 6, 6])
    """
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except _BROKEN as error:
        raise DataError(f"{source}: not an image, broken or truncated: {error}") from None
    if resize is not None:
        width, height = image.size
        short = min(width, height)
        image = image.resize((resize * width // short, resize * height // short), Image.Resampling.BILINEAR)
    if size is not None:
        left, top = round((image.width - size) / 2), round((image.height - size) / 2)
        image = image.crop((left, top, left + size, top + size))
    pixels: NDArray[np.uint8] = np.array(image)
    return torch.from_numpy(pixels).permute(2, 0, 1)
