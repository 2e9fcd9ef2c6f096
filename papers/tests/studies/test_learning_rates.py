"""Claims about handmade accuracies of learning rates."""

from __future__ import annotations

import pytest

from atoll.runs.recipe import build_recipe
from atoll.studies.base import SCALES, Scale
from atoll.training.methods import MeasureWCI, WCISchedule
from atoll_papers.studies.learning_rates import CONTROL, EARLY, DropSchedules, WCIRate, differences, stopped_early
from study_cases import make_results, outcomes
from wci_cases import rates


@pytest.mark.parametrize(
    ("gains", "best", "expected"),
    [
        # against the control (PGD, AutoAttack), against all others (PGD, AutoAttack), both thresholds alike
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 0.0, ["supported"] * 5),
        # early stopping is better
        ({"rule, τ = 100": 2.0, "rule, τ = 10": 2.0}, 3.0, [*["supported"] * 2, *["contradicted"] * 2, "supported"]),
        ({"rule, τ = 100": 2.0}, 0.0, [*["inconclusive"] * 4, "contradicted"]),
        ({"linear": 2.0}, 0.0, [*["inconclusive"] * 2, *["contradicted"] * 2, "supported"]),
        ({CONTROL: 2.0}, 0.0, [*["contradicted"] * 4, "supported"]),
    ],
)
def test_the_rule(gains: dict[str, float], best: float, expected: list[str]) -> None:
    study = WCIRate()
    assert outcomes(study, make_results(study, lambda cell: rates(cell, gains, best))) == expected


@pytest.mark.parametrize("scale", SCALES)
def test_the_control_differs_from_the_rule_only_in_the_rule(scale: Scale) -> None:
    cells = {cell.row: cell for cell in WCIRate().cells(scale)}
    control, rule = (build_recipe(c.recipe or "", *c.overrides) for c in (cells[CONTROL], cells["rule, τ = 10"]))
    assert [type(method) for recipe in (control, rule) for method in recipe.methods] == [MeasureWCI, WCISchedule]
    assert control.schedule(40, 100) == 1
    assert control.schedule(60, 100) == 0.1
    measured, followed = ((dict(recipe.tree), recipe.tree["methods"][0]["init_args"]) for recipe in (control, rule))
    assert measured[0] | {"methods": None} == followed[0] | {"methods": None}
    assert (measured[1] | {"start": None}).items() <= (followed[1] | {"start": None}).items()  # of the measurements


def test_all_schedules_are_there() -> None:
    rows = dict.fromkeys(cell.row for cell in WCIRate().cells("cpu"))
    assert list(rows)[:5] == ["piecewise", "cosine", CONTROL, "linear", "super-convergence"]
    for cell in WCIRate().cells("paper"):
        build_recipe(cell.recipe or "", *cell.overrides)


def test_early_stopping_is_the_best_checkpoint() -> None:
    results = make_results(WCIRate(), lambda cell: rates(cell, {}, best=3.0))
    extended = stopped_early(results, "piecewise")
    assert extended.values(EARLY, "last robust") == results.values("piecewise", "best robust")
    table = differences(extended, [(EARLY, "piecewise")])
    (estimate, interval), *_ = table.rows.values()
    assert estimate.value == pytest.approx(3.0)  # type: ignore[union-attr]
    assert interval == "[3.00, 3.00]"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"rate x 1, drop x 0.1": 2.0}, ["supported", "supported"]),
        ({"drops at 0.5": 4.0, "rate x 0.1, drop x 0.1": 2.0}, ["contradicted", "contradicted"]),
    ],
)
def test_schedules(gains: dict[str, float], expected: list[str]) -> None:
    study = DropSchedules()
    assert outcomes(study, make_results(study, lambda cell: rates(cell, gains))) == expected
