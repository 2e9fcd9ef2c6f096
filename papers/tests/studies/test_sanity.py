"""Claims of the sanity check about handmade numbers."""

from __future__ import annotations

from atoll.studies import Cell, StudyResults
from atoll_papers.studies.sanity import METHODS
from study_cases import STUDIES, outcomes

STUDY = STUDIES["sanity-check"]
WIGGLE = (0.0, 0.02, -0.03)  # differences between seeds


def sanity(left: dict[str, float], seeds: int = 3) -> StudyResults:
    return StudyResults(
        "cpu",
        {
            Cell(row, seed): {
                key: value
                for name, mean in left.items()
                for key, value in (
                    (f"{name} first", 0.8),
                    (f"{name} all", mean + WIGGLE[seed]),
                    (f"{name} curve", [0.8, mean + WIGGLE[seed]]),
                )
            }
            for row in ("standard", "AT")
            for seed in range(seeds)
        },
    )


def test_claims() -> None:
    assert METHODS == ("SM", "IG", "BIG")
    correlations = {"SM": 0.1, "IG": 0.49, "BIG": 0.9}
    assert outcomes(STUDY, sanity(correlations)) == ["supported", "inconclusive", "contradicted"]
    assert outcomes(STUDY, sanity(correlations, seeds=1)) == ["not testable"] * 3
    numbers = {cell: n for cell, n in sanity(correlations).numbers.items() if cell.row == "AT"}
    results = StudyResults("cpu", numbers, {Cell("standard"): "it failed"})
    assert outcomes(STUDY, results) == ["not testable"] * 3
    assert len(STUDY.tables(results)["Rank correlation"].rows) == 6
