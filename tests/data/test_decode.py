"""Image files of every kind become the RGB picture that a viewer would show."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from atoll.data.decode import decode, image_size
from atoll.errors import DataError

Array = NDArray[Any]
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


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_file(samples: Array, bits: int, color: int, *extra: bytes) -> bytes:
    """A PNG file, written without Pillow: ``color`` is 0 gray, 2 RGB, 3 palette, 4 gray and alpha, 6 RGBA."""
    height, width = samples.shape[:2]
    lines = samples.reshape(height, -1)
    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in lines]
    else:
        rows = [np.packbits(np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, -bits:]).tobytes() for row in lines]
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    parts = chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def tiff_file(samples: Array, bits: int, photometric: int, *, kind: int = 1, extra: int | None = None) -> bytes:
    """A TIFF file, written without Pillow: ``photometric`` is 0 white is zero, 1 black is zero, 2 RGB, 5 CMYK."""
    height, width = samples.shape[:2]
    channels = 1 if samples.ndim == 2 else samples.shape[2]
    pixels = samples.astype({8: "u1", 16: "<u2", 32: "<u4"}[bits]).tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 0), (277, channels)]
    tags += [(278, height), (279, len(pixels)), *([] if extra is None else [(338, extra)]), (339, kind)]
    many = {258: bits, 339: kind} if channels > 2 else {}  # values that do not fit into the tag
    start = 8 + 2 + 12 * len(tags) + 4
    values = b"".join(struct.pack("<H", value) * channels for value in many.values())
    entries = b""
    for tag, value in tags:
        if tag in many:
            place = start + 2 * channels * list(many).index(tag)
            entries += struct.pack("<HHII", tag, 3, channels, place)
        elif tag in (258, 339):
            entries += struct.pack("<HHIHH", tag, 3, channels, value, value if channels == 2 else 0)
        else:
            entries += struct.pack("<HHII", tag, 4, 1, start + len(values) if tag == 273 else value)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + values + pixels


def on_white(color: Array, alpha: Array) -> Array:
    """Colors and alpha in [0, 1] as a viewer shows them."""
    return 255 * (color * alpha + 1 - alpha)


def levels(draw: Generator, bits: int, *channels: int) -> Array:
    return draw.integers(0, 2**bits, (5, 7, *channels))


def cases() -> Iterator[tuple[str, bytes, Array, float]]:
    """Random pixels in files of every kind: name, file, what a viewer shows, and the largest difference.

    Pillow cuts off the lower half of 16 bits, so colors may be one level too dark, and two after blending.
    """
    draw = np.random.default_rng(0)
    for bits in (1, 2, 4, 8, 16):
        gray, most = levels(draw, bits), 2**bits - 1
        yield f"gray, {bits} bits", png_file(gray, bits, 0), 255 * gray / most, 0.5
        one = chunk(b"tRNS", struct.pack(">H", gray[0, 0]))
        shown = np.where(gray == gray[0, 0], 255, 255 * gray / most)
        yield f"gray, {bits} bits, one level transparent", png_file(gray, bits, 0, one), shown, 0.5
    for bits, slack in ((8, 0.5), (16, 1.0)):
        most = 2**bits - 1
        color, both, alpha = levels(draw, bits, 3), levels(draw, bits, 2), levels(draw, bits, 4)
        yield f"RGB, {bits} bits", png_file(color, bits, 2), 255 * color / most, slack
        one = chunk(b"tRNS", struct.pack(">HHH", *color[0, 0]))
        shown = np.where((color == color[0, 0]).all(2, keepdims=True), 255, 255 * color / most)
        yield f"RGB, {bits} bits, one color transparent", png_file(color, bits, 2, one), shown, slack
        both, alpha = both / most, alpha / most
        yield f"LA, {bits} bits", png_file(both * most, bits, 4), on_white(both[..., :1], both[..., 1:]), 2 * slack
        yield f"RGBA, {bits} bits", png_file(alpha * most, bits, 6), on_white(alpha[..., :3], alpha[..., 3:]), 2 * slack
        yield f"RGB, {bits} bits, TIFF", tiff_file(color, bits, 2), 255 * color / most, slack
        rgba = tiff_file(alpha * most, bits, 2, extra=2)
        yield f"RGBA, {bits} bits, TIFF", rgba, on_white(alpha[..., :3], alpha[..., 3:]), 2 * slack
        ink = 255 * (1 - alpha[..., :3]) * (1 - alpha[..., 3:])
        yield f"CMYK, {bits} bits, TIFF", tiff_file(alpha * most, bits, 5), ink, 2 * slack
        gray = levels(draw, bits)
        yield f"gray, {bits} bits, TIFF", tiff_file(gray, bits, 1), 255 * gray / most, slack
        yield f"gray, {bits} bits, white is zero", tiff_file(gray, bits, 0), 255 - 255 * gray / most, slack
    for bits in (1, 2, 4, 8):
        palette, index, alpha = draw.integers(0, 256, (2**bits, 3)), levels(draw, bits), draw.integers(0, 256, 2**bits)
        colors = chunk(b"PLTE", palette.astype(np.uint8).tobytes())
        yield f"palette, {bits} bits", png_file(index, bits, 3, colors), palette[index], 0.0
        opacity = chunk(b"tRNS", alpha.astype(np.uint8).tobytes())
        shown = on_white(palette[index] / 255, alpha[index][..., None] / 255)
        yield f"palette, {bits} bits, opacity", png_file(index, bits, 3, colors, opacity), shown, 1.0
    premultiplied = levels(draw, 8, 4)
    premultiplied[..., :3] = np.minimum(premultiplied[..., :3], premultiplied[..., 3:])
    shown = premultiplied[..., :3] + 255 - premultiplied[..., 3:]
    yield "RGBA, premultiplied", tiff_file(premultiplied, 8, 2, extra=1), shown, 1.5
    for most in (31, 1023, 65535):
        gray = draw.integers(0, most + 1, (5, 7))
        pixels = gray.astype("u1" if most < 256 else ">u2").tobytes()
        yield f"PGM, {most}", b"P5 7 5 %d\n" % most + pixels, 255 * gray / most, 0.51


CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_pixels_of_files_that_pillow_did_not_write(name: str) -> None:
    content, shown, slack = CASES[name]
    image = decode(io.BytesIO(content), name).permute(1, 2, 0).numpy().astype(float)
    shown = np.broadcast_to(shown[..., None] if shown.ndim == 2 else shown, image.shape)
    assert np.abs(image - shown).max() <= slack + 1e-9


@pytest.mark.parametrize("kind", [1, 2])
def test_32_bits_are_refused_even_if_the_values_are_small(kind: int) -> None:
    with pytest.raises(DataError, match="expected 8 or 16 bits per channel, got 32"):
        decode(io.BytesIO(tiff_file(np.full((3, 4), 200), 32, 1, kind=kind)), "x.tif")


@pytest.mark.parametrize(
    "options",
    [
        {"format": "png"}, {"format": "png", "default_image": True}, {"format": "tiff"},
        {"format": "webp", "lossless": True}, {"format": "gif"}, {"format": "mpo", "quality": 100, "subsampling": 0},
    ],
)  # fmt: skip
def test_the_first_frame_of_several(options: dict[str, Any]) -> None:
    first, second = (Image.fromarray(np.full((16, 24, 3), value, np.uint8)) for value in ((200, 30, 90), (0, 0, 0)))
    file = io.BytesIO()
    first.save(file, save_all=True, append_images=[second], **options)
    with Image.open(file) as opened:
        assert opened.n_frames == 2  # type: ignore[attr-defined]
    image = decode(file, "x").permute(1, 2, 0).numpy().astype(int)
    assert image.shape == (16, 24, 3)
    assert np.abs(image - (200, 30, 90)).max() <= 2  # JPEG is not exact


def smooth(mode: str = "RGB") -> Image.Image:
    rows, columns, channel = np.meshgrid(np.arange(40), np.arange(48), np.arange(3), indexing="ij")
    noise = np.random.default_rng(0).integers(0, 9, rows.shape)
    return Image.fromarray((2 * rows + 2 * columns + 20 * channel + noise).astype(np.uint8)).convert(mode)


TRUNCATED: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("RGB", {}), "jpeg": ("RGB", {}), "progressive": ("RGB", {"format": "jpeg", "progressive": True}),
    "webp": ("RGB", {}), "lossless": ("RGB", {"format": "webp", "lossless": True}), "bmp": ("RGB", {}),
    "tiff": ("RGB", {}), "lzw": ("RGB", {"format": "tiff", "compression": "tiff_lzw"}), "gif": ("P", {}),
    "ppm": ("RGB", {}), "gray": ("L", {"format": "png"}), "jpeg2000": ("RGB", {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_files_are_refused_or_complete(name: str) -> None:
    """Wherever a file is cut: no image is partly gray.  The last bytes of some formats contain no pixels."""
    mode, options = TRUNCATED[name]
    file = io.BytesIO()
    smooth(mode).save(file, **{"format": name, **options})
    whole, image = file.getvalue(), decode(file, name)
    cuts = {len(whole) * part // 20 for part in range(20)} | {len(whole) - part for part in (1, 2, 4, 12, 40)}
    for cut in cuts:
        try:
            partial = decode(io.BytesIO(whole[:cut]), name)
        except DataError:
            continue
        assert torch.equal(partial, image)
        assert len(whole) - cut <= 40


def test_progressive_jpeg() -> None:
    """The coefficients are the same as in the usual order, so the pixels are."""
    images = []
    for progressive in (True, False):
        file = io.BytesIO()
        smooth().save(file, "jpeg", progressive=progressive, quality=95, subsampling=0)
        images.append(decode(file, "x"))
    assert torch.equal(*images)
    assert np.abs(images[0].numpy().astype(int) - np.asarray(smooth()).transpose(2, 0, 1)).mean() < 3


def test_images_that_become_huge_are_refused(tmp_path: Path) -> None:
    Image.new("L", (1, 60_000)).save(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x: resized to 256 x 15360000 pixels, which is too large"):
        decode(tmp_path / "x.png", "x", resize=256, size=224)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
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
