"""Whether an index and the robust generalization gap go together: correlations, regression, p-values, intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from atoll.errors import InputError


@dataclass(frozen=True)
class Fit:
    """Pearson correlation and regression line of one series on another.

    Args:
        n: pairs.
        r: correlation.
        r_interval: its 95 % interval (Fisher's z).
        p: probability of one so large without any correlation, if the pairs are independent.
        slope: of the regression line.
        slope_interval: its 95 % interval (Student's t).
        intercept: of the line.
        r_squared: share of the variance that the line explains.
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
    """Correlation within each seed, over all of them, and across seeds at each epoch.

    Epochs of one run are not independent, so p-values of seeds and of the pool look better than they are; those across
    seeds are honest, and few seeds make them large.
    """

    seeds: dict[str, Fit]
    pooled: Fit
    epochs: tuple[Fit, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fit(index: ArrayLike, gap: ArrayLike) -> Fit:
    """Correlation and regression of a gap on an index.

    >>> line = fit([1, 2, 3, 4], [2.1, 3.9, 6.2, 7.8])
    >>> round(line.slope, 2), round(line.r_squared, 3), line.p < 0.01
    (1.94, 0.996, True)
    """
    from scipy.stats import linregress, pearsonr, t  # slow to import

    x, y = np.asarray(index, dtype=np.float64), np.asarray(gap, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise InputError(f"expected two series of one length, at least 3, got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("expected finite numbers, got NaN or infinity")
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # no correlation is defined
        both = (math.nan, math.nan)
        return Fit(len(x), math.nan, both, math.nan, math.nan, both, math.nan, math.nan)
    correlation, line = pearsonr(x, y), linregress(x, y)
    # With three pairs Fisher's z has no variance, and the interval says nothing.
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


def analyse(index: Mapping[str, Sequence[float]], gap: Mapping[str, Sequence[float]]) -> Analysis:
    """All correlations of an index with a gap, each given per seed as a series over the same epochs.

    >>> index = {"0": [1, 2, 3, 4], "1": [2, 3, 4, 6], "2": [1, 3, 4, 5]}
    >>> found = analyse(index, {seed: [0.1 * value for value in values] for seed, values in index.items()})
    >>> round(found.pooled.slope, 6), len(found.seeds), len(found.epochs)
    (0.1, 3, 4)
    """
    if not index or index.keys() != gap.keys():
        raise InputError(f"expected the same seeds for both, got {sorted(index)} and {sorted(gap)}")
    if len({len(values) for values in (*index.values(), *gap.values())}) > 1:
        raise InputError("expected as many epochs for every seed")
    x, y = (np.array([series[seed] for seed in index], dtype=np.float64) for series in (index, gap))
    return Analysis(
        seeds={seed: fit(*both) for seed, *both in zip(index, x, y, strict=True)},
        pooled=fit(x.ravel(), y.ravel()),
        # Across fewer than three seeds there is nothing to correlate.
        epochs=tuple(fit(*both) for both in zip(x.T, y.T, strict=True)) if len(index) >= 3 else (),
    )
