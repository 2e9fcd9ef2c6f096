"""`python -m benchmarks [NAME ...]`: print all ratios, and fail if one of them exceeds its limit."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Table

BENCHMARKS = [
    "training_step",
    "methods",
    "waits",
    "threads",
    "processes",
    "attacks",
    "autoattack",
    "curvature",
    "certify",
    "explain",
]


def main(names: list[str]) -> int:
    console = Console(width=130)
    table = Table(title="Ratios, all from this run", title_justify="left")
    for column in ("benchmark", "ratio", "limit", "passed", "note"):
        table.add_column(column, justify="right" if column in ("ratio", "limit") else "left")
    failures = 0
    for name in names or BENCHMARKS:
        for row in importlib.import_module(f"benchmarks.{name}").run():
            sign = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {row.limit:g}"
            console.print(f"{row.name}: {row.ratio:.3f}", style="dim")
            table.add_row(row.name, f"{row.ratio:.3f}", sign, "yes" if row.passed else "NO", row.note)
            failures += not row.passed
    console.print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
