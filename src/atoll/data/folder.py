"""Image files: splits that decode them when they are fetched, and folders with one subfolder per class."""

from __future__ import annotations

import hashlib
import io
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.data.base import DATA, Data, Splits
from atoll.data.decode import SUFFIXES, decode, image_files, system_reason
from atoll.data.fingerprint import FileRecord, Inspection
from atoll.data.voc import VocFolder
from atoll.errors import DataError, InputError, check_range

CACHE_BYTES = 1 << 30
"""Decoded images of a split stay in memory up to this size; larger splits are decoded again in every epoch."""


@dataclass(eq=False)
class FolderSplit:
    """A split of image files that are decoded when they are fetched, so that it may be larger than memory.

    ``inspect`` decodes all files once and keeps the images in memory if they fit.
    """

    files: tuple[str, ...]
    labels: Tensor
    resize: int  # length of the shorter side after resizing
    size: int  # side of the center crop
    annotations: VocFolder | None = None
    root: Path | None = None  # base of the relative paths in fingerprints
    lines: tuple[int, ...] | None = None  # where the files are listed, for messages
    cache: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, index: Tensor) -> Tensor:
        if self.cache is not None:
            return self.cache.index_select(0, index)
        images = self._empty(len(index))
        for place, number in enumerate(index.tolist()):
            file = self.files[number]
            images[place] = decode(Path(file), file, resize=self.resize, size=self.size)
        return images

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, 3, self.size, self.size, dtype=torch.uint8)

    def inspect(self, inspection: Inspection) -> str:
        """Read and decode every file once, and return a digest of names, labels and file contents."""
        fits = len(self) * 3 * self.size**2 <= CACHE_BYTES
        images = self._empty(len(self)) if fits else None
        names = [self._name(file) for file in self.files]

        def read(row: int) -> FileRecord | str:
            path, name = Path(self.files[row]), names[row]
            source = name if self.lines is None else f"line {self.lines[row]}, {name}"
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):  # reading a pipe would never end
                    return f"{source}: not a file"
                known = inspection.known.get(name)
                if images is None and known and (known.size, known.changed) == (status.st_size, status.st_mtime_ns):
                    return known
                content = path.read_bytes()
                image = decode(io.BytesIO(content), source, resize=self.resize, size=self.size)
            except OSError as error:
                return f"{source}: {system_reason(error)}"
            except DataError as error:
                return f"{source}: empty file" if not content else str(error)
            if images is not None:
                images[row] = image
            return FileRecord(status.st_size, status.st_mtime_ns, hashlib.sha256(content).hexdigest()[:16])

        digest = hashlib.sha256(f"{self.labels.tolist()}".encode())
        with ThreadPoolExecutor() as pool:  # Pillow decodes without the interpreter lock
            for name, record in zip(names, pool.map(read, range(len(self))), strict=True):
                if isinstance(record, str):
                    inspection.faults.append(record)
                else:
                    inspection.files[name] = record
                    digest.update(f"{name} {record.digest}\n".encode())
        if not inspection.faults:
            self.cache = images
        return digest.hexdigest()[:32]

    def _name(self, file: str) -> str:
        path = Path(file)
        inside = self.root is not None and path.is_relative_to(self.root)
        return path.relative_to(self.root).as_posix() if inside and self.root is not None else file

    @cached_property
    def boxes(self) -> Tensor | None:
        """Bounding boxes, read on first use because ImageNet has half a million of them."""
        if self.annotations is None:
            return None
        return self.annotations.boxes(self.files, self.labels, self.resize, self.size)


def check_sizes(resize: int, size: int) -> None:
    """Raise an InputError if the crop is larger than the resized image."""
    if not 1 <= size <= resize:
        raise InputError(f"size: expected 1 to {resize} pixels (the value of resize), got {size}")


def choose_rows(names: Sequence[str], share: float) -> list[int]:
    """Return which files of a class are in the test set: those whose names have the smallest hashes.

    >>> choose_rows(["a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"], 0.4)
    [0, 4]
    """
    count = min(max(round(share * len(names)), 1), len(names) - 1)
    order = sorted(range(len(names)), key=lambda row: hashlib.sha256(names[row].encode()).digest())
    return sorted(order[:count])


class ImageFiles(Data):
    """Base class of data sets of photos, which are converted to RGB, resized and cropped.

    Args:
        resize: length of the shorter side after resizing.
        size: side of the center crop.
        test_share: share of each class in the test set if the photos are not divided into training and test photos.
        options: options of all data sets.
    """

    resize: int

    def __init__(self, *, resize: int = 256, size: int = 224, test_share: float = 0.2, **options: Any) -> None:
        super().__init__(**options)
        check_sizes(resize, size)
        check_range("(0, 1)", test_share=test_share)
        self.resize, self.size, self.test_share = resize, size, test_share

    def read_image(self, file: Path, shape: tuple[int, ...], *, fit: bool = False) -> Tensor:
        return decode(file, str(file), resize=self.resize, size=self.size)

    def _split_note(self, reason: str) -> str:
        """How the photos were divided."""
        test, total = len(self._splits.test), len(self._splits.train) + len(self._splits.test)
        return (
            f"{reason}, so {test:,} of {total:,} images ({self.test_share:.0%} of each class, chosen by file name) are"
            " the test set"
        )


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))


@DATA.register()
class ImageFolder(ImageFiles):
    """One folder of images per class: ``root/CLASS/*.jpg``, or ``root/train/CLASS`` and ``root/val/CLASS``.

    With ``train`` and ``val`` (or ``test``), as in ImageNet (J. Deng et al., 2009), ``val`` is the test set.  Otherwise
    a share ``test_share`` of each class becomes the test set.  The file names determine the split, so it is the same on
    every machine, and adding a file moves at most one other file of its class.

    Images are converted to RGB, the shorter side is resized to ``resize``, and the center square of ``size`` pixels is
    cropped: the standard test protocol.

    Args:
        root: the folder.
        resize: length of the shorter side after resizing.
        size: side of the center crop.
        boxes: folder of bounding boxes in Pascal VOC files, such as ImageNet's ``Annotations/CLS-LOC``.  The box of
            ``val/CLASS/1.jpg`` is in the first existing file of ``val/CLASS/1.xml``, ``val/1.xml``, ``CLASS/1.xml`` and
            ``1.xml``.  Object names are class names (folders); several objects share one box around all of them.
        test_share: share of each class in the test set if there are no folders ``train`` and ``val``.
        options: options of all data sets.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
    ...         Path(root, name).mkdir(parents=True)
    ...         Image.new("RGB", (12, 10)).save(Path(root, name, "1.png"))
    ...     data = ImageFolder(root=root, resize=8, size=8, validation=0)
    ...     data.classes, data.shape
    (('cat', 'dog'), (3, 8, 8))
    """

    def __init__(
        self,
        *,
        root: Path | str,
        resize: int = 256,
        size: int = 224,
        boxes: Path | str | None = None,
        test_share: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(root=root, resize=resize, size=size, test_share=test_share, **options)
        self.boxes = Path(boxes).expanduser() if boxes is not None else None

    @cached_property
    def _parts(self) -> tuple[Path, Path] | None:
        """The folders for training and testing; None if the root contains one folder per class instead."""
        root = self.root or Path()
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; set the folder of images with --data.root PATH")
        parts = [root / name for name in ("train", "val", "test") if (root / name).is_dir()]
        if not any(map(_subfolders, parts)):  # no such folders, or classes with these names
            return None
        if len(parts) > 1 and parts[0].name == "train":
            return parts[0], parts[1]
        missing = "val (or test)" if parts[0].name == "train" else "train"
        raise DataError(
            f"{root}: expected folders train and val (or test), got no {missing}; add it, or put one folder per class"
            f" directly into {root} to split the images automatically"
        )

    @cached_property
    def classes(self) -> tuple[str, ...]:
        train, test = self._parts or (self.root or Path(),) * 2
        names = _subfolders(train)
        if not names:
            raise DataError(f"{train}: expected one folder per class, got none")
        if differ := sorted(set(names) ^ set(_subfolders(test))):
            raise DataError(f"{test}: expected the same classes as in {train}; they differ in {', '.join(differ)}")
        return names

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._parts is not None else (self._split_note(f"{self.root} has no train and val folders"),)

    def load(self) -> Splits:
        if self._parts is not None:
            train, test = ([self._images(part / name) for name in self.classes] for part in self._parts)
            return Splits(self._split(train, self._parts[0]), self._split(test, self._parts[1]))
        root = self.root or Path()
        classes = [self._images(root / name) for name in self.classes]
        test = [self._test_files(files) for files in classes]
        train = [sorted({*files} - {*test_files}) for files, test_files in zip(classes, test, strict=True)]
        return Splits(self._split(train, root), self._split(test, root))

    def _images(self, folder: Path) -> list[str]:
        images = sorted(map(str, image_files(folder)))
        if not images:
            raise DataError(f"{folder}: expected images ({', '.join(sorted(SUFFIXES))}), got none")
        return images

    def _test_files(self, files: list[str]) -> list[str]:
        """Return the test files of a class."""
        if len(files) < 2:
            raise DataError(f"{Path(files[0]).parent}: expected at least 2 images of each class, got 1")
        names = [Path(file).relative_to(self.root or Path()).as_posix() for file in files]
        return [files[row] for row in choose_rows(names, self.test_share)]

    def _split(self, classes: list[list[str]], folder: Path) -> FolderSplit:
        """Return a split of the files of each class; annotations are relative to ``folder``."""
        labels = torch.tensor([label for label, files in enumerate(classes) for _ in files])
        files = tuple(file for files in classes for file in files)
        annotations = None if self.boxes is None else VocFolder(self.boxes, folder, self.classes)
        return FolderSplit(files, labels, self.resize, self.size, annotations, self.root)
