"""Claims about handmade accuracies of learning rates."""

from __future__ import annotations

import pytest

from atoll_papers.studies.learning_rates import EARLY, DropSchedules, WCIRate, differences, stopped_early
from study_cases import make_results, outcomes
from wci_cases import rates


@pytest.mark.parametrize(
    ("gains", "best", "expected"),
    [
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 0.0, ["supported", "supported"]),
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 3.0, ["contradicted", "supported"]),  # early stopping is better
        ({"rule, τ = 100": 2.0}, 0.0, ["inconclusive", "contradicted"]),
        ({"cosine": 2.0}, 0.0, ["contradicted", "supported"]),
    ],
)
def test_the_rule(gains: dict[str, float], best: float, expected: list[str]) -> None:
    study = WCIRate()
    assert outcomes(study, make_results(study, lambda cell: rates(cell, gains, best))) == expected


def test_early_stopping_is_the_best_checkpoint() -> None:
    results = make_results(WCIRate(), lambda cell: rates(cell, {}, best=3.0))
    extended = stopped_early(results, "piecewise")
    assert extended.values(EARLY, "last PGD-20") == results.values("piecewise", "best PGD-20")
    table = differences(extended, [(EARLY, "piecewise")])
    (estimate, interval), *_ = table.rows.values()
    assert estimate.value == pytest.approx(3.0)  # type: ignore[union-attr]
    assert interval == "[3.00, 3.00]"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"1 of the rate, then 0.1 of it": 2.0}, ["supported", "supported"]),
        ({"drops at 0.5": 4.0, "0.1 of the rate, then 0.1 of it": 2.0}, ["contradicted", "contradicted"]),
    ],
)
def test_schedules(gains: dict[str, float], expected: list[str]) -> None:
    study = DropSchedules()
    assert outcomes(study, make_results(study, lambda cell: rates(cell, gains))) == expected
