"""One row of the benchmark table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of the table: a measured ratio and its upper (or lower) limit; None means that there is no limit."""

    name: str
    ratio: float
    limit: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def passed(self) -> bool:
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
