"""Conversion of image files and untrusted NumPy arrays to checked tensors."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from atoll.errors import DataError

# Errors that Pillow raises on damaged files, depending on the format.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)

SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"})
"""Files in folders that count as images."""

_MOST_PIXELS = 2**27  # of a resized image
_ORIENTATION = 0x0112  # EXIF tag that says how to rotate the photo
_BITS, _PHOTOMETRIC = 258, 262  # TIFF tags: bits per channel, and 0 if white is stored as 0
_RAW_BITS = re.compile(r";(\d+)")  # in Pillow's names of pixel layouts, such as L;4 and RGB;16B
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Frame:
    """How to transform an image: resize to ``width`` x ``height``, then crop a window of ``size`` (width, height)."""

    width: int
    height: int
    left: int
    top: int
    size: tuple[int, int]


def frame(width: int, height: int, resize: int | None, size: int | None) -> Frame:
    """Resize the shorter side to ``resize`` pixels, then crop the center square of ``size`` pixels.

    >>> frame(20, 10, 8, 6)
    Frame(width=16, height=8, left=5, top=1, size=(6, 6))
    """
    if resize is not None:
        short = min(width, height)
        width, height = resize * width // short, resize * height // short
    if size is None:
        return Frame(width, height, 0, 0, (width, height))
    return Frame(width, height, round((width - size) / 2), round((height - size) / 2), (size, size))


@contextmanager
def _open(file: Path | IO[bytes]) -> Iterator[Image.Image]:
    """Open an image and read its header.

    Pillow gets a stream, because it confuses width and height of rotated TIFF files that it opens by path.
    """
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream, Image.open(stream) as image:
        yield image


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the rotation that makes the image upright; None for a damaged EXIF block."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except (*_BROKEN, TypeError):
        return None


def _upright(image: Image.Image) -> Image.Image:
    """Decode the image and rotate it as a viewer would."""
    image.load()  # first, because Pillow rotates TIFF files itself
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image, bits: int, inverted: bool) -> Image.Image:
    """Convert any mode to 8-bit RGB, with transparent pixels on white and 16 bits scaled to 8.

    Args:
        image: the decoded image.
        bits: bits per channel in the file.
        inverted: whether 16-bit values are stored with white as 0.
    """
    transparent = image.info.get("transparency")  # Pillow keeps the gray level or color that the file contains
    if image.mode.startswith("I") or image.mode == "F":  # Pillow would clip to 255 instead of scaling
        pixels = np.asarray(image)
        if bits != 16 or pixels.dtype.kind == "f" or pixels.min() < 0:
            raise ValueError(f"expected 8 or 16 bits per channel, got {bits}")
        if transparent is not None:
            pixels = np.where(pixels == transparent, 65535, pixels)
        levels = (pixels / 257).round().astype(np.uint8)
        return Image.fromarray(255 - levels if inverted else levels).convert("RGB")
    if isinstance(transparent, int) and image.mode == "L" and bits < 8:
        image.info["transparency"] = transparent * 255 // (2**bits - 1)
    elif isinstance(transparent, tuple) and max(transparent) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in transparent)  # as Pillow does with the pixels
    if transparent is not None or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        for mode in ("RGBA",) if image.mode != "La" else ("LA", "RGBA"):
            image = image.convert(mode)
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _stored_bits(image: Image.Image) -> int:
    """Bits per channel in a file that was opened but not decoded."""
    if isinstance(image, TiffImageFile):
        return int(max(image.tag_v2.get(_BITS, (1,))))
    layout = str(image.tile[0].args) if isinstance(image, ImageFile) and image.tile else image.mode
    if bits := _RAW_BITS.search(layout):
        return int(bits[1])
    wide = 16 if image.format == "PPM" else 32
    return {"1": 1, "I;16": 16, "I": wide, "F": 32}.get(image.mode, 8)


def _unreadable(source: str, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{source}: {system_reason(error)}")
    reason = "" if isinstance(error, UnidentifiedImageError) else f": {error}"  # it only repeats the name of the file
    return DataError(f"{source}: not a valid image file{reason}")


def system_reason(error: OSError) -> str:
    """Why the operating system cannot read a file."""
    return "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


def decode(
    file: Path | IO[bytes], source: str, *, resize: int | None = None, size: int | None = None, gray: bool = False
) -> Tensor:
    """Decode an image file as uint8 RGB ``(3, H, W)``, then resize (bilinear, antialiased) and crop it as in ``frame``.

    Photos are rotated as EXIF says, transparent pixels become white, and 16-bit values are scaled to 8 bits.
    ``source`` is the name of the file in error messages.  With ``gray``, the result is the luma ``(1, H, W)`` (BT.601).

    >>> import io
    >>> file = io.BytesIO()
    >>> Image.new("L", (20, 10), 7).save(file, "png")
    >>> decode(file, "gray.png", resize=8, size=6).shape
    torch.Size([3, 6, 6])
    """
    try:
        with _open(file) as opened:
            bits = _stored_bits(opened)
            inverted = isinstance(opened, TiffImageFile) and opened.tag_v2.get(_PHOTOMETRIC) == 0
            image = _to_rgb(_upright(opened), bits, inverted)
    except _BROKEN as error:
        raise _unreadable(source, error) from None
    to = frame(*image.size, resize, size)
    if resize is not None:
        if to.width * to.height > _MOST_PIXELS:  # a very narrow image
            raise DataError(f"{source}: resized to {to.width} x {to.height} pixels, which is too large")
        image = image.resize((to.width, to.height), Image.Resampling.BILINEAR)
    if size is not None:
        image = image.crop((to.left, to.top, to.left + size, to.top + size))
    if gray:  # exact for gray images: the weights add up to one
        image = image.convert("L")
    pixels: NDArray[np.uint8] = np.atleast_3d(np.array(image))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and its subfolders, in alphabetical order, without hidden files."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.name[0] != ".")


def image_size(file: Path) -> tuple[int, int]:
    """Return width and height of a decoded image, from the file header unless the image must be rotated."""
    try:
        with _open(file) as opened:
            if _turn(opened) is None:
                return opened.size
        with _open(file) as opened:  # open it again, because Pillow rotates a TIFF file when it loads it
            return _upright(opened).size
    except _BROKEN as error:
        raise _unreadable(str(file), error) from None


def read_npz(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read the named arrays that an ``.npz`` file contains; never unpickles anything."""
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: expected an .npz file of named arrays, got a single array")
        with content:
            return {name: content[name] for name in names if name in content.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: expected an .npz file of plain arrays, got: {error}") from None


def as_images(array: NDArray[Any], source: str) -> Tensor:
    """Convert images in NHW or NHWC layout, uint8 or floats in [0, 1], to an NCHW tensor.

    >>> as_images(np.zeros((5, 8, 6, 3), np.uint8), "x_train").shape
    torch.Size([5, 3, 8, 6])
    >>> as_images(np.full((1, 2, 2), np.nan), "x_train")
    Traceback (most recent call last):
    atoll.errors.DataError: x_train: expected finite numbers, got NaN or infinity
    """
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or not 1 <= array.shape[3] <= 4:
        raise DataError(f"{source}: expected images of shape (N, H, W) or (N, H, W, channels), got {array.shape}")
    if not array.size:
        raise DataError(f"{source}: expected images, got an empty array of shape {array.shape}")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise DataError(f"{source}: expected finite numbers, got NaN or infinity")
        if low < 0 or high > 1:
            raise DataError(f"{source}: expected floats in [0, 1], got [{low:g}, {high:g}]")
        array = array.astype(np.float32)
    elif array.dtype != np.uint8:
        raise DataError(f"{source}: expected uint8, or floats in [0, 1], got {array.dtype}")
    return torch.from_numpy(np.array(array.transpose(0, 3, 1, 2), order="C"))  # a copy, so that it is writable


def as_labels(array: NDArray[Any], count: int, source: str) -> Tensor:
    """Convert ``count`` integer labels, ``(N,)`` or ``(N, 1)``, to an int64 tensor.

    >>> as_labels(np.array([[3], [1]], np.uint8), 2, "y_train")
    tensor([3, 1])
    """
    if array.dtype.kind not in "iu" or array.shape not in ((count,), (count, 1)):
        raise DataError(f"{source}: expected {count} integer labels, one per image, got {array.dtype} {array.shape}")
    labels = array.reshape(-1).astype(np.int64)
    if labels.min() < 0:
        raise DataError(f"{source}: expected labels >= 0, got {labels.min()}")
    return torch.from_numpy(labels)
