"""StudyReport of a study from numbers made by hand, for all of its cells or without some."""

from __future__ import annotations

from collections.abc import Callable

from atoll.studies import STUDIES as REGISTRY
from atoll.studies import Cell, Study, StudyResults
from atoll.studies.base import Numbers, Scale

STUDIES: dict[str, Study] = {name: member.cls() for name, member in REGISTRY.members().items()}


def made(
    study: Study,
    numbers: Callable[[Cell], Numbers],
    *,
    scale: Scale = "cpu",
    lost: Callable[[Cell], bool] = lambda cell: False,
) -> StudyResults:
    """What would have been found, had each cell these numbers, and had some been lost."""
    cells = study.cells(scale)
    kept = {cell: numbers(cell) for cell in cells if not lost(cell)}
    return StudyResults(scale, kept, {cell: "it was lost" for cell in cells if lost(cell)})


def outcomes(study: Study, results: StudyResults) -> list[str]:
    """Of all verdicts; tables and pictures have to be made as well, and say something of every row."""
    findings = study.report(results)
    assert all(table.markdown() and table.csv() for table in findings.tables.values())
    return [claim.outcome for claim in findings.claims]
