"""Claims about handmade accuracies, compared with published ones."""

from __future__ import annotations

import pytest

from atoll.runs.recipe import build_recipe
from atoll.stats import Estimate
from atoll.studies import StudyResults
from atoll_papers.studies.gloro_table import COMPARISONS
from study_cases import STUDIES, outcomes, results_of

STUDY = STUDIES["gloro-table"]


@pytest.mark.parametrize(("more", "expected"), [(0.0, "inconclusive"), (3.0, "supported"), (-3.0, "contradicted")])
def test_against_the_best_earlier_methods(more: float, expected: str) -> None:
    results = results_of({row: vra + more for row, vra in COMPARISONS["paper"].published.items()}, "paper")
    assert outcomes(STUDY, results) == [expected, "supported", "supported"]  # the thesis's own numbers
    assert STUDY.tables(results)["Accuracy in %"].rows["ImageNet, L18W588, EMMA"][3] == Estimate(35.0)


def test_small_nets_that_are_compared_have_the_same_size() -> None:
    here = COMPARISONS["cpu"]
    for pair in here.blocks:
        recipes = [
            build_recipe(recipe, "data.class_path=Digits", *own) for recipe, *own in (here.recipes[row] for row in pair)
        ]
        sizes = [recipe.model((1, 28, 28), 10).num_parameters for recipe in recipes]
        assert max(sizes) < 1.1 * min(sizes)
    results = results_of(dict.fromkeys(here.recipes, 50.0))
    numbers = {cell: values | {"parameters": 1000} for cell, values in results.numbers.items()}
    table = STUDY.tables(StudyResults("cpu", numbers))["Accuracy in %"]
    assert table.texts()[0][-1] == "parameters"
    assert {row[-1] for row in table.texts()[1:]} == {"1000"}


@pytest.mark.parametrize(("vra", "expected"), [(60.0, "supported"), (30.0, "inconclusive")])
def test_networks_with_less_data_cannot_contradict(vra: float, expected: str) -> None:
    rows = dict.fromkeys(COMPARISONS["cpu"].recipes, vra)
    assert outcomes(STUDY, results_of(rows, seeds=2))[0] == expected
