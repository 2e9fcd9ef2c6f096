"""Tiny-ImageNet: 200 classes of ImageNet at 64x64 pixels, decoded once on first use."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.boxes import as_boxes
from atoll.data.decode import decode
from atoll.data.download import Remote, find
from atoll.errors import DataError
from atoll.files import reserve, sync

_FOLDER = "tiny-imagenet-200"
_SIDE = 64
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Source:
    """The published files, in the zip file or unpacked; names are relative to ``tiny-imagenet-200``."""

    path: Path
    archive: zipfile.ZipFile | None = None

    def read(self, name: str) -> bytes:
        try:
            if self.archive is None:
                return (self.path / name).read_bytes()
            return self.archive.read(f"{_FOLDER}/{name}")
        except (OSError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{self.path}: cannot read {name}: {error}") from None

    def table(self, name: str) -> list[list[str]]:
        """Return the lines of a text file, split at tabs."""
        return [line.split("\t") for line in self.read(name).decode().splitlines() if line]

    @cached_property
    def train(self) -> dict[str, list[str]]:
        """The training files of each class, in order."""
        if self.archive is None:
            names = (file.relative_to(self.path).as_posix() for file in self.path.glob("train/*/images/*.JPEG"))
        else:
            names = (name.removeprefix(f"{_FOLDER}/") for name in self.archive.namelist())
        files: dict[str, list[str]] = {}
        for name in sorted(names):
            if name.startswith("train/") and name.endswith(".JPEG"):
                files.setdefault(name.split("/")[1], []).append(name)
        return files

    @cached_property
    def annotations(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """File, class and box of each validation image."""
        rows = self.table("val/val_annotations.txt")
        try:
            return [(f"val/images/{row[0]}", row[1], tuple(map(int, row[2:6]))) for row in rows if row[5]]
        except (IndexError, ValueError):
            raise DataError(
                f"{self.path}, val_annotations.txt: expected file, class, x1, y1, x2, y2 in each line"
            ) from None


@DATA.register()
class TinyImageNet(Data):
    """Tiny-ImageNet: 100,000 training and 10,000 test photos in 200 classes, 64x64 pixels.

    Y. Le and X. Yang, "Tiny ImageNet Visual Recognition Challenge" (2015).  Reads ``tiny-imagenet-200.zip`` (and
    verifies its checksum), or the unpacked folder.  The published test set has no labels, so the published validation
    set, which has bounding boxes, is the test set here.  On first use, all images are decoded into a folder ``decoded``
    of 1.4 GB, which is memory-mapped.

    >>> TinyImageNet(validation=0.05, download=False)
    TinyImageNet(download=False, validation=0.05)
    """

    archive: ClassVar[Remote] = Remote(
        f"{_FOLDER}.zip", "90528d7ca1a48142e341f4ef8d21d0de", (f"http://cs231n.stanford.edu/{_FOLDER}.zip",)
    )

    @cached_property
    def _decoded(self) -> Path:
        """The folder with ``train.npy``, ``test.npy``, ``boxes.npy`` and ``classes.txt``; created on first use."""
        place = self.folders[0] / "decoded"
        if not place.exists():
            unpacked = find([_FOLDER], self.folders)
            if unpacked is not None and unpacked.is_dir():
                _decode_all(_Source(unpacked), place)
            else:
                path = self._obtain(self.archive)
                with _open_zip(path) as archive:
                    _decode_all(_Source(path, archive), place)
        return place

    @cached_property
    def classes(self) -> tuple[str, ...]:
        path = self._decoded / "classes.txt"
        try:
            return tuple(path.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}; delete {path.parent} to decode again") from None

    def load(self) -> Splits:
        train, test = (_read_records(self._decoded / name) for name in ("train.npy", "test.npy"))
        path = self._decoded / "boxes.npy"
        boxes = as_boxes(_read_array(path), len(test), test.images.shape, str(path))
        return Splits(train, replace(test, boxes=boxes))


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected a zip file, got: {error}") from None


def _decode_all(source: _Source, place: Path) -> None:
    """Decode all images into a temporary folder, which is renamed when it is complete and on disk."""
    class_names = {row[0]: row[-1] for row in source.table("words.txt")}
    labels = {name: label for label, name in enumerate(sorted(row[0] for row in source.table("wnids.txt")))}
    train = [(file, name) for name, files in source.train.items() for file in files]
    test = [(file, name) for file, name, _ in source.annotations]
    boxes = np.array([box for _, _, box in source.annotations])
    as_boxes(boxes, len(test), (_SIDE, _SIDE), f"{source.path}, val_annotations.txt")
    if unknown := sorted({name for _, name in train + test} ^ labels.keys()):
        raise DataError(f"{source.path}: expected images of the classes in wnids.txt; they differ in {unknown}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".decoded.", dir=place.parent))
    except OSError as error:
        raise DataError(
            f"cannot write the decoded images to {place.parent}: {error.strerror}; choose a writable root"
        ) from None
    try:
        for name, files in (("train.npy", train), ("test.npy", test)):
            _write_records(source, [(file, labels[wnid]) for file, wnid in files], folder / name)
        np.save(folder / "boxes.npy", boxes)
        names = "\n".join(class_names.get(wnid, wnid) for wnid in labels)
        (folder / "classes.txt").write_text(names, encoding="utf-8")
        for file in (*folder.iterdir(), folder):
            sync(file)
        folder.chmod(0o755)  # temporary folders are private
        os.rename(folder, place)
        sync(place.parent)
    except OSError as error:
        if not place.exists():  # otherwise another process has written the same result
            raise DataError(f"cannot write the decoded images to {place}: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_records(source: _Source, files: Sequence[tuple[str, int]], path: Path) -> None:
    """Write one row of bytes per image, label first as in CIFAR, so that labels and pixels stay together."""
    records = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(files), 1 + _PIXELS))
    reserve(path, path.stat().st_size)

    def convert(row: int) -> None:
        name, label = files[row]
        image = decode(io.BytesIO(source.read(name)), f"{source.path}, {name}")
        if image.shape != (3, _SIDE, _SIDE):
            raise DataError(f"{source.path}, {name}: expected {_SIDE}x{_SIDE} pixels, got {tuple(image.shape[1:])}")
        records[row, 0] = label
        records[row, 1:] = image.flatten().numpy()

    with ThreadPoolExecutor() as pool:  # Pillow decodes without the interpreter lock
        for _ in pool.map(convert, range(len(files))):
            pass
    records.flush()


def _read_array(path: Path) -> NDArray[Any]:
    try:
        # Copy on write, because tensors have no read-only mode and accidental writes must not reach the file.
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged or truncated: {error}; delete {path.parent} to decode again") from None
    return array


def _read_records(path: Path) -> MemorySplit:
    records = _read_array(path)
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != 1 + _PIXELS:
        raise DataError(
            f"{path}: expected uint8 rows of {1 + _PIXELS}, got {records.dtype} {records.shape};"
            f" delete {path.parent} to decode again"
        )
    rows = torch.from_numpy(records)
    return MemorySplit(rows[:, 1:].view(-1, 3, _SIDE, _SIDE), rows[:, 0].long())
