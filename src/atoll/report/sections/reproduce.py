"""Where the numbers come from: commands that repeat them, and the environment of the training."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Code, Paragraphs, Section, Title
from atoll.report.commands import repeat, train_again
from atoll.report.compare import side_by_side
from atoll.report.run_summary import RunSummary
from atoll.report.text import plain

ORDER, KINDS = 90, ()


def section(runs: Sequence[RunSummary]) -> Section:
    text = "The same versions and seed give the same numbers, whatever the batch size and the number of processes."
    blocks: list[Block] = [Paragraphs([text])]
    for run in runs:
        current = [result for result in run.results if not result.stale]
        lines = [line for result in current if (line := repeat(run.folder, result))]
        lines = [*train_again(run.folder, run.environment), *dict.fromkeys(lines)]
        blocks += [Title(run.name, str(run.folder), run.number), Code(lines)]
    if table := side_by_side([(run, _environment(run)) for run in runs]):
        blocks += [Title("Environment of the training"), *table]
    return Section("reproduce", "Reproduce", blocks)


def _environment(run: RunSummary) -> dict[str, str]:
    return {plain(name): _value(value) for name, value in run.environment.items() if name != "command"}


def _value(value: object) -> str:
    return ", ".join(map(plain, value)) or "none" if isinstance(value, list) else plain(value)
