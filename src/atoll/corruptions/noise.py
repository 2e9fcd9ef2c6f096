"""Noise: Gaussian, shot and impulse."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from atoll.corruptions.base import CORRUPTIONS, Corruption
from atoll.rng import PointRNG


@CORRUPTIONS.register("gaussian_noise", own_name=False)
class AddedGaussianNoise(Corruption):
    """Gaussian noise, as in low light."""

    # standard deviation
    small = (0.04, 0.06, 0.08, 0.09, 0.10)
    medium = (0.04, 0.08, 0.12, 0.15, 0.18)
    large = (0.08, 0.12, 0.18, 0.26, 0.38)

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        deviation: float = self.parameters(x, severity)
        return x + deviation * streams.normal(*x.shape[1:], dtype=x.dtype)


@CORRUPTIONS.register("shot_noise", own_name=False)
class ShotNoise(Corruption):
    """Shot noise: the number of photons in each pixel follows a Poisson distribution."""

    # number of photons in a white pixel
    small = (500, 250, 100, 75, 50)
    medium = (250, 100, 50, 30, 15)
    large = (60, 25, 12, 5, 3)

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        photons = self.parameters(x, severity)
        level, uniform = (255 * x).round().numpy(), streams.uniform(*x.shape[1:], dtype=x.dtype).numpy()
        table = _poisson_table(photons)
        count = np.searchsorted(table.ravel(), level + uniform) - level * table.shape[1]
        return torch.from_numpy(count / photons)


@cache
def _poisson_table(photons: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Row k is k plus the distribution function of the counts at gray level k.

    The whole table is therefore sorted, and one search inverts the distribution functions of all pixels.
    """
    from scipy.special import pdtr  # slow to import

    most = int(photons + 12 * photons**0.5 + 20)  # more photons than that have a probability below 1e-15
    table = pdtr(np.arange(most), photons * np.arange(256)[:, None] / 255)
    table[:, -1] = 1.0
    return np.asarray(table + np.arange(256)[:, None])


@CORRUPTIONS.register("impulse_noise", own_name=False)
class ImpulseNoise(Corruption):
    """Impulse noise: replaces random values with black or white (salt and pepper)."""

    # share of the values that are replaced
    small = (0.01, 0.02, 0.03, 0.05, 0.07)
    medium = (0.01, 0.02, 0.05, 0.08, 0.14)
    large = (0.03, 0.06, 0.09, 0.17, 0.27)

    def apply(self, x: Tensor, severity: int, streams: PointRNG) -> Tensor:
        share = self.parameters(x, severity)
        uniform = streams.uniform(*x.shape[1:], dtype=x.dtype)
        return x.masked_fill(uniform < share, 0).masked_fill(uniform < share / 2, 1)
