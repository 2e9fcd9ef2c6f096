"""Claims of parameter sweeps about handmade accuracies."""

from __future__ import annotations

import pytest

from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.sweeps import RATEta, TrHLambda
from study_cases import make_results, outcomes


def accuracy(cell: Cell, best: str, gap: float) -> Numbers:
    """The row with ``best`` in its name is ahead by ``gap``; seeds differ a little, equally in all rows."""
    number = 50.0 + cell.seed + (gap if cell.row.endswith(best) else 0.01 * cell.seed)
    return {"clean": 90.0, "PGD-20": number, "CW-20": number, "AutoAttack": number}


@pytest.mark.parametrize(
    ("best", "gap", "expected"),
    [
        ("= 0.0005", 0.5, ["supported", "supported", "supported"]),
        ("= 0.0005", 3.0, ["supported", "supported", "contradicted"]),  # both ends are 3 points below it
        ("= 0.01", 0.5, ["contradicted", "contradicted", "supported"]),
    ],
)
def test_trh_lambda(best: str, gap: float, expected: list[str]) -> None:
    study = TrHLambda()
    assert outcomes(study, make_results(study, lambda cell: accuracy(cell, best, gap))) == expected


def test_rat_eta() -> None:
    study = RATEta()
    assert outcomes(study, make_results(study, lambda cell: accuracy(cell, "first term, η = 0.3", 1.0))) == [
        "supported",
        "contradicted",
    ]


def test_missing_cells() -> None:
    study = TrHLambda()
    results = make_results(
        study, lambda cell: accuracy(cell, "0.0005", 0.5), failed=lambda cell: cell.row == "AT, λ = 0.0005"
    )
    assert outcomes(study, results) == ["not testable", "supported", "not testable"]
    alone = make_results(
        study, lambda cell: accuracy(cell, "0.0005", 0.5), failed=lambda cell: cell.name != "at-0.001-2"
    )
    assert set(outcomes(study, alone)) == {"not testable"}
