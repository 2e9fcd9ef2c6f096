"""Claims about differences between rows, paired by seed, with confidence intervals for few seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.studies.base import Claim, Outcome, StudyResults

TOO_FEW = "at least two seeds of each row are needed"


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
    def of(values: Sequence[float]) -> Difference:
        from scipy.stats import t  # half a second to import

        middle = statistics.fmean(values) if values else math.nan
        if len(values) < 2:
            return Difference(middle, -math.inf, math.inf)
        half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        return Difference(middle, middle - half, middle + half)

    @property
    def negative(self) -> Difference:
        """The same with the opposite sign."""
        return Difference(-self.value, -self.high, -self.low)

    def text(self, digits: int = 2) -> str:
        """As text, with this many digits after the point."""
        if math.isnan(self.value):
            return "-"
        interval = f" [{self.low:.{digits}f}, {self.high:.{digits}f}]" if math.isfinite(self.low) else ""
        return f"{self.value:.{digits}f}{interval}"

    def __str__(self) -> str:
        """With two digits after the point, or more if the interval is short.

        >>> print(Difference(-0.0123, -0.0201, -0.0045))
        -0.0123 [-0.0201, -0.0045]
        """
        length = self.high - self.low
        return self.text(2 if not 0 < length < math.inf else min(6, max(2, 1 - math.floor(math.log10(length / 2)))))


def claim_above(claim: str, values: Mapping[str, Sequence[float]], limit: float = 0.0, *, sign: int = 1) -> Claim:
    """Whether the mean of each list of values, one per seed, is above a limit (``sign`` -1: below).

    Supported if every interval is on that side, in part if every mean is; it takes at least two seeds.

    >>> print(claim_above("It grows", {"a": [1.0, 1.1, 0.9], "b": [0.2, -0.1, 0.3]}))
    It grows: **supported in part**, a: 1.00 [0.75, 1.25]; b: 0.13 [-0.38, 0.65].
    """
    if min(map(len, values.values()), default=0) < 2:
        return Claim(claim, "not testable", TOO_FEW)
    differences = {name: Difference.of(each) for name, each in values.items()}
    message = "; ".join(f"{name}: {difference}" for name, difference in differences.items())
    # The end of each interval that is closer to the limit.
    ends = [d.low if sign > 0 else d.high for d in differences.values()]
    intervals = all(sign * (end - limit) > 0 for end in ends)
    means = all(sign * (d.value - limit) > 0 for d in differences.values())
    return Claim(claim, claim_outcome(intervals, means), message)


def claim_outcome(supported: bool, in_part: bool) -> Outcome:
    """The outcome of a claim that can be tested."""
    return "supported" if supported else "supported in part" if in_part else "contradicted"


def claim_increase(
    claim: str, results: StudyResults, pairs: Sequence[tuple[str, str]], name: str, limit: float = 0.0, *, sign: int = 1
) -> Claim:
    """Whether a number is higher (``sign`` -1: lower) by ``limit`` in the first row of each pair than in the second."""
    differences = {f"{first} against {second}": results.paired(first, second, name) for first, second in pairs}
    return claim_above(claim, differences, limit, sign=sign)


def claim_equivalent(claim: str, results: StudyResults, rows: Sequence[str], name: str, within: float) -> Claim:
    """Whether no two of some rows differ by more than ``within`` in either direction; each pair is listed once.

    >>> from atoll.studies.base import Cell
    >>> results = StudyResults("cpu", {Cell(r, seed): {"x": seed + (r == "c")} for r in "abc" for seed in range(3)})
    >>> [claim_equivalent("No difference", results, rows, "x", 0.5).outcome for rows in ("ab", "abc")]
    ['supported', 'contradicted']
    """
    pairs = list(itertools.combinations(rows, 2))
    sides = [
        claim_increase(claim, results, pairs, name, -within),
        claim_increase(claim, results, pairs, name, within, sign=-1),
    ]
    worst_first = ("not testable", "contradicted", "supported in part", "supported")
    return min(sides, key=lambda side: worst_first.index(side.outcome))


def claim_unanimous(claim: str, successes: int, cases: int, message: str) -> Claim:
    """Whether something is true in all cases; in part if it is in more than half of them.

    >>> claim_unanimous("It rains", 2, 3, "on Monday and Tuesday").outcome
    'supported in part'
    """
    return Claim(claim, claim_outcome(successes == cases, 2 * successes > cases), message)


def claim_at_least(claim: str, results: StudyResults, limits: Mapping[str, float], name: str) -> Claim:
    """Whether a number of each row is above a limit of its own, such as a published value."""
    means = {row: Difference.of(results.values(row, name)) for row in limits}
    if not means or any(math.isinf(mean.low) for mean in means.values()):
        return Claim(claim, "not testable", TOO_FEW)
    message = "; ".join(f"{row}: {mean} against {limits[row]:g}" for row, mean in means.items())
    intervals = all(mean.low > limits[row] for row, mean in means.items())
    return Claim(claim, claim_outcome(intervals, all(m.value > limits[row] for row, m in means.items())), message)
