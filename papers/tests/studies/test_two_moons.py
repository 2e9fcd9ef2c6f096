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
    wiggle = {cell: (cell.row == "top") * (cell.seed - 2) for cell in cells}
    series = {cell: [0.0] * 7 + [ends[cell.row] + 30 * cell.seed + wiggle[cell]] for cell in cells}
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
        (46.5, 40.0, "inconclusive"),  # near the limit of 46, and seeds differ
        (60.0, 40.0, "contradicted"),
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
    reductions = [100 * (1 - (90 + 30 * s + s - 2) / (100 + 30 * s)) for s in (1, 2, 3)]
    assert f"reduction by top, % of standard: {sum(reductions) / 3:.2f} [" in claim.message
