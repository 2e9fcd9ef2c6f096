"""Tables of robust accuracy compare rows that exist."""

from __future__ import annotations

import pytest

from atoll.studies.base import SCALES, Scale, StudyResults
from atoll_papers.studies.accuracy_tables import AccuracyTable
from study_cases import STUDIES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", [s for s in STUDIES.values() if isinstance(s, AccuracyTable)], ids=lambda s: s.name)
def test_every_scale_has_pairs_to_compare(study: AccuracyTable, scale: Scale) -> None:
    results = StudyResults(scale, {cell: {} for cell in study.cells(scale)})
    pairs = study.pairs(results)
    assert pairs
    assert {row for pair in pairs for row in pair} <= set(results.rows)


def test_a_gain_in_every_pair_supports_the_claim() -> None:
    study = STUDIES["rat-table"]
    numbers = {
        cell: {"last AutoAttack": 50.0 + cell.seed + (2.0 if cell.row.endswith("both") else 0.0)}
        for cell in study.cells("paper")
    }
    (claim,) = study.claims(StudyResults("paper", numbers))
    assert claim.outcome == "supported"
