"""Results of a study from handmade numbers, for all of its cells or without some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.studies import STUDIES as REGISTRY
from atoll.studies import Cell, Study, StudyResults
from atoll.studies.base import Numbers, Scale

STUDIES: dict[str, Study] = {name: member.cls() for name, member in REGISTRY.members().items()}
WIGGLE = (0.0, 0.3, -0.2)  # differences between seeds


def make_results(
    study: Study,
    numbers: Callable[[Cell], Numbers],
    *,
    scale: Scale = "cpu",
    failed: Callable[[Cell], bool] = lambda cell: False,
) -> StudyResults:
    """The results of a study whose cells have these numbers, and of which some failed."""
    cells = study.cells(scale)
    succeeded = {cell: numbers(cell) for cell in cells if not failed(cell)}
    return StudyResults(scale, succeeded, {cell: "it failed" for cell in cells if failed(cell)})


def results_of(vra: Mapping[str, float], scale: Scale = "cpu", seeds: int = 3) -> StudyResults:
    """Verified robust accuracy by row, with small differences between seeds."""
    return StudyResults(
        scale,
        {
            Cell(row, seed): {"clean": value + 20, "ERA": value + 10, "VRA": value + WIGGLE[seed]}
            for row, value in vra.items()
            for seed in range(seeds)
        },
    )


def outcomes(study: Study, results: StudyResults) -> list[str]:
    """Outcomes of all claims; tables, figures and notes have to work as well."""
    report = study.report(results)
    assert all(table.markdown() and table.csv() for table in report.tables.values())
    return [claim.outcome for claim in report.claims]
