"""Small data without a download, from scikit-learn: 8x8 digits and Two Moons."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.errors import check_range

_TRAIN_SEED, _TEST_SEED, _TEST_POINTS = 0, 1, 1000


@DATA.register()
class Digits(Data):
    """1797 handwritten digits of 8x8 pixels, a fifth of them for testing.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI repository.

    >>> data = Digits()
    >>> data.shape, data.num_classes, len(data.train), len(data.validation), len(data.test)
    ((1, 8, 8), 10, 1293, 144, 360)
    """

    classes = tuple("0123456789")

    def load(self) -> Splits:
        from sklearn.datasets import load_digits  # a second to import
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        # Pixels count from 0 to 16; as uint8 with 16 = 255 they are images like any other.
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        whole = MemorySplit(images, torch.from_numpy(labels.astype(np.int64)))
        # Nobody published a test set here, so this seed is one: it never changes.
        train, test = train_test_split(np.arange(len(whole)), test_size=0.2, random_state=0, stratify=labels)
        return Splits(whole.take(torch.from_numpy(np.sort(train))), whole.take(torch.from_numpy(np.sort(test))))


@DATA.register()
class TwoMoons(Data):
    """Points of two noisy half circles; the plane has no bounds, so neither have the inputs.

    ``make_moons`` of scikit-learn (Pedregosa et al., 2011).  The test set has 1000 points of its own.

    Args:
        n: number of training points, of which ``validation`` takes its share (0 keeps them all).
        noise: standard deviation of the noise.
        options: as for every data set.

    >>> data = TwoMoons(validation=0)
    >>> data.shape, len(data.train), len(data.test), data.bounds
    ((2,), 500, 1000, None)
    """

    bounds = None
    classes = ("upper", "lower")

    def __init__(self, *, n: int = 500, noise: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        check_range("[2, inf)", n=n)
        check_range("[0, inf)", noise=noise)
        self.n, self.noise = n, noise

    def _draw(self, count: int, seed: int) -> MemorySplit:
        from sklearn.datasets import make_moons  # a second to import

        points, labels = make_moons(count, noise=self.noise, random_state=seed)
        return MemorySplit(torch.from_numpy(points).float(), torch.from_numpy(labels).long())

    def load(self) -> Splits:
        return Splits(self._draw(self.n, _TRAIN_SEED), self._draw(_TEST_POINTS, _TEST_SEED))
