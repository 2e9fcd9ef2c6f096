"""Claims about handmade costs."""

from __future__ import annotations

import pytest
import torch

from atoll.data.base import batches
from atoll.runs.recipe import build_recipe
from atoll.studies import Cell
from atoll.studies.base import SCALES, Numbers, Scale
from atoll.training.methods import RAT
from atoll_papers.studies.costs import Costs, RATCost, TrHCost, WCICost, noisy
from study_cases import make_results, outcomes


def cost(cell: Cell, times: dict[str, float], memories: dict[str, float]) -> Numbers:
    wobble = 0.001 * (cell.seed - 1)
    memory = memories.get(cell.row, 1.0) + wobble
    return {"time": times.get(cell.row, 1.0) + wobble, "images": 5.0, "memory": memory, "megabytes": 100 * memory}


@pytest.mark.parametrize(
    ("times", "memories", "expected"),
    [
        # the published ones
        (
            {"TrH": 5.5 / 5.2 - 0.01, "SWA": 5.5 / 4.4, "S2O": 5.5 / 5.2, "AWP": 5.5 / 3.7},
            {"TrH": 1.0, "SWA": 1.12, "S2O": 1.6, "AWP": 1.36},
            ["supported", "supported", "supported", "supported"],
        ),
        ({"TrH": 1.2, "SWA": 1.0}, {"TrH": 1.1, "SWA": 1.0}, ["contradicted"] * 4),
    ],
)
def test_trh_cost(times: dict[str, float], memories: dict[str, float], expected: list[str]) -> None:
    study = TrHCost()
    assert outcomes(study, make_results(study, lambda cell: cost(cell, times, memories))) == expected


def test_rat_cost() -> None:
    study = RATCost()
    times, memories = {"first": 2161 / 1666, "first and second": 2362 / 1666}, {"first": 1.02, "first and second": 2.05}
    times |= {f"{row}, exact": 3.0 for row in ("first", "first and second")}
    memories |= {"first, exact": 1.5, "first and second, exact": 1.5}
    assert outcomes(study, make_results(study, lambda cell: cost(cell, times, memories))) == [
        "supported",
        "contradicted",
        "supported",
        "contradicted",
    ]


@pytest.mark.parametrize("scale", SCALES)
def test_rat_cost_times_the_terms_it_names(scale: Scale) -> None:
    """The trainer of every row has the terms and the order of its name."""
    costs = RATCost().costs[scale]
    for row, (recipe, *own) in costs.recipes.items():
        methods = build_recipe(recipe, *costs.overrides, *own).methods
        if row == "TRADES":
            assert not methods
        elif scale != "smoke":
            (method,) = methods
            assert isinstance(method, RAT)
            assert (method.kind == "exact", method.order == 2) == (row.endswith("exact"), "second" in row)


def test_exact_terms_are_part_of_the_step() -> None:
    """A whole step has the terms of its row, also the exact ones, which differ from the surrogate's."""
    shape, recipe = (1, 8, 8), "digits-flat/trades-rat"
    terms = {}
    for kind in ("surrogate", "exact"):
        overrides = ("trainer.batch_size=8", "attack.steps=1", "methods.0.sigma=0.01", f"methods.0.terms={kind}")
        trainer = noisy(recipe, overrides, shape, 8)
        batch = next(batches(trainer.data.train, [torch.arange(8)], device=trainer.device))
        terms[kind] = trainer.train_step(batch).terms
    assert terms["exact"].keys() == terms["surrogate"].keys() >= {"first", "second"}
    assert terms["exact"]["first"] != terms["surrogate"]["first"]


@pytest.mark.parametrize(("share", "expected"), [(0.5, "supported"), (0.013, "contradicted")])
def test_wci_cost(share: float, expected: str) -> None:
    study = WCICost()
    numbers = {"measurement": 1.0, "step": 1.0, "every epoch": 1 + share, "rule": 1 + share / 2}
    assert outcomes(study, make_results(study, lambda cell: numbers)) == [expected]


@pytest.mark.parametrize("study", [TrHCost(), RATCost()], ids=lambda study: study.name)
@pytest.mark.parametrize("only", [0, 4])
def test_missing_cells(study: TrHCost | RATCost, only: int) -> None:
    name = study.cells("cpu")[only].name
    results = make_results(study, lambda cell: cost(cell, {}, {}), failed=lambda cell: cell.name != name)
    assert set(outcomes(study, results)) == {"not testable"}


@pytest.mark.slow
def test_memory_of_whole_steps() -> None:
    """In separate processes: SWA has one more copy of the weights than the base."""
    study = TrHCost()
    recipes = {"base": ["digits-flat/at-base"], "SWA": ["digits-flat/at-swa"]}
    overrides = ("trainer.batch_size=8", "model.hidden=4000")  # so that weights dominate
    study.costs = {"smoke": Costs(recipes, (1, 8, 8), overrides, rounds=1, repeats=1)}
    base, swa = (study.measure(cell, None, "smoke", {}) for cell in study.cells("smoke"))
    assert base["memory"] == 1.0
    weights = 4e-6 * sum(p.numel() for p in noisy(recipes["base"][0], overrides, (1, 8, 8), 8).model.parameters())
    assert swa["megabytes"] * (1 - 1 / swa["memory"]) == pytest.approx(weights, rel=0.2)
