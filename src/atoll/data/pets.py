"""The Oxford-IIIT Pet data set: breeds of cats and dogs, with boxes around their heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock
from torch import Tensor

from atoll.data.archive import unpack
from atoll.data.base import DATA, Data, Splits
from atoll.data.decode import decode
from atoll.data.download import Remote, find
from atoll.data.folder import FolderSplit, check_sizes
from atoll.data.voc import VocFolder
from atoll.errors import DataError


def _remote(name: str, md5: str) -> Remote:
    mirrors = ("https://www.robots.ox.ac.uk/~vgg/data/pets/data/", "https://thor.robots.ox.ac.uk/datasets/pets/")
    return Remote(name, md5, tuple(mirror + name for mirror in mirrors))


@DATA.register()
class OxfordPets(Data):
    """Oxford-IIIT Pet: 3,680 training and 3,669 test photos of 37 breeds of cats and dogs.

    O. Parkhi, A. Vedaldi, A. Zisserman and C. V. Jawahar, "Cats and Dogs" (2012).  Reads ``images.tar.gz`` and
    ``annotations.tar.gz`` (and verifies their checksums), or the unpacked folders ``images`` and ``annotations``.
    Images are resized and cropped as in ``ImageFolder``.  Boxes mark the head of the animal.  They are published only
    for the training images, so measure locality on the validation split.

    Args:
        resize: length of the shorter side after resizing.
        size: side of the center crop.
        options: options of all data sets.

    >>> OxfordPets(size=128, resize=144)
    OxfordPets(resize=144, size=128)
    """

    resize: int
    archives: ClassVar[dict[str, Remote]] = {
        "images": _remote("images.tar.gz", "5c4f3ee8e5d25df40f4fd59a7f44e54c"),
        "annotations": _remote("annotations.tar.gz", "95a8c909bbe2e81eed6a22bccdf3f68f"),
    }

    def __init__(self, *, resize: int = 256, size: int = 224, **options: Any) -> None:
        super().__init__(**options)
        check_sizes(resize, size)
        self.resize, self.size = resize, size

    def _folder(self, name: str) -> Path:
        """Return the unpacked content of an archive, which contains one folder of the same name."""
        folder = find([name], self.folders)
        if folder is None:
            archive = self._obtain(self.archives[name])
            folder = self.folders[0] / name
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(folder.with_name(f".{name}.lock")):  # only one of several processes unpacks
                    if not folder.exists():
                        unpack(archive, folder)
            except OSError as error:
                raise DataError(f"cannot write to {folder.parent}: {error.strerror or error}") from None
        return folder / name if (folder / name).is_dir() else folder

    @cached_property
    def _lists(self) -> dict[str, list[tuple[str, int]]]:
        """Name and class (starting at 1) of the images of each published part."""
        lists = {}
        for part in ("trainval", "test"):
            path = self._folder("annotations") / f"{part}.txt"
            try:
                rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
                lists[part] = [(row[0], int(row[1])) for row in rows if row and not row[0].startswith("#")]
            except (OSError, ValueError, IndexError) as error:
                raise DataError(f"{path}: expected an image and its class in each line, got: {error}") from None
        return lists

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The breeds, from file names such as ``Abyssinian_12``."""
        names = {label: name.rpartition("_")[0] for name, label in self._lists["trainval"]}
        if sorted(names) != list(range(1, len(names) + 1)):
            raise DataError(f"{self._folder('annotations')}: expected classes 1, 2, ... in trainval.txt, got others")
        return tuple(names[label] for label in sorted(names))

    def read_image(self, file: Path, shape: tuple[int, ...], *, fit: bool = False) -> Tensor:
        return decode(file, str(file), resize=self.resize, size=self.size)

    def load(self) -> Splits:
        images, heads = self._folder("images"), self._folder("annotations") / "xmls"
        parts = {}
        for part, rows in self._lists.items():
            files = tuple(str(images / f"{name}.jpg") for name, _ in rows)
            labels = torch.tensor([label - 1 for _, label in rows], dtype=torch.int64)
            parts[part] = FolderSplit(files, labels, self.resize, self.size)
        return Splits(replace(parts["trainval"], annotations=VocFolder(heads, images, origin=1)), parts["test"])
