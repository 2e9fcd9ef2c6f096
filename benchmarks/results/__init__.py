"""Results that are kept in docs/results, each with the command that makes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from atoll.curvature import Estimate


def mean(values: Sequence[float]) -> Estimate:
    """Over seeds, with its standard error."""
    return Estimate(statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)))
