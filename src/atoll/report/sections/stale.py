"""Results that no longer describe the weights of their run, apart from the others and with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Callout, Collapsible, Row, Section, TableBlock, Title
from atoll.report.run_summary import RunSummary
from atoll.report.sections.other import numbers
from atoll.report.text import flatten, plain

ORDER, KINDS = 70, ()


def section(runs: Sequence[RunSummary]) -> Section | None:
    blocks: list[Block] = []
    for run in runs:
        for result in run.results:
            if not result.stale:
                continue
            blocks.append(Title(f"{run.name}: {plain(result.kind)}", run=run.number))
            blocks.append(Callout("stale", "Stale", plain(result.stale), run.number))
            settings: list[Row] = [[name, value] for name, value in flatten(result.settings.to_json())]
            rows: list[Row] = [[name, value] for name, value in numbers(result).items()]
            blocks += [
                TableBlock(["", run.name], rows),
                Collapsible("Settings", [TableBlock(["", run.name], settings)]),
            ]
    return Section("stale", "Stale results", blocks) if blocks else None
