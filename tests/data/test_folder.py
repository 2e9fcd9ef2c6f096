"""Folders of images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data import Digits, FewerClasses, ImageFolder, Npz
from atoll.data.base import in_memory
from atoll.data.decode import decode
from atoll.data.fingerprint import Fingerprint
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
    (root / "train" / "ant" / "._0.png").write_text("what macOS leaves behind")
    assert (len(folder(root, validation=0).train), len(folder(root).test)) == (20, 6)


def test_narrow_images(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png((1, 200)))
    assert decode(tmp_path / "x.png", "x", resize=8, size=8).shape == (3, 8, 8)


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such folder; .* --data\.root PATH"):
        _ = folder(tmp_path / "none").train
    root = fake_folder(tmp_path / "a")
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match=r"expected folders train and val \(or test\), got no val \(or test\); add it"):
        _ = folder(root).classes
    (root / "train").rename(root / "val")
    with pytest.raises(DataError, match=r"expected folders train and val \(or test\), got no train; add it"):
        _ = folder(root).classes
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match="expected one folder per class, got none"):
        _ = folder(root).train
    with pytest.raises(InputError, match="root: expected a folder, got an empty string"):
        folder("")  # type: ignore[arg-type]


def test_classes_must_agree(tmp_path: Path) -> None:
    root = fake_folder(tmp_path)
    (root / "val" / "bee").rename(root / "val" / "wasp")
    with pytest.raises(DataError, match=r"val: expected the same classes as in .*train; they differ in bee, wasp"):
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
        with pytest.raises(DataError, match=r"x.jpg: not a valid image file"):
            decode(path, str(path))


def test_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "x.png").write_bytes(png((40, 30)))
    with pytest.raises(DataError, match="not a valid image file: Image size"):
        decode(tmp_path / "x.png", "x.png")


def test_sizes() -> None:
    with pytest.raises(InputError, match="size: expected 1 to 16 pixels"):
        ImageFolder(root="x", resize=16, size=17)


def photos(root: Path, count: int = 10, classes: tuple[str, ...] = ("cup", "fork", "plate")) -> Path:
    """What somebody has who took photos of products: one folder per class."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for photo in range(count):
            (root / name / f"IMG_{photo:04}.jpg").write_bytes(png((20, 16), 100 * number + photo, "jpeg"))
    return root


def names(data: ImageFolder, split: str) -> set[str]:
    files = getattr(data.load(), split).files
    return {Path(file).relative_to(data.root or "").as_posix() for file in files}


class TestFolderOfClasses:
    def test_split(self, tmp_path: Path) -> None:
        data = folder(photos(tmp_path / "photos"), validation=0.25)
        assert data.classes == ("cup", "fork", "plate")
        for split, count in (("train", 6), ("validation", 2), ("test", 2)):
            assert data.split(split).labels.tolist() == [0] * count + [1] * count + [2] * count
        assert not names(data, "train") & names(data, "test")
        (note,) = data.notes
        assert (
            "no train and val folders, so 6 of 30 images (20% of each class, chosen by file name) are the test set"
            in note
        )
        assert folder(fake_folder(tmp_path / "other")).notes == ()

    def test_the_split_follows_names_not_places(self, tmp_path: Path) -> None:
        one, other = photos(tmp_path / "one"), photos(tmp_path / "a" / "b" / "other")
        assert names(folder(one), "test") == names(folder(other), "test")
        assert names(folder(one), "test") == {
            "cup/IMG_0000.jpg", "cup/IMG_0008.jpg", "fork/IMG_0001.jpg", "fork/IMG_0005.jpg", "plate/IMG_0008.jpg",
            "plate/IMG_0009.jpg",
        }  # fmt: skip

    def test_a_new_photo_moves_at_most_one_other(self, tmp_path: Path) -> None:
        data = folder(photos(tmp_path, count=8))
        before = names(data, "test")
        for number in range(8, 30):
            shutil.copy(tmp_path / "cup" / "IMG_0000.jpg", tmp_path / "cup" / f"IMG_{number:04}.jpg")
            after = names(data, "test")
            moved = {name for name in before ^ after if name != f"cup/IMG_{number:04}.jpg"}
            assert len(moved) <= 1
            assert all(name.startswith("cup/") for name in moved)
            before = after

    @pytest.mark.parametrize(
        ("count", "share", "test"), [(2, 0.2, 1), (2, 0.9, 1), (3, 0.01, 1), (10, 0.5, 5), (4, 0.99, 3)]
    )
    def test_every_class_is_in_both_parts(self, tmp_path: Path, count: int, share: float, test: int) -> None:
        data = folder(photos(tmp_path, count=count), test_share=share, validation=0)
        assert (len(data.train), len(data.test)) == (3 * (count - test), 3 * test)

    def test_too_few(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cup: expected at least 2 images of each class, got 1"):
            _ = folder(photos(tmp_path / "a", count=1)).train
        with pytest.raises(DataError, match=r"cannot hold out 0.1 of the data for validation: .*data\.validation"):
            _ = folder(photos(tmp_path / "b", count=4)).train

    def test_classes_called_train_and_test(self, tmp_path: Path) -> None:
        data = folder(photos(tmp_path, classes=("plane", "test", "train")))
        assert data.classes == ("plane", "test", "train")


class TestInspect:
    def test_all_faults_at_once(self, tmp_path: Path) -> None:
        root = photos(tmp_path / "photos")
        whole = (root / "cup" / "IMG_0001.jpg").read_bytes()
        (root / "cup" / "IMG_0001.jpg").write_bytes(whole[: len(whole) // 2])
        (root / "fork" / "IMG_0002.jpg").write_bytes(b"")
        (root / "plate" / "IMG_0000.jpg").write_text("<html>404 Not Found</html>")
        with pytest.raises(DataError) as caught:
            folder(root).inspect()
        first, *faults = str(caught.value).split("\n  ")
        assert "3 of 30 images cannot be read; repair or remove them and try again:" in first
        assert [fault.partition(":")[0] for fault in sorted(faults)] == [
            "cup/IMG_0001.jpg", "fork/IMG_0002.jpg", "plate/IMG_0000.jpg",
        ]  # fmt: skip
        assert "fork/IMG_0002.jpg: empty file" in faults

    def test_many_faults(self, tmp_path: Path) -> None:
        root = photos(tmp_path)
        for file in root.glob("*/*.jpg"):
            file.write_bytes(b"")
        with pytest.raises(DataError, match="and 10 more") as caught:
            folder(root).inspect()
        assert str(caught.value).count("empty file") == 20

    def test_each_file_is_decoded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data, streamed = (folder(photos(tmp_path / name), validation=0) for name in "ab")
        data.inspect()
        assert in_memory(data.train)
        index = torch.tensor([5, 0, 7])
        assert torch.equal(data.train.fetch(index), streamed.train.fetch(index))
        monkeypatch.setattr("atoll.data.folder.decode", None)
        data.train.fetch(index)

    def test_large_folders_are_streamed_and_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("atoll.data.folder.CACHE_BYTES", 1000)
        root = photos(tmp_path)
        data = folder(root)
        known = data.inspect()
        assert not in_memory(data.train)
        (root / "cup" / "IMG_0003.jpg").write_bytes(png((20, 16), 999))
        decoded: list[str] = []
        monkeypatch.setattr(
            "atoll.data.folder.decode", lambda file, source, **_: decoded.append(source) or torch.zeros(3, 12, 12)
        )
        assert known.difference(folder(root).inspect(known)) == "edited: cup/IMG_0003.jpg"
        assert decoded == ["cup/IMG_0003.jpg"]

    def test_what_changed(self, tmp_path: Path) -> None:
        root = photos(tmp_path / "photos")
        before = folder(root).inspect()
        assert Fingerprint.from_json(json.loads(json.dumps(before.to_json()))) == before
        copied = shutil.copytree(root, tmp_path / "moved", copy_function=shutil.copyfile)  # other times of change
        assert before.difference(folder(copied).inspect(before)) == ""
        (root / "cup" / "IMG_0000.jpg").unlink()
        assert before.difference(folder(root).inspect(before)) == "deleted: cup/IMG_0000.jpg"
        (root / "cup" / "IMG_0001.jpg").rename(root / "fork" / "new.jpg")
        (root / "plate" / "IMG_0004.jpg").write_bytes(png((20, 16), 5))
        difference = before.difference(folder(root).inspect(before))
        assert difference == (
            "deleted: cup/IMG_0000.jpg, cup/IMG_0001.jpg; added: fork/new.jpg; edited: plate/IMG_0004.jpg"
        )

    def test_views_of_a_folder(self, tmp_path: Path) -> None:
        root = photos(tmp_path)
        data = FewerClasses(data=folder(root), count=2)
        before = data.inspect()
        assert in_memory(data.train)
        (root / "cup" / "IMG_0000.jpg").unlink()
        assert before.difference(FewerClasses(data=folder(root), count=2).inspect()) == "deleted: cup/IMG_0000.jpg"


def test_other_data_sets(tmp_path: Path) -> None:
    assert not Digits().inspect().difference(Digits(limit=5).inspect())  # the limit is part of the recipe
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    path = tmp_path / "x.npz"

    def fingerprint(count: int = 6, **change: np.ndarray) -> Fingerprint:
        arrays = {"x_train": x[:count], "y_train": y[:count], "x_test": x, "y_test": y, **change}
        np.savez(path, **arrays)
        np.savez(tmp_path / "extra.npz", image=arrays["x_test"], label=y)
        return Npz(path=path, validation=0, extra=tmp_path / "extra.npz").inspect()

    before = fingerprint()
    assert before.difference(fingerprint()) == ""
    assert before.difference(fingerprint(4)) == "training points: 6 before, 4 now"
    assert before.difference(fingerprint(y_test=1 - y)) == "different test points"
    assert before.difference(fingerprint(x_test=x + 1)) == "different extra points; different test points"
