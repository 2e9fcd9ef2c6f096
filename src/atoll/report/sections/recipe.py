"""The resolved recipes side by side, with differences marked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atoll.report.blocks import Paragraphs, Row, Section, TableCell
from atoll.report.compare import run_table
from atoll.report.run_summary import RunSummary
from atoll.report.text import flatten

ORDER, KINDS = 80, ()


def section(runs: Sequence[RunSummary]) -> Section:
    leaves = [{name: str(value) for name, value in flatten(run.run.recipe)} for run in runs]
    names = list(dict.fromkeys(name for recipe in leaves for name in recipe))
    parts = [re.split(r"[.\[]", name)[0] for name in names]
    names.sort(key=lambda name: parts.index(re.split(r"[.\[]", name)[0]))  # a value that only one run has, in its part
    rows: list[Row] = []
    marks = []
    for name in names:
        values = [recipe.get(name, "–") for recipe in leaves]
        differs = len(set(values)) > 1
        marks.append("different" if differs else "same")
        rows.append([name, *(TableCell(value, mark="different" if differs else "") for value in values)])
    table = run_table(runs, rows, marks=marks)
    if len(runs) == 1:
        return Section("recipe", "Recipe", [table])
    count = marks.count("different")
    text = f"{count} of {len(rows)} values differ and are marked." if count else "The recipes are identical."
    return Section("recipe", "Recipe", [Paragraphs([text]), table])
