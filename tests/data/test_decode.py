"""Image files of every kind become the RGB picture that a viewer would show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data.decode import decode, image_size
from atoll.errors import DataError

WHITE = (255, 255, 255)


def pixel(path: Path, row: int = 0, column: int = 0) -> tuple[int, ...]:
    return tuple(decode(path, str(path))[:, row, column].tolist())


def palette(color: tuple[int, int, int]) -> Image.Image:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([9, 9, 9, *color])
    return image


# A picture of one color in every mode: how it is made, its suffix, how it is saved, and what a viewer shows.
MODES: dict[str, tuple[Callable[[], Image.Image], str, dict[str, object], tuple[int, int, int]]] = {
    "gray": (lambda: Image.new("L", (4, 3), 77), "png", {}, (77, 77, 77)),
    "RGB": (lambda: Image.new("RGB", (4, 3), (10, 20, 30)), "png", {}, (10, 20, 30)),
    "RGBA, opaque": (lambda: Image.new("RGBA", (4, 3), (10, 20, 30, 255)), "png", {}, (10, 20, 30)),
    "RGBA, transparent": (lambda: Image.new("RGBA", (4, 3), (10, 20, 30, 0)), "png", {}, WHITE),
    "RGBA, half": (lambda: Image.new("RGBA", (4, 3), (0, 100, 255, 128)), "png", {}, (127, 177, 255)),
    "RGBA, WebP": (lambda: Image.new("RGBA", (4, 3), (10, 20, 30, 0)), "webp", {"lossless": True}, WHITE),
    "gray and alpha": (lambda: Image.new("LA", (4, 3), (0, 0)), "png", {}, WHITE),
    "gray, one level transparent": (lambda: Image.new("L", (4, 3), 5), "png", {"transparency": 5}, WHITE),
    "gray, other level transparent": (lambda: Image.new("L", (4, 3), 5), "png", {"transparency": 6}, (5, 5, 5)),
    "RGB, one color transparent": (
        lambda: Image.new("RGB", (4, 3), (1, 2, 3)), "png", {"transparency": (1, 2, 3)}, WHITE,
    ),
    "palette": (lambda: palette((10, 20, 30)), "png", {}, (10, 20, 30)),
    "palette, transparent": (lambda: palette((10, 20, 30)), "png", {"transparency": 1}, WHITE),
    "palette, half": (lambda: palette((0, 100, 255)), "png", {"transparency": b"\xff\x80"}, (127, 177, 255)),
    "GIF, transparent": (lambda: palette((10, 20, 30)), "gif", {"transparency": 1}, WHITE),
    "1 bit, white": (lambda: Image.new("1", (4, 3), 1), "png", {}, WHITE),
    "1 bit, black": (lambda: Image.new("1", (4, 3), 0), "png", {}, (0, 0, 0)),
    "CMYK, red": (lambda: Image.new("CMYK", (4, 3), (0, 255, 255, 0)), "tif", {}, (255, 0, 0)),
    "16 bits": (lambda: Image.fromarray(np.full((3, 4), 20_000, np.uint16)), "png", {}, (78, 78, 78)),
    "16 bits, white": (lambda: Image.fromarray(np.full((3, 4), 65535, np.uint16)), "png", {}, WHITE),
    "16 bits, TIFF": (lambda: Image.fromarray(np.full((3, 4), 20_000, np.uint16)), "tif", {}, (78, 78, 78)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_modes(tmp_path: Path, name: str) -> None:
    make, suffix, options, expected = MODES[name]
    path = tmp_path / f"x.{suffix}"
    make().save(path, **options)
    assert torch.equal(decode(path, "x"), torch.tensor(expected, dtype=torch.uint8)[:, None, None].expand(3, 3, 4))


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=100)
    assert np.allclose(pixel(tmp_path / "x.jpg"), (255, 0, 0), atol=3)


def test_32_bits_are_refused_rather_than_clipped(tmp_path: Path) -> None:
    for array in (np.full((3, 4), 70_000, np.int32), np.full((3, 4), 0.5, np.float32)):
        Image.fromarray(array).save(tmp_path / "x.tif")
        with pytest.raises(DataError, match=r"x\.tif: .*expected 8 or 16 bits per channel, got 32"):
            decode(tmp_path / "x.tif", "x.tif")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(tmp_path: Path, orientation: int, suffix: str) -> None:
    """All eight orientations show the same picture: 48 wide, 32 high, white in the upper left quarter."""
    upright = np.zeros((32, 48), np.uint8)
    upright[:16, :24] = 255
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright, 1),
        7: upright.T[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    image = decode(path, "x")
    assert image_size(path) == (48, 32)
    assert image.shape == (3, 32, 48)
    assert np.abs(image[0].numpy().astype(int) - upright).mean() < 2  # JPEG is not exact


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_damaged_exif_block_does_not_hide_the_picture(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), WHITE).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert pixel(tmp_path / "x.jpg") == WHITE
