"""Evidence for each property: what was measured, with what uncertainty, how to repeat it, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Code, Collapsible, Paragraphs, Row, Section, TableBlock, TableCell, Title
from atoll.report.compare import usual_checkpoint
from atoll.report.evidence import Evidence, Property, properties
from atoll.report.run_summary import RunSummary

ORDER, KINDS = 80, ("health",)
TEXT = (
    "This section lists what was measured, what the numbers do and do not show, and what was not measured. It is not a"
    " verdict, and it does not state compliance with any law or standard."
)


def section(runs: Sequence[RunSummary]) -> Section:
    blocks: list[Block] = [Paragraphs([TEXT])]
    for run in runs:
        inner = [block for each in properties(run) for block in _property(run, each)]
        note = f"{usual_checkpoint([run])} checkpoint"
        blocks += [Collapsible(run.name, inner)] if len(runs) > 1 else [Title(run.name, note, run.number), *inner]
    return Section("evidence", "Evidence", blocks)


def _property(run: RunSummary, item: Property) -> list[Block]:
    blocks: list[Block] = [Title(item.name, item.question)]
    if item.evidence:
        rows: list[Row] = [_row(each) for each in item.evidence]
        blocks.append(TableBlock(["", "value", "measured by", "what it shows"], rows))
        lines = list(dict.fromkeys(line for each in item.evidence for line in _repeat(each)))
        blocks.append(Collapsible("Repeat it", [Code(lines)]))
    else:
        blocks.append(Paragraphs(["Nothing was measured."]))
    rows = [[each.what, TableCell(each.command or "no command measures this")] for each in item.not_measured]
    blocks.append(TableBlock(["not measured", "command"], rows))
    return blocks


def _row(item: Evidence) -> Row:
    return [item.what, item.cell, TableCell(item.how, f"{item.points:,} {item.split} points"), item.uncertainty]


def _repeat(item: Evidence) -> list[str]:
    digests = f"model {item.subject}, points {item.inputs}" if item.subject else "digests not recorded"
    return [f"# {digests}, stored in {item.result}", item.command or "# no command"]
