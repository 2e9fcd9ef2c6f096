"""Differences between rows, seed by seed, with intervals for few seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.studies.base import Claim, Found

TOO_FEW = "that takes two seeds of each row at least"


@dataclass(frozen=True)
class Difference:
    """A mean with its 95 % interval (Student's t); the interval is infinite if there is one value only.

    >>> str(Difference.of([1.0, 2.0, 3.0]))
    '2.00 [-0.48, 4.48]'
    """

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Difference:
        from scipy.stats import t  # half a second to import

        middle = statistics.fmean(values) if values else math.nan
        if len(values) < 2:
            return Difference(middle, -math.inf, math.inf)
        half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        return Difference(middle, middle - half, middle + half)

    @property
    def negative(self) -> Difference:
        """The same with the other sign."""
        return Difference(-self.value, -self.high, -self.low)

    def text(self, digits: int = 2) -> str:
        """In words, with so many digits after the point."""
        if math.isnan(self.value):
            return "-"
        interval = f" [{self.low:.{digits}f}, {self.high:.{digits}f}]" if math.isfinite(self.low) else ""
        return f"{self.value:.{digits}f}{interval}"

    def __str__(self) -> str:
        """With two digits after the point, or more where the interval is that short.

        >>> print(Difference(-0.0123, -0.0201, -0.0045))
        -0.0123 [-0.0201, -0.0045]
        """
        length = self.high - self.low
        return self.text(2 if not 0 < length < math.inf else min(6, max(2, 1 - math.floor(math.log10(length / 2)))))


def above(claim: str, values: Mapping[str, Sequence[float]], limit: float = 0.0, *, sign: int = 1) -> Claim:
    """Whether all means are above a limit (``sign`` -1: below), each of some values, one per seed.

    It held if every interval is on that side, in part if every mean is; two seeds are the least to tell.

    >>> print(above("It grows", {"a": [1.0, 1.1, 0.9], "b": [0.2, -0.1, 0.3]}))
    It grows: **held in part**, a: 1.00 [0.75, 1.25]; b: 0.13 [-0.38, 0.65].
    """
    if min(map(len, values.values()), default=0) < 2:
        return Claim(claim, "not testable", TOO_FEW)
    differences = {name: Difference.of(each) for name, each in values.items()}
    words = "; ".join(f"{name}: {difference}" for name, difference in differences.items())
    nearer = [d.low if sign > 0 else d.high for d in differences.values()]  # the end of the interval towards the limit
    if all(sign * (end - limit) > 0 for end in nearer):
        return Claim(claim, "held", words)
    means = all(sign * (d.value - limit) > 0 for d in differences.values())
    return Claim(claim, "held in part" if means else "did not hold", words)


def claim_increase(
    claim: str, found: Found, pairs: Sequence[tuple[str, str]], name: str, limit: float = 0.0, *, sign: int = 1
) -> Claim:
    """Whether a number is higher (``sign`` -1: lower) by ``limit`` in the first row of each pair than in the second."""
    apart = {f"{first} against {second}": found.paired(first, second, name) for first, second in pairs}
    return above(claim, apart, limit, sign=sign)


def claim_equivalent(claim: str, found: Found, rows: Sequence[str], name: str, within: float) -> Claim:
    """Whether no two of some rows differ by more than ``within``, to either side; each pair is told once.

    >>> from atoll.studies.base import Cell
    >>> found = Found("cpu", {Cell(row, seed): {"x": seed + (row == "c")} for row in "abc" for seed in range(3)})
    >>> [claim_equivalent("No difference", found, rows, "x", 0.5).outcome for rows in ("ab", "abc")]
    ['held', 'did not hold']
    """
    pairs = list(itertools.combinations(rows, 2))
    sides = [
        claim_increase(claim, found, pairs, name, -within),
        claim_increase(claim, found, pairs, name, within, sign=-1),
    ]
    worst = ("not testable", "did not hold", "held in part", "held")
    return min(sides, key=lambda side: worst.index(side.outcome))


def claim_unanimous(claim: str, good: int, of: int, words: str) -> Claim:
    """Whether something was found in all cases; in part, if it was in more than half of them.

    >>> claim_unanimous("It rains", 2, 3, "on Monday and Tuesday").outcome
    'held in part'
    """
    return Claim(claim, "held" if good == of else "held in part" if 2 * good > of else "did not hold", words)


def exceeds(claim: str, found: Found, least: Mapping[str, float], name: str) -> Claim:
    """Whether a number of every row is above a published one: held if every interval is, in part if every mean is."""
    means = {row: Difference.of(found.values(row, name)) for row in least}
    if not means or any(math.isinf(mean.low) for mean in means.values()):
        return Claim(claim, "not testable", TOO_FEW)
    words = "; ".join(f"{row}: {mean} against {least[row]:g}" for row, mean in means.items())
    if all(mean.low > least[row] for row, mean in means.items()):
        return Claim(claim, "held", words)
    above = all(mean.value > least[row] for row, mean in means.items())
    return Claim(claim, "held in part" if above else "did not hold", words)
