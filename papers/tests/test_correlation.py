"""Correlations compared with textbook formulas."""

import math

import numpy as np
import pytest

from atoll.errors import InputError
from atoll_papers.correlation import analyze, fit


def series(seed: int, n: int = 12):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=n)
    return x, 2 * x + draw.normal(size=n)


def test_fit_is_the_textbook():
    x, y = series(0)
    n, result = len(x), fit(x, y)
    r = np.corrcoef(x, y)[0, 1]
    slope, intercept = np.linalg.lstsq(np.stack([x, np.ones(n)], 1), y, rcond=None)[0]
    residual = y - slope * x - intercept
    error = math.sqrt(residual @ residual / (n - 2) / ((x - x.mean()) @ (x - x.mean())))
    assert (result.n, result.r, result.r_squared) == (n, pytest.approx(r), pytest.approx(r**2))
    assert (result.slope, result.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    assert 1 - residual @ residual / ((y - y.mean()) @ (y - y.mean())) == pytest.approx(result.r_squared)
    t_10 = 2.2281388519649385  # 97.5 % quantile of Student's t with 10 degrees of freedom, from a table
    assert result.slope_interval == (pytest.approx(slope - t_10 * error), pytest.approx(slope + t_10 * error))
    z, half = math.atanh(r), 1.959963984540054 / math.sqrt(n - 3)
    assert result.r_interval == (pytest.approx(math.tanh(z - half)), pytest.approx(math.tanh(z + half)))
    # The p-value against permutations.
    draw = np.random.default_rng(1)
    x, y = series(3)[0], np.random.default_rng(9).normal(size=12)
    shuffled = [abs(np.corrcoef(x, draw.permutation(y))[0, 1]) for _ in range(4000)]
    assert fit(x, y).p == pytest.approx(np.mean(np.array(shuffled) >= abs(np.corrcoef(x, y)[0, 1])), abs=0.04)


def test_intervals_of_the_slope_cover():
    inside = [low <= 2 <= high for low, high in (fit(*series(seed)).slope_interval for seed in range(300))]
    assert 0.91 < np.mean(inside) < 0.985


def test_analysis_within_across_and_over_seeds():
    both = {str(seed): series(seed, 5) for seed in range(4)}
    index, gap = ({seed: list(pair[k]) for seed, pair in both.items()} for k in (0, 1))
    result = analyze(index, gap)
    assert result.seeds == {seed: fit(*both[seed]) for seed in both}
    assert result.pooled == fit(np.concatenate(list(index.values())), np.concatenate(list(gap.values())))
    assert result.epochs[2] == fit([pair[0][2] for pair in both.values()], [pair[1][2] for pair in both.values()])
    assert result.pooled.n == 20
    two = {seed: index[seed] for seed in ("0", "1")}
    assert analyze(two, {seed: gap[seed] for seed in two}).epochs == ()


def test_degenerate_series():
    assert math.isnan(fit([1, 1, 1], [1, 2, 3]).r)
    assert fit([1, 2, 3], [1, 2, 4]).r_interval == (-1, 1)
    for x, y in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, math.nan], [1, 2, 3])):
        with pytest.raises(InputError, match="expected"):
            fit(x, y)
    for index, gap in (({}, {}), ({"0": [1, 2, 3]}, {"1": [1, 2, 3]}), ({"0": [1, 2, 3]}, {"0": [1, 2, 3, 4]})):
        with pytest.raises(InputError, match="expected"):
            analyze(index, gap)
