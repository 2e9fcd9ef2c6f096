"""CIFAR-10 and CIFAR-100, read from the binary version.

The Python version is a pickle and is not supported, because unpickling can run arbitrary code.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.download import Remote, find
from atoll.errors import DataError

_PIXELS = 3 * 32 * 32
_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


def _remote(name: str, md5: str) -> Remote:
    return Remote(name, md5, (f"https://www.cs.toronto.edu/~kriz/{name}", f"https://cave.cs.toronto.edu/kriz/{name}"))


def _read_members(archive: Path, names: list[str]) -> dict[str, bytes]:
    """Read files from a ``.tar.gz`` archive in one pass, without unpacking it."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                if member.name not in names:
                    continue
                content = tar.extractfile(member) if member.isreg() and member.name not in files else None
                if content is None:
                    raise DataError(f"{archive}: expected one regular file {member.name}, got something else")
                files[member.name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive}: damaged or truncated: {error}") from None
    if missing := sorted(set(names) - files.keys()):
        raise DataError(f"{archive}: expected the files {', '.join(names)}; missing: {', '.join(missing)}")
    return files


@DATA.register()
class CIFAR10(Data):
    """CIFAR-10: 50,000 training and 10,000 test photos in 10 classes, 32x32 pixels.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).  Reads ``cifar-10-binary.tar.gz``
    (and verifies its checksum), or the unpacked ``.bin`` files (and verifies their structure).

    >>> CIFAR10().classes[0], CIFAR10(limit=100)
    ('airplane', CIFAR10(limit=100))
    """

    classes: ClassVar[tuple[str, ...]] = tuple(_TEN.split())
    archive: ClassVar[Remote] = _remote("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
    folder: ClassVar[str] = "cifar-10-batches-bin"
    train_files: ClassVar[dict[str, int]] = {f"data_batch_{i}.bin": 10000 for i in range(1, 6)}
    test_files: ClassVar[dict[str, int]] = {"test_batch.bin": 10000}
    # A record consists of labels, of which the last one is used, then red, green and blue, row by row.
    label_bytes: ClassVar[int] = 1
    refused: ClassVar[tuple[str, ...]] = ("cifar-10-python.tar.gz", "cifar-10-batches-py")

    def load(self) -> Splits:
        names = [*self.train_files, *self.test_files]
        content = self._unpacked(names) or self._archived(names)
        return Splits(self._split(content, self.train_files), self._split(content, self.test_files))

    def _unpacked(self, names: list[str]) -> dict[str, tuple[str, bytes]] | None:
        for place in (place for folder in self.folders for place in (folder / self.folder, folder)):
            if all((place / name).is_file() for name in names):
                return {name: (str(place / name), (place / name).read_bytes()) for name in names}
        return None

    def _archived(self, names: list[str]) -> dict[str, tuple[str, bytes]]:
        pickled = find(self.refused, self.folders)
        if pickled and not self.download and not find([self.archive.name], self.folders):
            raise DataError(
                f"{pickled}: the Python version is not supported, because it is a pickle, which can run arbitrary code;"
                f" put {self.archive.name} into {self.folders[0]} instead"
            )
        path = self._obtain(self.archive)
        members = _read_members(path, [f"{self.folder}/{name}" for name in names])
        return {name: (f"{path}, {name}", members[f"{self.folder}/{name}"]) for name in names}

    def _split(self, content: dict[str, tuple[str, bytes]], files: dict[str, int]) -> MemorySplit:
        record = self.label_bytes + _PIXELS
        parts = []
        for name, count in files.items():
            source, data = content[name]
            size = count * record
            if len(data) != size:
                raise DataError(f"{source}: expected {size} bytes, {count} records of {record}, got {len(data)}")
            parts.append(np.frombuffer(data, np.uint8).reshape(count, record))
        records = torch.from_numpy(np.concatenate(parts))
        images = records[:, self.label_bytes :].reshape(-1, 3, 32, 32).contiguous()
        return MemorySplit(images, records[:, self.label_bytes - 1].long())


@DATA.register()
class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 training and 10,000 test photos in 100 (fine) classes, 32x32 pixels.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

    >>> CIFAR100().num_classes, CIFAR100().classes[-1]
    (100, 'worm')
    """

    classes = tuple(_FINE.split())
    archive = _remote("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")
    folder = "cifar-100-binary"
    train_files: ClassVar[dict[str, int]] = {"train.bin": 50000}
    test_files: ClassVar[dict[str, int]] = {"test.bin": 10000}
    label_bytes = 2  # the coarse label, then the fine one
    refused = ("cifar-100-python.tar.gz", "cifar-100-python")
