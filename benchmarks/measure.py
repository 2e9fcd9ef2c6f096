"""One line of the table of ratios."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: a measured ratio and the most (or least) it may be, or None for a report."""

    name: str
    ratio: float
    limit: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def held(self) -> bool:
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
