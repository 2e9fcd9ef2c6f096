"""Results that have no other section, such as the numbers of a study."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from atoll.measure import Result
from atoll.report.blocks import Block, Section, TableCell, Title
from atoll.report.compare import compare, notes
from atoll.report.run_summary import RunSummary
from atoll.report.text import flatten, plain

ORDER, KINDS = 60, ()
# A study compares its rows and seeds, so these are numbers of a cell, not conditions.
CELL = ("row", "cell_seed", "definition")


def section(runs: Sequence[RunSummary]) -> Section | None:
    from atoll.report.sections import MODULES

    shown = {kind for module in MODULES for kind in module.KINDS}
    comparisons = compare(
        runs,
        Result,
        _describe,
        named=("study", "scale"),
        ignore=_ignores,
        where=lambda result: result.kind not in shown,
    )
    blocks: list[Block] = notes(runs, "results")
    for comparison in comparisons:
        blocks += [Title(comparison.title), *comparison.table(numbers)]
    kinds = {result.kind for comparison in comparisons for _, result in comparison.results}
    return Section("other", "Study" if kinds == {"cell"} else "Other results", blocks) if blocks else None


def _describe(result: Result) -> str:
    if result.kind == "cell":
        parts = (getattr(result.settings, name, None) for name in ("study", "scale"))
        return f"Study {', '.join(plain(part) for part in parts if part)}"
    return plain(result.kind)


def _ignores(result: Result) -> tuple[str, ...]:
    return CELL if result.kind == "cell" else ()


def numbers(result: Result) -> dict[str, str | TableCell]:
    """All numbers of any result, by name."""
    common = {field.name for field in dataclasses.fields(Result)}
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in common}
    ignored = {name.replace("_", " "): getattr(result.settings, name, None) for name in _ignores(result)[:2]}
    leaves = flatten({**ignored, **fields})
    return {name.removeprefix("numbers."): value for name, value in leaves}
