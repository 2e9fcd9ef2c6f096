"""Studies of Centroid Nets: verdicts on numbers made by hand, cells that are missing."""

from __future__ import annotations

import pytest
import torch

from atoll.certify import NearestCentroid
from atoll.certify.rejection import rejected
from atoll.data.base import MemorySplit
from atoll.models import CentroidNet
from atoll.studies import Cell, StudyResults
from atoll.studies.base import Numbers
from atoll_papers.studies.centroid_moons import COLUMNS, OUTLIERS, TEST, matching_eta
from made import STUDIES


def moons(gains: tuple[float, float, float], seeds: int = 3) -> StudyResults:
    """The eta-layer rejects so many points of % more of each kind of outliers."""
    cells: dict[Cell, Numbers] = {}
    for seed in range(seeds):
        numbers: Numbers = {"clean": 99.0, "vra": 95.0, "eta": 0.4, "apart": 0.2}
        for name, gain in zip((TEST, *OUTLIERS), (0.0, *gains), strict=True):
            values = (5.0, 5.0 + gain * (1 + 0.1 * seed), 6.0)
            numbers |= {f"{name}: {column}": value for column, value in zip(COLUMNS, values, strict=True)}
        cells[Cell("gloro", seed)] = {"clean": 98.0, "vra": 94.0}
        cells[Cell("centroid", seed, depends_on=(f"gloro-{seed}",))] = numbers
    return StudyResults("cpu", cells)


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (moons((50.0, 80.0, 90.0)), "supported"),
        (moons((-1.0, 80.0, 90.0)), "supported in part"),
        (moons((-1.0, -2.0, -3.0)), "contradicted"),
        (moons((50.0, 80.0, 90.0), seeds=1), "not testable"),
        (
            StudyResults("cpu", {Cell("gloro"): {"clean": 98.0, "vra": 94.0}}, {Cell("centroid"): "lost"}),
            "not testable",
        ),
    ],
)
def test_moons(results: StudyResults, outcome: str) -> None:
    findings = STUDIES["centroid-moons"].report(results)
    assert [claim.outcome for claim in findings.claims] == [outcome]
    if outcome == "supported":
        row = findings.tables["Rejected, %"].rows[OUTLIERS[0]]
        assert [value.value for value in row if value is not None] == pytest.approx([5, 60, 6])  # type: ignore[union-attr]


def test_matching_eta() -> None:
    torch.manual_seed(0)
    model = CentroidNet((2,), 2, per_class=3, bounds=None).double()
    split = MemorySplit(torch.randn(200, 2), torch.zeros(200, dtype=torch.long))
    eta = matching_eta(model, split, 0.3)
    assert rejected(NearestCentroid.proven(model, eta=eta), split, 0.0).value == pytest.approx(0.3, abs=0.03)


def mnist(ours: list[float], theirs: list[float]) -> StudyResults:
    cells: dict[Cell, Numbers] = {}
    for row, values in (("GloRo, 1.58", theirs), ("Centroid, 1.58", ours)):
        for seed, value in enumerate(values):
            numbers = {"clean": 98.0, "VRA 0.3": 90.0, "ERA 0.3": 95.0, "VRA 1.58": value, "ERA 1.58": 80.0}
            cells[Cell(row, seed)] = numbers | {"curve": {"radius": [0.0, 1.0], "verified": [0.9, 0.5]}}
    return StudyResults("cpu", cells)


@pytest.mark.parametrize(
    ("found", "outcomes"),
    [
        (mnist([70.0, 70.2, 70.1], [60.0, 60.3, 60.1]), ["supported", "supported"]),
        (mnist([60.0, 60.2, 60.1], [50.0, 50.3, 50.1]), ["supported", "contradicted"]),
        (mnist([60.0, 70.0, 64.0], [59.0, 69.5, 62.0]), ["supported in part", "supported in part"]),
        (mnist([50.0, 50.2, 50.1], [60.0, 60.3, 60.1]), ["contradicted", "contradicted"]),
        (mnist([70.0], [60.0]), ["not testable", "not testable"]),
        (mnist([], [60.0, 60.3]), ["not testable", "not testable"]),
        (mnist([70.0, 70.2, 70.1], []), ["not testable", "supported"]),
    ],
)
def test_mnist(results: StudyResults, outcomes: list[str]) -> None:
    findings = STUDIES["centroid-mnist"].report(results)
    assert [claim.outcome for claim in findings.claims] == outcomes
    assert findings.figures
