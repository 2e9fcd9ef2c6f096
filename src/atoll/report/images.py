"""Images from the files of results, encoded for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.errors import DataError

LARGEST = 1024  # pixels of a side
SHOWN = 224  # pixels of a side on the page


def read_images(path: Path, names: Sequence[str] | None, count: int) -> dict[str, Tensor]:
    """The first images under some names (None: all names) of a safetensors file; nothing else of it is read."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in names or file.keys()}
            shapes = {name: part.get_shape() for name, part in slices.items()}
            images = {name: part[:count] for name, part in slices.items() if _is_images(shapes[name])}
    except (SafetensorError, OSError) as error:
        raise DataError(str(error)) from None
    for name in names or ():
        if name not in images:
            raise DataError(f"{name}: expected images of at most {LARGEST} x {LARGEST} pixels, got {shapes[name]}")
    return {name: _finite(name, values) for name, values in images.items()}


def _is_images(shape: Sequence[int]) -> bool:
    return len(shape) == 4 and shape[1] in (1, 3) and all(1 <= side <= LARGEST for side in shape[2:])


def _finite(name: str, values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise DataError(f"{name}: expected floating-point numbers, got {values.dtype}")
    return values.float().nan_to_num()


def encode_image(image: Tensor) -> str:
    """An image ``(C, H, W)`` in [0, 1] as a data URI; gray or RGB.

    >>> encode_image(torch.rand(1, 4, 3))[:22]
    'data:image/png;base64,'
    """
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).squeeze(2)
    picture = Image.fromarray(pixels.contiguous().numpy())
    picture.thumbnail((SHOWN, SHOWN))
    file = io.BytesIO()
    picture.save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
