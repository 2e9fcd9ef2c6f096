"""Small data sets from scikit-learn that need no download: 8x8 digits and Two Moons."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.errors import check_count, check_range

_TRAIN_SEED, _TEST_SEED, _TEST_POINTS = 0, 1, 1000


@DATA.register()
class Digits(Data):
    """Handwritten digits: 1,437 training and 360 test images, 8x8 pixels, without a download.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI repository.

    >>> data = Digits()
    >>> data.shape, data.num_classes, len(data.train), len(data.validation), len(data.test)
    ((1, 8, 8), 10, 1293, 144, 360)
    """

    classes = tuple("0123456789")

    def load(self) -> Splits:
        from sklearn.datasets import load_digits  # slow to import
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        # Scale pixel values from 0..16 to 0..255.
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        whole = MemorySplit(images, torch.from_numpy(labels.astype(np.int64)))
        # There is no published test set, so this seed defines it and must never change.
        train, test = train_test_split(np.arange(len(whole)), test_size=0.2, random_state=0, stratify=labels)
        return Splits(whole.take(torch.from_numpy(np.sort(train))), whole.take(torch.from_numpy(np.sort(test))))


@DATA.register()
class TwoMoons(Data):
    """Two Moons: points of two noisy half circles in the plane, without bounds.

    Uses ``make_moons`` of scikit-learn (Pedregosa et al., 2011).  The test set has 1,000 independent points.

    Args:
        n: number of training points, including those held out for ``validation``.
        noise: standard deviation of the noise.
        options: options of all data sets.

    >>> data = TwoMoons(validation=0)
    >>> data.shape, len(data.train), len(data.test), data.bounds
    ((2,), 500, 1000, None)
    """

    bounds = None
    classes = ("upper", "lower")

    def __init__(self, *, n: int = 500, noise: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        check_count(2, 10_000_000, n=n)
        check_range("[0, inf)", noise=noise)
        self.n, self.noise = n, noise

    def _draw(self, count: int, seed: int) -> MemorySplit:
        from sklearn.datasets import make_moons  # slow to import

        points, labels = make_moons(count, noise=self.noise, random_state=seed)
        return MemorySplit(torch.from_numpy(points).float(), torch.from_numpy(labels).long())

    def load(self) -> Splits:
        return Splits(self._draw(self.n, _TRAIN_SEED), self._draw(_TEST_POINTS, _TEST_SEED))
