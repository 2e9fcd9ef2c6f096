"""A subset of Fashion-MNIST that is part of the package, for demos and first steps without a download."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.decode import decode
from atoll.data.mnist import FashionMNIST

_SIDE = 28  # height and width of an image in pixels


def _read_sheet(name: str) -> Tensor:
    """Read the images of a contact sheet, row by row, as uint8 ``(N, 1, 28, 28)``."""
    with files("atoll.data").joinpath("fashion_mnist", name).open("rb") as file:
        sheet = decode(file, name)[0]  # grayscale, so the three channels are equal
    tiles = sheet.unfold(0, _SIDE, _SIDE).unfold(1, _SIDE, _SIDE)
    return tiles.reshape(-1, 1, _SIDE, _SIDE)


@DATA.register()
class FashionMNISTSmall(Data):
    """Subset of Fashion-MNIST without a download: 4,000 training and 1,000 test images, 28x28 pixels.

    Contains the first images of each class.  The classes alternate, so the first N points of a split are balanced.

    H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms" (2017); MIT license.

    >>> data = FashionMNISTSmall()
    >>> data.shape, len(data.train), len(data.validation), len(data.test), data.classes[int(data.test.labels[9])]
    ((1, 28, 28), 3600, 400, 1000, 'ankle boot')
    """

    classes = FashionMNIST.classes

    def load(self) -> Splits:
        return Splits(self._split("train-1.png", "train-2.png"), self._split("test.png"))

    def _split(self, *sheets: str) -> MemorySplit:
        images = torch.cat([_read_sheet(name) for name in sheets])
        return MemorySplit(images, torch.arange(len(images)) % self.num_classes)
