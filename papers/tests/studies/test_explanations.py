"""Sanity checks and boundary searches as studies: verdicts on numbers made by hand, AutoPGD against exact distances."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.explain.boundary import boundary_search
from atoll.studies import Cell, StudyResults
from atoll_papers.studies.boundaries import PIPELINES, with_autopgd
from atoll_papers.studies.sanity import METHODS
from made import STUDIES

WIGGLE = (0.0, 0.02, -0.03)


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


def test_sanity() -> None:
    findings = STUDIES["sanity-check"].report(sanity({"SM": 0.1, "IG": 0.49, "BIG": 0.9}))
    assert list(METHODS) == ["SM", "IG", "BIG"]
    assert [claim.outcome for claim in findings.claims] == ["supported", "supported in part", "contradicted"]
    one = STUDIES["sanity-check"].report(sanity({"SM": 0.1, "IG": 0.49, "BIG": 0.9}, seeds=1))
    assert {claim.outcome for claim in one.claims} == {"not testable"}
    whole = sanity({"SM": 0.1, "IG": 0.1, "BIG": 0.1})
    left = {cell: numbers for cell, numbers in whole.numbers.items() if cell.row == "AT"}
    lost = STUDIES["sanity-check"].report(StudyResults("cpu", left, {Cell("standard"): "it failed"}))
    assert {claim.outcome for claim in lost.claims} == {"not testable"}
    assert len(lost.tables["Rank correlation"].rows) == 6


def boundaries(autopgd: float, race: float, more: float = 0.0, seeds: int = 3, spread: float = 0.0) -> StudyResults:
    """Distances of AutoPGD and of the race, as shares of those of PGDs and CW."""
    numbers = {}
    for row in ("standard", "AT"):
        for seed in range(seeds):
            base = 1.0 + seed
            distances = (1.1 * base, base, base * (autopgd + spread * (seed - 1)), base * race)
            found = {f"{name}: distance": value for name, value in zip(PIPELINES, distances, strict=True)}
            found |= {f"{name}: success": 90.0 + more * (name == PIPELINES[2]) for name in PIPELINES}
            found |= {f"{name}: calls": None if name == PIPELINES[2] else 400.0 for name in PIPELINES}
            numbers[Cell(row, seed)] = found
    return StudyResults("cpu", numbers)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (boundaries(0.999, 0.5), ["supported", "supported in part"]),  # three seeds of very different nets
        (boundaries(0.995, 0.5, spread=0.01), ["supported in part", "supported in part"]),
        (boundaries(0.9, 1.2), ["contradicted", "contradicted"]),
        (boundaries(1.0, 0.5, more=2.0), ["supported in part", "supported in part"]),
        (boundaries(1.0, 0.5, seeds=1), ["not testable", "not testable"]),
    ],
)
def test_boundaries(results: StudyResults, expected: list[str]) -> None:
    findings = STUDIES["boundary-search"].report(results)
    assert [claim.outcome for claim in findings.claims] == expected
    left = {cell: numbers for cell, numbers in results.numbers.items() if cell.row == "AT"}
    rest = STUDIES["boundary-search"].report(StudyResults("cpu", left, {Cell("standard"): "it failed"}))
    assert {claim.outcome for claim in rest.claims} == {"not testable"}


def test_points_for_which_nothing_was_found_leave_no_distance() -> None:
    found = boundaries(1.0, 0.5)
    for numbers in found.numbers.values():
        numbers |= {f"{name}: distance": None for name in PIPELINES}
    findings = STUDIES["boundary-search"].report(found)
    assert {claim.outcome for claim in findings.claims} == {"not testable"}


def test_autopgd_on_a_linear_model() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[0.6, 0.4], [0.2, 0.5], [1.0, 0.0]])
    exact = (x[:, 0] - x[:, 1]).abs() / 2**0.5
    rungs = boundary_search(model, x, strategy="rungs")
    assert set(rungs.method) == {"PGD"}
    after = with_autopgd(model, rungs, steps=20)  # type: ignore[arg-type]
    assert (after <= rungs.distance + 1e-6).all()
    assert (after >= exact - 1e-5).all()
    torch.testing.assert_close(after, exact, atol=0.02, rtol=0)
