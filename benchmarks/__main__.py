"""`python -m benchmarks [NAME ...]`: print every ratio, and fail if one is past its limit."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Table

BENCHMARKS = ["training_step", "methods", "attacks", "autoattack", "curvature", "certify", "explain"]


def main(names: list[str]) -> int:
    console = Console(width=130)
    table = Table(title="Ratios, all from this run", title_justify="left")
    for column in ("what", "ratio", "limit", "held", "note"):
        table.add_column(column, justify="right" if column in ("ratio", "limit") else "left")
    past = 0
    for name in names or BENCHMARKS:
        for row in importlib.import_module(f"benchmarks.{name}").run():
            sign = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {row.limit:g}"
            console.print(f"{row.name}: {row.ratio:.3f}", style="dim")
            table.add_row(row.name, f"{row.ratio:.3f}", sign, "yes" if row.held else "NO", row.note)
            past += not row.held
    console.print(table)
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
