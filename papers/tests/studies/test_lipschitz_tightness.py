"""Claims about handmade constants."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.studies import Cell, StudyResults
from study_cases import STUDIES, WIGGLE, outcomes

STUDY = STUDIES["lipschitz-tightness"]


def constants(standard: Sequence[float], gloro: Sequence[float], share: tuple[float, float]) -> StudyResults:
    return StudyResults(
        "cpu",
        {
            Cell(f"MNIST, {row}", seed): {
                "upper": upper,
                "lower": upper * part,
                "local": upper * part / 2,
                "share": 100 * part + 0.1 * WIGGLE[seed],
                "local share": 50 * part,
            }
            for row, uppers, part in (("standard", standard, share[0]), ("GloRo", gloro, share[1]))
            for seed, upper in enumerate(uppers)
        },
    )


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (constants([5e4, 6e4, 5e4], [2.0, 2.1, 2.2], (0.003, 0.8)), ["supported", "supported", "supported"]),
        (constants([50, 60, 50], [2.0, 2.1, 2.2], (0.1, 0.8)), ["contradicted", "supported", "supported"]),
        (constants([200, 900, 300], [2.0, 2.1, 2.2], (0.1, 0.8)), ["inconclusive", "supported", "supported"]),
        (constants([2.0, 2.1, 2.2], [2.1, 2.0, 2.3], (0.8, 0.5)), ["contradicted", "contradicted", "contradicted"]),
    ],
)
def test_claims(results: StudyResults, expected: list[str]) -> None:
    assert outcomes(STUDY, results) == expected
