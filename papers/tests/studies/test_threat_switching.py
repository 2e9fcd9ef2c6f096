"""Claims about handmade shares."""

from __future__ import annotations

import pytest

from atoll.studies import Cell, StudyResults
from atoll_papers.studies.threat_switching import DEFINITIONS
from study_cases import STUDIES, WIGGLE, outcomes


@pytest.mark.parametrize(("slope", "expected"), [(1.0, "supported"), (-1.0, "contradicted")])
def test_claims(slope: float, expected: str) -> None:
    results = StudyResults(
        "cpu",
        {
            Cell(f"{classes} classes", seed): {
                "epochs": [2, 3],
                **{f"{title}: switching": [9.0, 8.0] for title in DEFINITIONS.values()},
                **{f"{title}: first half": 9.0 for title in DEFINITIONS.values()},
                "second-highest logit: mean": 30 + slope * classes + WIGGLE[seed],
                "class that limits the radius: mean": 30 - slope * classes + WIGGLE[seed],
            }
            for classes in (3, 5, 10)
            for seed in range(3)
        },
    )
    other = {"supported": "contradicted", "contradicted": "supported"}[expected]
    assert outcomes(STUDIES["threat-switching"], results) == [expected, other]
