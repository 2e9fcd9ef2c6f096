"""Numbers with uncertainty: accuracies, estimates and sampled accuracies, all with 95 % intervals."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

NORMAL_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Accuracy:
    r"""A proportion of points with its 95 % Wilson interval.

    .. math:: \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4n^2}}{1 + z^2 / n}

    >>> Accuracy(90, 100)
    90.00 % [82.6, 94.5]
    """

    correct: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.total:
            raise InputError(f"accuracy: expected 0 <= correct <= total, got {self.correct} of {self.total}")

    @property
    def value(self) -> float:
        return self.correct / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval (Wilson, 1927)."""
        if not self.total:
            return math.nan, math.nan
        p, n, z2 = self.value, self.total, NORMAL_95**2
        center = p + z2 / (2 * n)
        half = NORMAL_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        low = 0.0 if not self.correct else (center - half) / (1 + z2 / n)
        high = 1.0 if self.correct == n else (center + half) / (1 + z2 / n)
        return low, high

    def __repr__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.2f} % [{100 * low:.1f}, {100 * high:.1f}]"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval), "correct": self.correct, "total": self.total}


def percent(accuracy: Accuracy | SampledAccuracy) -> str:
    """``87.50``, an accuracy in percent."""
    return f"{100 * accuracy.value:.2f}"


def percent_interval(accuracy: Accuracy | SampledAccuracy) -> list[str]:
    """The same, and its 95 % interval: ``84.2-90.3``."""
    low, high = accuracy.interval
    return [percent(accuracy), f"{100 * low:.1f}-{100 * high:.1f}"]


@dataclass(frozen=True)
class Estimate:
    """An estimated number with its standard error, which is 0 for exact numbers.

    A mean of squares is ``skewed``: when it is too small, so is its standard error, and a symmetric interval would lie
    below the true value too often.  The upper end of its interval is therefore computed on a logarithmic scale.
    ``freedom`` is the number of degrees of freedom of the standard error, for Student's t; None if it is large.

    >>> [round(end, 3) for end in Estimate(2.0, 0.1).interval]
    [1.804, 2.196]
    >>> [round(end, 3) for end in Estimate(2.0, 0.1, skewed=True).interval]
    [1.804, 2.206]
    >>> [round(end, 3) for end in Estimate(2.0, 0.1, freedom=4).interval]
    [1.722, 2.278]
    """

    value: float
    standard_error: float = 0.0
    skewed: bool = False
    freedom: float | None = None

    @staticmethod
    def mean_of(values: Tensor) -> Estimate:
        """Return the mean of independent values, ignoring NaN.

        >>> import torch
        >>> str(Estimate.mean_of(torch.tensor([1.0, 2.0, 3.0, math.nan])))
        '2.00 ± 0.58'
        """
        values = values[~values.isnan()].double()
        if not len(values):
            return Estimate(math.nan, math.nan)
        error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return Estimate(values.mean().item(), error)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        half = self._quantile * self.standard_error
        if self.skewed and 0 < half < 100 * self.value:  # beyond that the exponential overflows
            return self.value - half, self.value * math.exp(half / self.value)
        return self.value - half, self.value + half

    @property
    def _quantile(self) -> float:
        if self.freedom is None:
            return NORMAL_95
        from scipy.special import stdtrit  # slow to import

        return float(stdtrit(self.freedom, 0.975))

    @property
    def relative_error(self) -> float:
        """Standard error divided by the absolute value."""
        if not self.standard_error:
            return 0.0
        return self.standard_error / abs(self.value) if self.value else math.inf

    def __str__(self) -> str:
        """Format with two digits of the standard error, and the value to the same decimal place.

        >>> print(Estimate(346.6, 163.2), Estimate(0.0027058, 0.00051), Estimate(2.0), sep="; ")
        347 ± 163; 0.00271 ± 0.00051; 2
        """
        if not 1e-4 * abs(self.value) < self.standard_error < math.inf or self.standard_error < 1e-6:
            return f"{self.value:.4g}" + (f" ± {self.standard_error:.2g}" if self.standard_error else "")
        decimals = max(0, 1 - math.floor(math.log10(self.standard_error)))
        return f"{self.value:.{decimals}f} ± {self.standard_error:.{decimals}f}"

    def _repr_html_(self) -> str:
        """For notebooks, with its interval."""
        low, high = self.interval
        return f"{self} (95 %: {low:.4g} to {high:.4g})" if self.standard_error > 0 else str(self)

    def to_json(self) -> dict[str, Any]:
        numbers = {"value": self.value, "standard_error": self.standard_error, "skewed": self.skewed}
        plain = {name: None if math.isnan(number) else number for name, number in numbers.items()}
        interval = [None if math.isnan(end) else end for end in self.interval]
        return plain | {"freedom": self.freedom, "interval": interval}


@dataclass(frozen=True)
class SampledAccuracy:
    r"""An accuracy from a cheap check of all points and an expensive check of a random sample.

    The cheap check leaves M = ``remaining`` of ``total`` points.  The expensive check would reject K of these.  It ran
    on ``pilot`` points, which only decide how many more to draw, and on ``sampled`` others.  Both are drawn without
    replacement, so the number k of rejected points in the sample is hypergeometric, whatever the model.  The estimate

    .. math:: \frac{M - \hat K}{n}, \; \hat K = k_\mathrm{pilot} + (M - \mathrm{pilot}) \frac{k}{\mathrm{sampled}}

    of n = ``total`` points is unbiased.  The exact interval contains every K that neither one-sided test rejects at
    2.5 %.  It describes these points, not the distribution that they come from.

    Args:
        total: number of points.
        remaining: points that the cheap check left.
        sampled: points of the sample.
        rejected: points of the sample that the expensive check rejected.
        pilot: points of the pilot sample.
        pilot_rejected: points of the pilot sample that the expensive check rejected.

    >>> SampledAccuracy(total=10_000, remaining=5_500, sampled=400, rejected=4)
    54.45 % [53.6, 54.8]
    """

    total: int
    remaining: int
    sampled: int
    rejected: int
    pilot: int = 0
    pilot_rejected: int = 0

    def __post_init__(self) -> None:
        unknown = self.remaining - self.pilot
        fits = 0 <= self.pilot_rejected <= self.pilot and 0 <= self.rejected <= self.sampled <= unknown <= self.total
        if not fits or (unknown and not self.sampled):
            raise InputError(f"sampled accuracy: expected numbers that fit together, got {vars(self)}")

    @property
    def at_most(self) -> Accuracy:
        """The accuracy if the expensive check rejected no other points: an upper bound."""
        return Accuracy(self.remaining - self.pilot_rejected - self.rejected, self.total)

    @property
    def value(self) -> float:
        share = self.rejected / self.sampled if self.sampled else 0.0
        return (self.remaining - self.pilot_rejected - (self.remaining - self.pilot) * share) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % interval."""
        fewest, most = hypergeometric_interval(self.rejected, self.sampled, self.remaining - self.pilot)
        rest = self.remaining - self.pilot_rejected
        return (rest - most) / self.total, (rest - fewest) / self.total

    def p_value(self, share: float) -> float:
        """Probability of a sample like this or worse if the cheap check misses each point with this probability.

        >>> [round(SampledAccuracy(1000, 58, 50, rejected).p_value(0.01), 4) for rejected in (1, 4)]
        [0.395, 0.0016]
        """
        from scipy.stats import binom  # slow to import

        return float(binom.sf(self.rejected - 1, self.sampled, share))

    def __repr__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.2f} % [{100 * low:.1f}, {100 * high:.1f}]"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval), **vars(self)}


def hypergeometric_interval(count: int, drawn: int, population: int, alpha: float = 0.05) -> tuple[int, int]:
    r"""Exact confidence interval for the number of marked items in a finite population.

    It contains all K with :math:`P_K(X \ge \mathrm{count}) > \alpha / 2` and :math:`P_K(X \le \mathrm{count}) >
    \alpha / 2`, where X counts the marked items in a sample without replacement.

    >>> hypergeometric_interval(0, 10, 20), hypergeometric_interval(3, 20, 20)
    ((0, 4), (3, 3))
    """
    inside = range(count, population - (drawn - count) + 1)  # every K that is possible at all
    if len(inside) == 1:
        return count, count
    low = bisect_left(inside, True, key=lambda marked: _at_least(count, drawn, marked, population) > alpha / 2)
    above = bisect_left(inside, True, key=lambda marked: _at_most(count, drawn, marked, population) <= alpha / 2)
    return inside[low], inside[above - 1]


def _at_least(count: int, drawn: int, marked: int, population: int) -> float:
    """Probability that a sample without replacement has at least this many marked items."""
    from scipy.stats import hypergeom  # slow to import

    return float(hypergeom.sf(count - 1, population, marked, drawn))


def _at_most(count: int, drawn: int, marked: int, population: int) -> float:
    from scipy.stats import hypergeom

    return float(hypergeom.cdf(count, population, marked, drawn))
