"""Results that no longer describe the weights of their run, apart from the others and with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Callout, Collapsible, Section, TableBlock, Title
from atoll.report.run_summary import RunSummary
from atoll.report.sections.other import numbers
from atoll.report.text import flatten, plain

ORDER, KINDS = 70, ()


def section(runs: Sequence[RunSummary]) -> Section | None:
    blocks: list[Block] = []
    stale = [(run, result) for run in runs for result in run.results if result.stale]
    for run, result in stale:
        settings = TableBlock(["", run.name], flatten(result.settings.to_json()))
        blocks += [
            Title(f"{run.name}: {plain(result.kind)}", run=run.number),
            Callout("stale", "Stale", plain(result.stale), run.number),
            TableBlock(["", run.name], list(numbers(result).items())),
            Collapsible("Settings", [settings]),
        ]
    return Section("stale", "Stale results", blocks) if blocks else None
