"""Accuracies with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accuracy:
    """A share of points, with how far it can be trusted.

    ``standard_error`` is sqrt(0.25 / n), the largest a share of n points can have (as the papers report it);
    ``interval`` is the 95 % Wilson interval.

    >>> Accuracy(90, 100)
    90.00 % ± 5.00
    """

    correct: int
    total: int

    @property
    def value(self) -> float:
        return self.correct / self.total if self.total else math.nan

    @property
    def standard_error(self) -> float:
        return math.sqrt(0.25 / self.total) if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        from scipy.stats import binomtest  # half a second to import, for reports only

        low, high = binomtest(self.correct, self.total).proportion_ci(0.95, method="wilson")
        return float(low), float(high)

    def __repr__(self) -> str:
        return f"{100 * self.value:.2f} % ± {100 * self.standard_error:.2f}"

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "interval": list(self.interval),
            "correct": self.correct,
            "total": self.total,
        }
