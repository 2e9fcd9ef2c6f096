"""Claims about handmade distances; AutoPGD compared with exact distances."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from atoll.explain.boundary import boundary_search
from atoll.studies import Cell, StudyResults
from atoll_papers.studies.boundaries import PIPELINES, STRATEGIES, with_autopgd
from study_cases import STUDIES, outcomes

STUDY = STUDIES["boundary-search"]


def boundaries(
    autopgd: float, multi_start: float, more: float = 0.0, seeds: int = 3, spread: float = 0.0, even: bool = False
) -> StudyResults:
    """Distances of AutoPGD and of the multi-start search, as shares of those of PGDs and CW."""
    numbers = {}
    for row in ("standard", "AT"):
        for seed in range(seeds):
            base = 1.0 + (0.01 if even else 1.0) * seed
            distances = (1.1 * base, base, base * (autopgd + spread * (seed - 1)), base * multi_start)
            values = {f"{name}: distance": value for name, value in zip(PIPELINES, distances, strict=True)}
            values |= {f"{name}: success": 90.0 + more * (name == PIPELINES[2]) for name in PIPELINES}
            values |= {f"{name}: calls": None if name == PIPELINES[2] else 400.0 for name in PIPELINES}
            numbers[Cell(row, seed)] = values
    return StudyResults("cpu", numbers)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (boundaries(0.999, 0.5), ["supported", "inconclusive"]),  # three seeds of very different networks
        (boundaries(0.995, 0.5, spread=0.01), ["inconclusive", "inconclusive"]),
        (boundaries(0.9, 1.2), ["contradicted", "inconclusive"]),
        (boundaries(1.0, 0.5, more=2.0), ["contradicted", "inconclusive"]),
        (boundaries(1.0, 0.5, more=0.5), ["supported", "inconclusive"]),
        (boundaries(1.0, 0.5, even=True), ["supported", "supported"]),
        (boundaries(1.0, 1.2, even=True), ["supported", "contradicted"]),
        (boundaries(1.0, 0.5, seeds=1), ["not testable", "not testable"]),
    ],
)
def test_claims(results: StudyResults, expected: list[str]) -> None:
    assert outcomes(STUDY, results) == expected
    numbers = {cell: n for cell, n in results.numbers.items() if cell.row == "AT"}
    rest = StudyResults("cpu", numbers, {Cell("standard"): "it failed"})
    assert outcomes(STUDY, rest) == ["not testable"] * 2


def test_no_distance_without_boundary_points() -> None:
    results = boundaries(1.0, 0.5)
    for numbers in results.numbers.values():
        numbers |= {f"{name}: distance": None for name in PIPELINES}
    assert outcomes(STUDY, results) == ["not testable"] * 2


def test_autopgd_on_a_linear_model() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[0.6, 0.4], [0.2, 0.5], [1.0, 0.0]])
    exact = (x[:, 0] - x[:, 1]).abs() / 2**0.5
    points = boundary_search(model, x, strategy=STRATEGIES["PGDs"], budget=math.inf)
    assert set(points.method) == {"PGD"}
    after = with_autopgd(model, points, steps=20)  # type: ignore[arg-type]
    assert (after <= points.distance + 1e-6).all()
    assert (after >= exact - 1e-5).all()
    torch.testing.assert_close(after, exact, atol=0.02, rtol=0)
