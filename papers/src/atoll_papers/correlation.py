"""Correlation of an index with the robust generalization gap: regression, p-values, intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from atoll.errors import InputError


@dataclass(frozen=True)
class Fit:
    """Pearson correlation and regression line of one series on another, from n pairs.

    Intervals are at level 95 %, from Fisher's z for r and from Student's t for the slope.  The p-value of the
    correlation is valid if the pairs are independent.
    """

    n: int
    r: float
    r_interval: tuple[float, float]
    p: float
    slope: float
    slope_interval: tuple[float, float]
    intercept: float
    r_squared: float


@dataclass(frozen=True)
class Analysis:
    """Correlation within each seed, over all seeds, and across seeds at each epoch.

    Epochs of one run are not independent, so the p-values for single seeds and for all seeds are too small.  The
    p-values across seeds are valid, but large for few seeds.
    """

    seeds: dict[str, Fit]
    pooled: Fit
    epochs: tuple[Fit, ...]


def fit(index: ArrayLike, gap: ArrayLike) -> Fit:
    """Correlation and regression of a gap on an index.

    >>> line = fit([1, 2, 3, 4], [2.1, 3.9, 6.2, 7.8])
    >>> round(line.slope, 2), round(line.r_squared, 3), line.p < 0.01
    (1.94, 0.996, True)
    """
    from scipy.stats import linregress, pearsonr, t  # slow to import

    x, y = np.asarray(index, dtype=np.float64), np.asarray(gap, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise InputError(f"expected two series of the same length, at least 3, got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("expected finite numbers, got NaN or infinity")
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # the correlation is not defined
        both = (math.nan, math.nan)
        return Fit(len(x), math.nan, both, math.nan, math.nan, both, math.nan, math.nan)
    correlation, line = pearsonr(x, y), linregress(x, y)
    # With three pairs, Fisher's z has no finite variance.
    low, high = correlation.confidence_interval(0.95) if len(x) > 3 else (-1.0, 1.0)
    half = float(t.ppf(0.975, len(x) - 2)) * float(line.stderr)
    slope, r = float(line.slope), float(correlation.statistic)
    return Fit(
        n=len(x),
        r=r,
        r_interval=(float(low), float(high)),
        p=float(correlation.pvalue),
        slope=slope,
        slope_interval=(slope - half, slope + half),
        intercept=float(line.intercept),
        r_squared=r**2,
    )


def analyze(index: Mapping[str, Sequence[float]], gap: Mapping[str, Sequence[float]]) -> Analysis:
    """All correlations of an index with a gap; both are series over the same epochs, by seed.

    >>> index = {"0": [1, 2, 3, 4], "1": [2, 3, 4, 6], "2": [1, 3, 4, 5]}
    >>> analysis = analyze(index, {seed: [0.1 * value for value in values] for seed, values in index.items()})
    >>> round(analysis.pooled.slope, 6), len(analysis.seeds), len(analysis.epochs)
    (0.1, 3, 4)
    """
    if not index or index.keys() != gap.keys():
        raise InputError(f"expected the same seeds for index and gap, got {sorted(index)} and {sorted(gap)}")
    if len({len(values) for values in (*index.values(), *gap.values())}) > 1:
        raise InputError("expected the same number of epochs for every seed")
    x, y = (np.array([series[seed] for seed in index], dtype=np.float64) for series in (index, gap))
    return Analysis(
        seeds={seed: fit(*both) for seed, *both in zip(index, x, y, strict=True)},
        pooled=fit(x.ravel(), y.ravel()),
        # A correlation across seeds needs at least three of them.
        epochs=tuple(fit(*both) for both in zip(x.T, y.T, strict=True)) if len(index) >= 3 else (),
    )
