"""Tiny-ImageNet: decoded once, completely or not at all."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data import TinyImageNet
from atoll.data import tiny_imagenet as module
from atoll.data.boxes import boxes_of
from atoll.errors import DataError
from data.fakes import fake_tiny, known, png, tiny_files


@pytest.mark.parametrize("packed", [True, False])
def test_pixels_labels_names(tmp_path: Path, packed: bool) -> None:
    data = fake_tiny(tmp_path, packed=packed)(root=tmp_path, download=False, validation=0)
    assert data.classes == ("goldfish", "cat, feline", "dog")  # by identifier: n01, n02, n03
    assert data.train.labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert data.test.labels.tolist() == [1, 0, 2, 1, 0, 2]
    files = tiny_files()
    for split, row, name in (
        (data.test, 3, "val/images/val_3.JPEG"),
        (data.train, 14, "train/n02/images/n02_4.JPEG"),
    ):
        pixels = np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB"))
        assert np.array_equal(split.fetch(torch.tensor([row]))[0].numpy(), pixels.transpose(2, 0, 1))


def test_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fake_tiny(tmp_path)
    first = kind(root=tmp_path, download=False)
    images = first.test.fetch(torch.arange(6))
    folder = tmp_path / "tinyimagenet"
    assert sorted(path.name for path in folder.rglob("*")) == [
        "boxes.npy",
        "classes.txt",
        "decoded",
        "test.npy",
        "train.npy",
    ]
    (tmp_path / "tiny-imagenet-200.zip").unlink()
    monkeypatch.setattr(module, "decode", None)
    again = kind(root=tmp_path, download=False)
    assert torch.equal(again.test.fetch(torch.arange(6)), images)
    # A stray write stays in memory.
    again.test.images[:] = 0  # type: ignore[attr-defined]
    assert torch.equal(kind(root=tmp_path, download=False).test.fetch(torch.arange(6)), images)


def test_grey_photographs(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("L", (64, 64), 77).save(file, "jpeg")
    files = {**tiny_files(), "val/images/val_0.JPEG": file.getvalue()}
    data = fake_tiny(tmp_path, files=files)(root=tmp_path, download=False)
    assert (data.test.fetch(torch.tensor([0])) == 77).all()


@pytest.mark.parametrize("packed", [True, False])
def test_boxes(tmp_path: Path, packed: bool) -> None:
    data = fake_tiny(tmp_path, packed=packed)(root=tmp_path, download=False)
    boxes = boxes_of(data.test)
    assert boxes is not None
    assert boxes.tolist() == [[i, i + 1, i + 20, 63] for i in range(6)]
    assert boxes_of(data.validation) is None


FILES = tiny_files()
NOTES = FILES["val/val_annotations.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train/n01/images/n01_3.JPEG": png((64, 64))[:80]},
            "n01_3.JPEG: not a valid image file",
        ),
        ({"train/n01/images/n01_3.JPEG": b""}, "n01_3.JPEG: not a valid image file"),
        ({"val/images/val_2.JPEG": png((64, 63))}, r"val_2.JPEG: expected 64x64 pixels, got \(63, 64\)"),
        ({"val/images/val_2.JPEG": None}, "cannot read val/images/val_2.JPEG"),
        ({"wnids.txt": None}, "cannot read wnids.txt"),
        ({"wnids.txt": b"n01\nn02"}, r"classes in wnids.txt; they differ in \['n03'\]"),
        ({"val/val_annotations.txt": NOTES.replace(b"n01", b"n77")}, "'n77'"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn01"}, "expected file, class, x1, y1, x2, y2"),
        ({"val/val_annotations.txt": NOTES.replace(b"63", b"64")}, r"annotations.txt: expected 0 <= x1 <= x2 < 64"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_broken(tmp_path: Path, changes: dict[str, bytes | None], message: str, packed: bool) -> None:
    files = {name: data for name, data in {**FILES, **changes}.items() if data is not None}
    data = fake_tiny(tmp_path, files=files, packed=packed)(root=tmp_path, download=False)
    with pytest.raises(DataError, match=message):
        _ = data.train
    # Nothing half decoded is left.
    assert not (tmp_path / "tinyimagenet").exists() or not list((tmp_path / "tinyimagenet").iterdir())


def test_broken_cache(tmp_path: Path) -> None:
    kind = fake_tiny(tmp_path)
    _ = kind(root=tmp_path, download=False).train
    path = tmp_path / "tinyimagenet" / "decoded" / "test.npy"
    for broken in (path, path.with_name("boxes.npy")):
        whole = broken.read_bytes()
        for content in (whole[:-1], whole[:50], b"", b"no array at all"):
            broken.write_bytes(content)
            with pytest.raises(DataError, match=rf"{broken.name}: .* delete .*decoded to decode again"):
                _ = kind(root=tmp_path, download=False).test
        broken.write_bytes(whole)
    np.save(path, np.zeros((3, 5), np.uint8))
    with pytest.raises(DataError, match="expected uint8 rows of 12289"):
        _ = kind(root=tmp_path, download=False).test
    path.with_name("classes.txt").unlink()
    with pytest.raises(DataError, match=r"classes.txt: cannot be read"):
        _ = kind(root=tmp_path, download=False).classes


def test_missing_wrong_or_no_zip(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tiny-imagenet-200.zip is missing"):
        _ = TinyImageNet(root=tmp_path, download=False).train
    kind = fake_tiny(tmp_path)
    with pytest.raises(DataError, match=r"tiny-imagenet-200.zip: expected md5 90528d7c"):
        _ = TinyImageNet(root=tmp_path).train
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"no zip")
    kind.archive = known(kind.archive, tmp_path / "tiny-imagenet-200.zip")
    with pytest.raises(DataError, match="expected a zip file"):
        _ = kind(root=tmp_path, download=False).train


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    kind = fake_tiny(tmp_path)
    (tmp_path / "tinyimagenet").write_bytes(b"in the way")
    with pytest.raises(DataError, match="cannot write the decoded images"):
        _ = kind(root=tmp_path, download=False).train
