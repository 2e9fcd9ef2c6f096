"""The top of the page: warnings, the main numbers of all runs in one table, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Cell, Row, Table
from atoll.report.run_summary import RunSummary
from atoll.report.sections import MODULES
from atoll.report.text import plain


def summarize(runs: Sequence[RunSummary]) -> list[Block]:
    rows: list[Row] = [["Training", *map(_training, runs)]]
    for module in MODULES:
        rows += module.summary_rows(runs) if hasattr(module, "summary_rows") else []
    # Warnings first: readers should know before they read a number that cannot be trusted.
    warnings = [warning for run in runs for warning in run.warnings]
    missing = [gap for run in runs for gap in run.missing]
    return [*warnings, Table(["", *(run.name for run in runs)], rows, [None, *(run.number for run in runs)]), *missing]


def _training(run: RunSummary) -> Cell:
    parts = [run.recipe_value(part, "class_path") for part in ("loss", "model", "data")]
    names = ", ".join(plain(part).rpartition(".")[2] for part in parts if part)
    threat = f"{plain(run.recipe_value('threat', 'norm'))} {plain(run.recipe_value('threat', 'eps'))}"
    finished = run.run.is_finished
    epochs = f"{len(run.epochs)} of {plain(run.recipe_value('trainer', 'epochs'))} epochs"
    note = f"threat {threat}; {epochs}{'' if finished else ', not finished'}"
    return Cell(names, note, "" if finished else "warning")
