"""Claims about handmade accuracies."""

from __future__ import annotations

import pytest

from atoll.studies import Cell, StudyResults
from atoll.studies.base import Numbers
from study_cases import STUDIES, outcomes

STUDY = STUDIES["centroid-mnist"]


def mnist(ours: list[float], theirs: list[float]) -> StudyResults:
    cells: dict[Cell, Numbers] = {}
    for row, values in (("GloRo, 1.58", theirs), ("Centroid, 1.58", ours)):
        for seed, value in enumerate(values):
            numbers = {"clean": 98.0, "VRA 0.3": 90.0, "ERA 0.3": 95.0, "VRA 1.58": value, "ERA 1.58": 80.0}
            cells[Cell(row, seed)] = numbers | {"curve": {"radius": [0.0, 1.0], "verified": [0.9, 0.5]}}
    return StudyResults("cpu", cells)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (mnist([70.0, 70.2, 70.1], [60.0, 60.3, 60.1]), ["supported", "supported"]),
        (mnist([60.0, 60.2, 60.1], [50.0, 50.3, 50.1]), ["supported", "contradicted"]),
        (mnist([60.0, 70.0, 64.0], [59.0, 69.5, 62.0]), ["inconclusive", "inconclusive"]),
        (mnist([50.0, 50.2, 50.1], [60.0, 60.3, 60.1]), ["contradicted", "contradicted"]),
        (mnist([70.0], [60.0]), ["not testable", "not testable"]),
        (mnist([], [60.0, 60.3]), ["not testable", "not testable"]),
        (mnist([70.0, 70.2, 70.1], []), ["not testable", "supported"]),
    ],
)
def test_claims(results: StudyResults, expected: list[str]) -> None:
    assert outcomes(STUDY, results) == expected
    assert STUDY.figures(results)
