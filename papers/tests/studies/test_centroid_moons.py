"""What the Two Moons study claims about handmade numbers; the eta that rejects a share of points."""

from __future__ import annotations

import pytest
import torch

from atoll.certify import NearestCentroid
from atoll.certify.evaluate import rejected
from atoll.data.base import MemorySplit
from atoll.models import CentroidNet
from atoll.studies import Cell, StudyResults
from atoll.studies.base import Numbers
from atoll_papers.studies.centroid_moons import CENTROIDS, COLUMNS, OUTLIERS, TEST, matching_eta
from study_cases import STUDIES, outcomes

STUDY = STUDIES["centroid-moons"]
GLORO_ALONE = StudyResults("cpu", {Cell("gloro"): {"clean": 98.0, "vra": 94.0}}, {Cell("centroid"): "it failed"})


def moons(gains: tuple[float, float, float], seeds: int = 3, test: float = 0.0) -> StudyResults:
    """The eta layer rejects this many points of % more of each kind of outliers."""
    cells: dict[Cell, Numbers] = {}
    for seed in range(seeds):
        numbers: Numbers = {"clean": 99.0, "vra": 95.0, "eta": 0.4, "apart": 0.2}
        for name, gain in zip((TEST, *OUTLIERS), (test, *gains), strict=True):
            values = (5.0, 5.0 + gain * (1 + 0.1 * seed), 6.0)
            numbers |= {f"{name}: {column}": value for column, value in zip(COLUMNS, values, strict=True)}
        cells[Cell("gloro", seed)] = {"clean": 98.0, "vra": 94.0}
        for row in CENTROIDS:
            cells[Cell(row, seed, depends_on=(f"gloro-{seed}",))] = numbers
    return StudyResults("cpu", cells)


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        (moons((50.0, 80.0, 90.0)), "supported"),
        (moons((-1.0, 80.0, 90.0)), "contradicted"),
        (moons((50.0, 80.0, 90.0), test=2.0), "contradicted"),  # it rejects more test points
        (moons((50.0, 80.0, 90.0), test=0.9), "inconclusive"),
        (moons((-1.0, -2.0, -3.0)), "contradicted"),
        (moons((50.0, 80.0, 90.0), seeds=1), "not testable"),
        (GLORO_ALONE, "not testable"),
    ],
)
def test_claims(results: StudyResults, outcome: str) -> None:
    assert outcomes(STUDY, results) == [outcome, outcome]


def test_table() -> None:
    row = STUDY.tables(moons((50.0, 80.0, 90.0)))["Rejected, %"].rows[OUTLIERS[0]]
    assert [value.value for value in row if value is not None] == pytest.approx([5, 60, 6, 60, 6])  # type: ignore[union-attr]


def test_matching_eta() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CentroidNet((2,), 2, per_class=3, bounds=None).double()
        split = MemorySplit(torch.randn(200, 2), torch.zeros(200, dtype=torch.long))
    eta = matching_eta(model, split, 0.3)
    assert rejected(NearestCentroid.proven(model, eta=eta), split, 0.0).value == pytest.approx(0.3, abs=0.03)
