"""A part of Fashion-MNIST that comes with the package, for demos and first steps without a download."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.decode import decode
from atoll.data.mnist import FashionMNIST

_SIDE = 28  # pixels of an image


def _read_sheet(name: str) -> Tensor:
    """The images of a sheet, row by row: uint8 ``(N, 1, 28, 28)``."""
    with files("atoll.data").joinpath("fashion_mnist", name).open("rb") as file:
        sheet = decode(file, name)[0]  # gray, so the three channels are the same
    tiles = sheet.unfold(0, _SIDE, _SIDE).unfold(1, _SIDE, _SIDE)
    return tiles.reshape(-1, 1, _SIDE, _SIDE)


@DATA.register()
class FashionMNISTSmall(Data):
    """4,000 and 1,000 pictures of clothes, 28x28 pixels, without a download: the first of each class of Fashion-MNIST.

    H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms" (2017); MIT license.  The classes take turns, so the first points of a split are balanced.

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
