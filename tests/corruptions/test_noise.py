"""Noise against its distribution."""

import numpy as np
import pytest
import torch
from scipy import stats

from atoll.corruptions import corrupt
from atoll.corruptions.noise import _poisson_table


def test_gaussian_noise_has_its_standard_deviation():
    x = torch.full((40, 3, 32, 32), 128 / 255)
    for severity, deviation in ((1, 0.04), (5, 0.10)):
        noise = (corrupt(x, "gaussian_noise", severity) - x).double() + 0.5 / 255  # it was rounded down
        assert noise.mean().abs() < 5 * deviation / x.numel() ** 0.5
        assert noise.std().item() == pytest.approx(deviation, rel=0.01)
        # The quantiles, not only the moments.
        inside = (noise.abs() < deviation).double().mean().item()
        assert inside == pytest.approx(stats.norm.cdf(1) - stats.norm.cdf(-1), abs=0.02)


@pytest.mark.parametrize("photons", [3, 60, 500])
def test_the_table_inverts_the_poisson_distribution(photons):
    table = _poisson_table(photons)
    assert (np.diff(table.ravel()) >= 0).all()
    uniform = np.random.default_rng(0).uniform(size=2000)
    for level in (0, 1, 77, 255):
        count = np.searchsorted(table.ravel(), level + uniform) - level * table.shape[1]
        expected = stats.poisson.ppf(uniform, photons * level / 255)
        assert (count == expected).all()


def test_shot_noise_is_poisson():
    level, photons = 100, 50  # severity 5
    x = torch.full((30, 1, 32, 32), level / 255)
    result = (255 * corrupt(x, "shot_noise", 5)).round()
    counts = torch.ceil(result * photons / 255)  # gray levels are rounded down
    observed = [(counts == k).sum().item() for k in range(photons)]
    expected = stats.poisson.pmf(range(photons), photons * level / 255) * x.numel()
    often = expected > 20
    deviations = (np.array(observed) - expected)[often] / expected[often] ** 0.5
    assert abs(deviations).max() < 5


def test_impulse_noise_is_half_black_and_half_white_and_leaves_the_rest():
    x = torch.full((20, 3, 32, 32), 29 / 255)  # 29 / 255 * 255 is less than 29 in float64
    result = corrupt(x, "impulse_noise", 5)
    black, white, same = ((result == value).double().mean().item() for value in (0, 1, 29 / 255))
    assert black + white + same == pytest.approx(1)
    deviation = (0.035 / x.numel()) ** 0.5
    assert abs(black - 0.035) < 5 * deviation
    assert abs(white - 0.035) < 5 * deviation
    assert not torch.equal(result[:, 0], result[:, 1])  # channels by themselves
