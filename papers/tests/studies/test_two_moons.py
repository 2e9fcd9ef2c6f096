"""Claims about handmade traces."""

from __future__ import annotations

import pytest

from atoll.studies import Cell, StudyResults
from atoll_papers.studies.two_moons import PARTS, WHAT
from study_cases import STUDIES


def traces(top: float, full: float, failed: tuple[Cell, ...] = ()) -> StudyResults:
    """Traces after the last epoch; those without TrH are 100 and grow with the seed."""
    cells = STUDIES["trh-two-moons"].cells("cpu")
    ends = {"standard": 100.0, "top": top, "full": full}
    series = {cell: [0.0] * 7 + [ends[cell.row] + 30 * cell.seed] for cell in cells}
    numbers = {
        cell: {f"{part} {what}": each for part in PARTS for what in WHAT} | {"PGD-20": 90.0}
        for cell, each in series.items()
        if (cell.row, cell.seed) not in {(one.row, one.seed) for one in failed}
    }
    return StudyResults("cpu", numbers)


@pytest.mark.parametrize(
    ("top", "full", "expected"),
    [
        (42.0, 40.0, "supported"),
        (60.0, 40.0, "supported in part"),
        (110.0, 40.0, "contradicted"),
        (105.0, 110.0, "contradicted"),  # both raise it
        (90.0, 110.0, "supported"),
    ],
)
def test_nearly_as_well(top: float, full: float, expected: str) -> None:
    (claim,) = STUDIES["trh-two-moons"].claims(traces(top, full))
    assert claim.outcome == expected


def test_seeds_are_compared_with_themselves() -> None:
    results = traces(90.0, 40.0, failed=(Cell("top", 0), Cell("standard", 4)))
    (claim,) = STUDIES["trh-two-moons"].claims(results)
    assert "in 3 of 3 seeds" in claim.message
