"""Where the numbers come from: commands that repeat them, and the environment of the training."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Code, Paragraphs, Row, Section, TableBlock, Title
from atoll.report.commands import repeat, train_again
from atoll.report.run_summary import RunSummary
from atoll.report.text import plain

ORDER, KINDS = 90, ()


def section(runs: Sequence[RunSummary]) -> Section:
    text = "The same versions and the same seed give the same numbers, for any batch size and number of processes."
    blocks: list[Block] = [Paragraphs([text])]
    for run in runs:
        current = [result for result in run.results if not result.stale]
        lines = [line for result in current if (line := repeat(run.folder, result))]
        lines = [*train_again(run.folder, run.environment), *dict.fromkeys(lines)]
        blocks += [Title(run.name, str(run.folder), run.number), Code(lines)]
    names = list(dict.fromkeys(name for run in runs for name in run.environment if name != "command"))
    if names:
        rows: list[Row] = [[plain(name), *(_value(run.environment.get(name)) for run in runs)] for name in names]
        table = TableBlock(["", *(run.name for run in runs)], rows, [None, *(run.number for run in runs)])
        blocks += [Title("Environment of the training"), table]
    return Section("reproduce", "Reproduce", blocks)


def _value(value: object) -> str:
    return ", ".join(map(plain, value)) or "none" if isinstance(value, list) else plain(value)
