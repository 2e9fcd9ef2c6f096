"""Two Moons: two interleaved half circles in the plane, for experiments one can look at."""

from __future__ import annotations

from typing import Any

import torch

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.errors import check_range

_TRAIN_SEED, _TEST_SEED, _TEST_POINTS = 0, 1, 1000


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
