"""Folders of images."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data import ImageFolder
from atoll.data.decode import decode
from atoll.errors import DataError, InputError
from data.fakes import fake_folder, png


def folder(root: Path, **options: object) -> ImageFolder:
    return ImageFolder(root=root, **{"resize": 16, "size": 12, **options})  # type: ignore[arg-type]


def test_resize_and_crop_like_pillow(tmp_path: Path) -> None:
    data = folder(fake_folder(tmp_path), validation=0)
    image = Image.open(tmp_path / "train" / "ant" / "2.PNG")  # 22 x 28
    scaled = image.resize((16, 16 * 28 // 22), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((2, 4, 14, 16)))
    assert np.array_equal(data.train.fetch(torch.tensor([2]))[0].numpy(), expected.transpose(2, 0, 1))


def test_labels_and_order(tmp_path: Path) -> None:
    data = folder(fake_folder(tmp_path), validation=0)
    assert data.classes == ("ant", "bee")
    assert data.train.labels.tolist() == [0] * 10 + [1] * 10
    both = data.train.fetch(torch.tensor([15, 0]))
    assert torch.equal(both[1], data.train.fetch(torch.tensor([0]))[0])


def test_test_folder_and_hidden_files(tmp_path: Path) -> None:
    root = fake_folder(tmp_path)
    (root / "val").rename(root / "test")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "ant" / "notes.txt").write_text("not an image")
    assert (len(folder(root, validation=0).train), len(folder(root).test)) == (20, 6)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.new("RGB", (9, 7), (255, 255, 255)).convert(mode).save(path)
    assert torch.equal(decode(path, "x"), torch.full((3, 7, 9), 255, dtype=torch.uint8))


def test_narrow_images(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png((1, 200)))
    assert decode(tmp_path / "x.png", "x", resize=8, size=8).shape == (3, 8, 8)


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected folders train and val \(or test\), got no train"):
        _ = folder(tmp_path / "none").train
    root = fake_folder(tmp_path / "a")
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match="got no test"):
        _ = folder(root).classes
    for name in ("ant", "bee"):
        shutil.rmtree(root / "train" / name)
    (root / "val").mkdir()
    with pytest.raises(DataError, match="expected one folder per class, got none"):
        _ = folder(root).train


def test_classes_must_agree(tmp_path: Path) -> None:
    root = fake_folder(tmp_path)
    (root / "val" / "bee").rename(root / "val" / "wasp")
    with pytest.raises(DataError, match=r"val: expected the classes of .*train, got a difference in bee, wasp"):
        _ = folder(root).train


def test_an_empty_class(tmp_path: Path) -> None:
    root = fake_folder(tmp_path)
    (root / "train" / "cat").mkdir()
    (root / "val" / "cat").mkdir()
    with pytest.raises(DataError, match=r"train/cat: expected images .* got none"):
        _ = folder(root).train


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "tiff"])
def test_truncated_and_broken_images(tmp_path: Path, kind: str) -> None:
    whole = png((40, 30), 0, kind)
    path = tmp_path / "x.jpg"
    for content in (whole[: len(whole) // 2], whole[:30], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x.jpg: not an image, broken or truncated"):
            decode(path, str(path))


def test_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "x.png").write_bytes(png((40, 30)))
    with pytest.raises(DataError, match="not an image, broken or truncated: Image size"):
        decode(tmp_path / "x.png", "x.png")


def test_sizes() -> None:
    with pytest.raises(InputError, match="size: expected between 1 and resize=16 pixels, got 17"):
        ImageFolder(root="x", resize=16, size=17)
