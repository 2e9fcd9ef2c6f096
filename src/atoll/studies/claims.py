"""Claims about means over seeds: supported, contradicted or inconclusive, decided by confidence intervals.

A claim states limits for a mean, such as the difference of two rows, paired by seed.  With its 95 % interval
(Student's t), the claim is

- supported if the interval is within the limits,
- contradicted if the interval is outside the limits,
- inconclusive otherwise.  The message then says how many seeds would decide, if mean and standard deviation do not
  change.

"No effect" is the claim that a mean is within a margin around 0, so it requires an interval within the margin (an
equivalence test, TOST at 2.5 %), not just an interval that contains 0.

A claim about several means is supported if each of them supports it.  This needs no correction, because all tests must
succeed (intersection-union test).  It is contradicted if any of k means contradicts it.  With more means, this is more
likely to happen by chance, so it requires the interval at level 1 - 0.05 / k (Bonferroni).

The smallest detectable effect of a claim is half the length of its longest 95 % interval: a mean closer to the limit
would have been inconclusive.

Intervals are over seeds (weights, order of the data).  All seeds share their test points, whose sampling error is not
part of the intervals.  Both rows of a pair share it, so it matters less for differences than for accuracies.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from atoll.studies.base import Claim, Outcome, StudyResults

TOO_FEW = "at least two seeds of each row are needed"
ALPHA = 0.05  # one minus the level of the intervals
MOST_SEEDS = 1000  # largest number of seeds to report
UNDECIDED: Outcome = "inconclusive"

Limits = tuple[float, float]
MOST: Limits = (0.5, math.inf)  # limits of the share of cases for "most cases"
T = TypeVar("T")


@dataclass(frozen=True)
class Difference:
    """A mean with its 95 % confidence interval (Student's t), which is infinite for a single value.

    >>> str(Difference.of([1.0, 2.0, 3.0]))
    '2.00 [-0.48, 4.48]'
    """

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float], alpha: float = ALPHA) -> Difference:
        """Return the mean of values with its interval at level 1 - ``alpha``."""
        from scipy.stats import t  # slow to import

        middle = statistics.fmean(values) if values else math.nan
        if len(values) < 2:
            return Difference(middle, -math.inf, math.inf)
        half = float(t.ppf(1 - alpha / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        return Difference(middle, middle - half, middle + half)

    def outcome(self, limits: Limits) -> Outcome:
        """Return whether the interval is within limits, outside of them, or neither.

        >>> [Difference(1.0, 0.5, 1.5).outcome(limits) for limits in ((0, 2), (1, 2), (2, math.inf))]
        ['supported', 'inconclusive', 'contradicted']
        """
        low, high = limits
        if low < self.low and self.high < high:
            return "supported"
        return "contradicted" if self.high <= low or self.low >= high else UNDECIDED

    def text(self, digits: int = 2) -> str:
        """Format with a number of digits after the decimal point."""
        if math.isnan(self.value):
            return "-"
        interval = f" [{self.low:.{digits}f}, {self.high:.{digits}f}]" if math.isfinite(self.low) else ""
        return f"{self.value:.{digits}f}{interval}"

    def __str__(self) -> str:
        """Format with two digits after the decimal point, or more if the interval is short.

        >>> print(Difference(-0.0123, -0.0201, -0.0045))
        -0.0123 [-0.0201, -0.0045]
        """
        length = self.high - self.low
        return self.text(2 if not 0 < length < math.inf else min(6, max(2, 1 - math.floor(math.log10(length / 2)))))


def claim_means(claim: str, values: Mapping[str, Sequence[float]], limits: Mapping[str, Limits]) -> Claim:
    """Check that the mean of each list of values, one per seed, is within limits, as described in the module.

    >>> values = {"a": [1.0, 1.1, 0.9], "b": [0.2, -0.1, 0.3]}
    >>> print(claim_means("They grow", values, {"a": (0.0, math.inf), "b": (0.0, math.inf)}))
    They grow: **inconclusive**, a: 1.00 [0.75, 1.25]; b: 0.13 [-0.38, 0.65]; smallest detectable effect 0.52; 12 \
seeds would decide.
    """
    if min(map(len, values.values()), default=0) < 2:
        return Claim(claim, "not testable", TOO_FEW)
    if undefined := [name for name, each in values.items() if any(map(math.isnan, each))]:
        return Claim(claim, "not testable", f"some numbers are undefined: {', '.join(undefined)}")
    intervals = {name: Difference.of(each) for name, each in values.items()}
    wide = {name: Difference.of(each, ALPHA / len(values)) for name, each in values.items()}
    outcome = UNDECIDED
    if all(intervals[name].outcome(limits[name]) == "supported" for name in values):
        outcome = "supported"
    elif any(wide[name].outcome(limits[name]) == "contradicted" for name in values):
        outcome = "contradicted"
    message = "; ".join(f"{name}: {each}" for name, each in intervals.items())
    if outcome == UNDECIDED and any(intervals[name].outcome(limits[name]) == "contradicted" for name in values):
        level = 100 * (1 - ALPHA / len(values))
        message += f"; to contradict, one of {len(values)} needs an interval of {level:.3g} % outside"
    return _finish(
        Claim(claim, outcome, message),
        max((each.high - each.low) / 2 for each in intervals.values()),
        lambda: _seeds_needed(values, limits),
    )


def _finish(claim: Claim, effect: float, seeds: Callable[[], int | None]) -> Claim:
    """Add the smallest detectable effect to a claim and, if inconclusive, the number of seeds that would decide."""
    message = f"{claim.message}; smallest detectable effect {effect:.2g}"
    if claim.outcome != UNDECIDED:
        return replace(claim, message=message, smallest_effect=effect)
    needed = seeds()
    text = f"{needed} seeds" if needed is not None else f"more than {MOST_SEEDS} seeds"
    return replace(claim, message=f"{message}; {text} would decide", smallest_effect=effect, seeds_needed=needed)


def _seeds_needed(values: Mapping[str, Sequence[float]], limits: Mapping[str, Limits]) -> int | None:
    """Return the number of seeds that would decide, if means and deviations do not change; None if too many."""
    means = {name: statistics.fmean(each) for name, each in values.items()}
    outside = [name for name, mean in means.items() if not limits[name][0] < mean < limits[name][1]]
    alpha = ALPHA / len(values) if outside else ALPHA
    needed = []
    for name in outside or values:
        distance = min(abs(means[name] - limit) for limit in limits[name])
        needed.append(_seeds_for(distance, statistics.stdev(values[name]), alpha))
    number = min(needed) if outside else max(needed)
    return int(number) if number <= MOST_SEEDS else None


def _seeds_for(distance: float, deviation: float, alpha: float) -> float:
    """Return the smallest number of seeds for which half an interval is shorter than a distance.

    >>> _seeds_for(1.0, 1.0, 0.05)  # 2.45 / sqrt(7) = 0.92, but 2.57 / sqrt(6) = 1.05
    7
    """
    from scipy.stats import t  # slow to import

    n = np.arange(2, MOST_SEEDS + 1)
    enough = t.ppf(1 - alpha / 2, n - 1) * deviation / np.sqrt(n) < distance
    return int(n[enough.argmax()]) if enough.any() else math.inf


def claim_above(claim: str, values: Mapping[str, Sequence[float]], limit: float = 0.0, *, sign: int = 1) -> Claim:
    """Check that the mean of each list of values, one per seed, is above a limit (``sign`` -1: below)."""
    limits = (limit, math.inf) if sign > 0 else (-math.inf, limit)
    return claim_means(claim, values, dict.fromkeys(values, limits))


def claim_increase(
    claim: str, results: StudyResults, pairs: Sequence[tuple[str, str]], name: str, limit: float = 0.0, *, sign: int = 1
) -> Claim:
    """Check that a number is higher (``sign`` -1: lower) by ``limit`` in the first row of each pair than in the second.

    Differences are paired by seed, because runs with the same seed share all random numbers.
    """
    differences = {f"{first} against {second}": results.paired(first, second, name) for first, second in pairs}
    return claim_above(claim, differences, limit, sign=sign)


def claim_equivalent(claim: str, results: StudyResults, rows: Sequence[str], name: str, within: float) -> Claim:
    """Check that no two of the rows differ by more than ``within`` in either direction; each pair is listed once.

    >>> from atoll.studies.base import Cell
    >>> results = StudyResults("cpu", {Cell(r, seed): {"x": seed + (r == "c")} for r in "abc" for seed in range(3)})
    >>> [claim_equivalent("No difference", results, rows, "x", 0.5).outcome for rows in ("ab", "abc")]
    ['supported', 'contradicted']
    """
    pairs = itertools.combinations(rows, 2)
    differences = {f"{first} against {second}": results.paired(first, second, name) for first, second in pairs}
    return claim_means(claim, differences, dict.fromkeys(differences, (-within, within)))


def claim_at_least(claim: str, results: StudyResults, limits: Mapping[str, float], name: str) -> Claim:
    """Check that a number of each row is above its own limit, such as a published value."""
    values = {f"{row} (limit {limit:g})": results.values(row, name) for row, limit in limits.items()}
    return claim_means(claim, values, dict(zip(values, ((limit, math.inf) for limit in limits.values()), strict=True)))


def claim_share(claim: str, successes: int, cases: int, message: str) -> Claim:
    """Check that something is true in more than half of all cases, by the exact interval of Clopper and Pearson.

    Some cases cannot support a claim about all cases, so this is a claim about most cases, with their number.

    >>> [claim_share("It rains", days, 6, "in May").outcome for days in (6, 4, 0)]
    ['supported', 'inconclusive', 'contradicted']
    """
    if cases < 2:
        return Claim(claim, "not testable", TOO_FEW)

    def seeds() -> int | None:
        from scipy.stats import binom

        n = np.arange(cases + 1, MOST_SEEDS + 1)
        fewer = min(successes, cases - successes) * n / cases
        # The interval excludes one half if the smaller tail is below 2.5 %; rounded up to be conservative.
        enough = binom.cdf(np.ceil(fewer), n, 0.5) < ALPHA / 2
        return int(n[enough.argmax()]) if enough.any() else None

    share = _share(successes, cases)
    text = f"{message}; {successes} of {cases} cases, a share of {share}"
    return _finish(Claim(claim, share.outcome(MOST), text), (share.high - share.low) / 2, seeds)


def _share(successes: int, cases: int) -> Difference:
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(successes, cases).proportion_ci(1 - ALPHA, method="exact")
    return Difference(successes / cases, float(interval.low), float(interval.high))


def pseudo_values(statistic: Callable[[Sequence[T]], float], cases: Sequence[T]) -> list[float]:
    r"""Return jackknife pseudo-values (Tukey, 1958), one per case.

    .. math:: n\, s - (n - 1)\, s_{-i}

    Their mean is a statistic of all cases, without its bias of order 1/n.  They turn a statistic such as a
    correlation over runs into a claim about a mean.

    >>> pseudo_values(statistics.fmean, [1.0, 2.0, 6.0])
    [1.0, 2.0, 6.0]
    """
    n, value = len(cases), statistic(cases)
    return [n * value - (n - 1) * statistic([*cases[:i], *cases[i + 1 :]]) for i in range(n)]
