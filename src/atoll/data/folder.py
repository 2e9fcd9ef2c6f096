"""ImageNet-style folders, streamed from disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.data.base import DATA, Data, Splits
from atoll.data.decode import decode
from atoll.data.voc import VocFolder
from atoll.errors import DataError, InputError

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"})


@dataclass(frozen=True)
class FolderSplit:
    """Image files that are decoded when they are fetched, so a split may be larger than memory."""

    files: tuple[str, ...]
    labels: Tensor
    resize: int  # length of the shorter side after scaling
    size: int  # side of the square that is cut out of the middle
    annotations: VocFolder | None = None

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, index: Tensor) -> Tensor:
        images = torch.empty(len(index), 3, self.size, self.size, dtype=torch.uint8)
        for place, number in enumerate(index.tolist()):
            file = self.files[number]
            images[place] = decode(Path(file), file, resize=self.resize, size=self.size)
        return images

    @cached_property
    def boxes(self) -> Tensor | None:
        """Read when they are first asked for: ImageNet has half a million of them."""
        if self.annotations is None:
            return None
        return self.annotations.boxes(self.files, self.labels, self.resize, self.size)


def check_sizes(resize: int, size: int) -> None:
    """Refuse a square that is larger than the image it is cut out of."""
    if not 1 <= size <= resize:
        raise InputError(f"size: expected between 1 and resize={resize} pixels, got {size}")


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))


@DATA.register()
class ImageFolder(Data):
    """One folder per class: ``root/train/CLASS/*.jpg``, and ``root/val`` (or ``root/test``) for testing.

    The layout of ImageNet (J. Deng et al., 2009).  Images become RGB, the shorter side is scaled to
    ``resize`` and the middle square of ``size`` pixels is cut out: the usual protocol for testing.

    Args:
        root: the folder.
        resize: length of the shorter side after scaling.
        size: side of the square that is cut out.
        boxes: folder of Pascal-VOC files that say where the objects are, such as ImageNet's ``Annotations/CLS-LOC``:
            for ``val/CLASS/1.jpg`` the first there is of ``val/CLASS/1.xml``, ``val/1.xml``, ``CLASS/1.xml`` and
            ``1.xml``.  Objects are named like their class (folder); the box of several is the one around them all.
        options: as for every data set.

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
        self, *, root: Path | str, resize: int = 256, size: int = 224, boxes: Path | str | None = None, **options: Any
    ) -> None:
        super().__init__(root=root, **options)
        check_sizes(resize, size)
        self.resize, self.size = resize, size
        self.boxes = Path(boxes).expanduser() if boxes is not None else None

    @cached_property
    def _parts(self) -> tuple[Path, Path]:
        """The folders for training and testing."""
        root = self.root or Path()
        test = root / "val" if (root / "val").is_dir() else root / "test"
        for folder in (root / "train", test):
            if not folder.is_dir():
                raise DataError(f"{root}: expected folders train and val (or test), got no {folder.name}")
        return root / "train", test

    @cached_property
    def classes(self) -> tuple[str, ...]:
        train, test = self._parts
        names = _subfolders(train)
        if not names:
            raise DataError(f"{train}: expected one folder per class, got none")
        if differ := sorted(set(names) ^ set(_subfolders(test))):
            raise DataError(f"{test}: expected the classes of {train}, got a difference in {', '.join(differ)}")
        return names

    def load(self) -> Splits:
        train, test = self._parts
        return Splits(self._split(train), self._split(test))

    def _split(self, folder: Path) -> FolderSplit:
        files: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            images = sorted(str(file) for file in (folder / name).rglob("*") if file.suffix.lower() in _SUFFIXES)
            if not images:
                raise DataError(f"{folder / name}: expected images ({', '.join(sorted(_SUFFIXES))}), got none")
            files += images
            labels += [label] * len(images)
        annotations = None if self.boxes is None else VocFolder(self.boxes, folder, self.classes)
        return FolderSplit(tuple(files), torch.tensor(labels), self.resize, self.size, annotations)
