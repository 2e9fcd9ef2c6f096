"""Estimate a robust accuracy from a sample: a cheap cascade on all points, an expensive suite on some that remain."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from atoll.attacks.base import Attack
from atoll.attacks.diagnostics import EvaluationWarning
from atoll.errors import check_range
from atoll.rng import PointRNG
from atoll.stats import SampledAccuracy, hypergeometric_interval

CASCADE_COST = 0.03  # of the passes that the verifying suite needs on all points, at most
SMALLEST = 100  # points to sample in any case unless the budget is small: fewer say little
PILOT = 50
EXPLAINED = 0.01  # share of the remaining points that a healthy cascade may miss ...
SIGNIFICANT = 0.01  # ... and the p-value below which it misses more


@dataclass(frozen=True)
class Sampling:
    """How to check the points that a cascade leaves.

    The size of the sample follows from ``width`` if it is given, otherwise from ``budget``.

    Args:
        verify: the attacks to check with, such as the suite ``standard``.
        budget: passes of cascade and sample, as a share of those that ``verify`` needs on all points.  At least 100
            points are sampled, or ``1000 * budget`` if that is less.
        width: full width of the 95 % interval to aim for, in percentage points.  A pilot sample estimates how many
            points the cascade misses.
        escalate: check all remaining points if the sample shows that the cascade misses many.
    """

    verify: Mapping[str, Attack]
    budget: float = 0.1
    width: float | None = None
    escalate: bool = False

    def __post_init__(self) -> None:
        check_range("(0, 1]", budget=self.budget)
        check_range("(0, 100]", width=self.width)

    def pilot(self, remaining: int) -> int:
        """Points of the pilot sample."""
        return 0 if self.width is None else min(PILOT, remaining)

    def size(self, total: int, remaining: int, pilot: int = 0, rejected: int = 0) -> int:
        """Points to sample after the pilot.

        >>> Sampling({}, budget=0.1).size(10_000, 5_500), Sampling({}, width=1.5).size(10_000, 5_500, 50, 0)
        (385, 284)
        """
        unknown = remaining - pilot
        if self.width is None:
            smallest = min(SMALLEST, math.ceil(1000 * self.budget))
            return min(unknown, max(smallest, round((self.budget - CASCADE_COST) * remaining)))
        expected = (rejected + 0.5) / (pilot + 1)

        def narrow(size: int) -> bool:
            fewest, most = hypergeometric_interval(round(expected * size), size, unknown)
            return 100 * (most - fewest) <= self.width * total  # type: ignore[operator]

        return bisect_left(range(1, unknown), True, key=narrow) + 1 if unknown else 0

    @staticmethod
    def order(index: Tensor, seed: object) -> Tensor:
        """Points in random order, which depends on the seed and their indices only."""
        return index[PointRNG(seed, "sample", index=index).bits().argsort()]


def diagnose_sample(estimate: SampledAccuracy, escalated: bool = False) -> Iterator[EvaluationWarning]:
    """A warning if the sample rejects more points than a healthy cascade would miss."""
    p_value = estimate.p_value(EXPLAINED)
    if p_value >= SIGNIFICANT:
        return
    chance = f"p = {p_value:.1g}" if p_value > 1e-16 else "p < 1e-16"
    message = (
        f"the full attacks broke {estimate.rejected} of {estimate.sampled} sampled points that the quick attacks left"
        f" ({chance} if these miss {100 * EXPLAINED:.0f} % of the points); gradients may be masked;"
    )
    advice = "all points were checked" if escalated else "use --escalate to check all points"
    yield EvaluationWarning("quick attacks miss points", f"{message} {advice}")
