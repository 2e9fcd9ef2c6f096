"""Every study runs at its smallest scale; all scales have valid cells; claims need enough cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.runs.recipe import build_recipe, rows
from atoll.runs.run import Run
from atoll.studies import Cell, StudyResults
from atoll.studies.base import SCALES, Numbers, Scale
from atoll.studies.engine import sort_cells
from study_cases import STUDIES, make_results, outcomes
from wci_cases import factors, rates


@pytest.mark.parametrize("name", STUDIES)
def test_smoke(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, folder = STUDIES[name], tmp_path / "study"
    assert main(["study", name, "--scale", "smoke", "--out", str(folder), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert not output["failed"]
    assert output["claims"]
    page = (folder / "README.md").read_text()
    assert f"atoll study {name} --scale smoke" in page
    assert all(claim["claim"] in page for claim in output["claims"])
    assert (folder / "table.csv").exists()
    raw = json.loads((folder / "raw.json").read_text())
    cells = study.cells("smoke")
    numbers = {cell: record["numbers"] for cell, record in zip(cells, raw["cells"], strict=True)}
    runs = {cell: Run(folder / "cells" / cell.name) for cell in cells if cell.recipe}
    for cell, run in runs.items():
        assert [result.numbers for result in run.results("cell")] == [numbers[cell]]  # type: ignore[attr-defined]
    for missing in cells if len(cells) > 1 else ():
        rest = {cell: n for cell, n in numbers.items() if cell != missing}
        results = StudyResults("smoke", rest, {missing: "it failed"}, {c: r for c, r in runs.items() if c != missing})
        assert study.claims(results)
        assert study.tables(results)
        assert study.notes(results)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_cells_have_recipes(name: str, scale: Scale) -> None:
    cells = sort_cells(STUDIES[name].cells(scale))
    assert cells
    trained = {cell.recipe: cell for cell in cells if cell.recipe is not None}
    for recipe in trained:
        assert recipe in rows(recipe.partition("/")[0])
    for recipe, cell in list(trained.items())[:3]:  # other tests build all recipes
        build_recipe(recipe, f"seed={cell.seed}", *cell.overrides)


def test_every_study_is_documented() -> None:
    for name, study in STUDIES.items():
        assert (study.name, study.title != "", study.reference != "") == (name, True, True)
        assert type(study).__doc__


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["gloro-table", "gloro-ablation", "lipschitz-tightness", "threat-switching"])
def test_one_cell_proves_nothing(name: str, scale: Scale) -> None:
    study = STUDIES[name]
    cells = study.cells(scale)
    numbers = {"clean": 90.0, "VRA": 50.0, "ERA": 60.0, "upper": 3.0, "lower": 2.0, "local": 1.0}
    numbers |= {"share": 66.7, "local share": 33.3, "mean": 10.0, "first half": 12.0}
    series = {"epochs": [2, 3], "switching": [12.0, 8.0]}
    for only in (cells[0], cells[-1]):
        results = make_results(study, lambda cell: numbers | series, scale=scale, failed=lambda cell: cell != only)  # noqa: B023
        assert set(outcomes(study, results)) == {"not testable"}
        assert len(next(reversed(study.tables(results).values())).rows) == len({cell.row for cell in cells})


def wci_numbers(cell: Cell) -> Numbers:
    return rates(cell, {}) | factors(cell, (1.0, 0.1), (0.2, 0.8))


@pytest.mark.parametrize("name", ["wci-curves", "wci-correlation", "wci-parts", "wci-lr", "lr-schedules"])
def test_missing_cells_of_wci_studies(name: str) -> None:
    """Every row but one, all rows with their first seed only, and a single cell."""
    study = STUDIES[name]
    rows = list(dict.fromkeys(cell.row for cell in study.cells("cpu")))
    for row in rows[: len(rows) if len(rows) > 1 else 0]:
        assert outcomes(study, make_results(study, wci_numbers, failed=lambda cell, row=row: cell.row == row))  # type: ignore[misc]
    for failed in (lambda cell: cell.seed > 0, lambda cell: (cell.row, cell.seed) != (rows[-1], 1)):
        assert "supported" not in outcomes(study, make_results(study, wci_numbers, failed=failed))


def test_unknown_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "trh-tabel"]) == 1
    assert "did you mean trh-table" in " ".join(capsys.readouterr().err.split())


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "studies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["studies"].keys() == STUDIES.keys()
    assert main(["study", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trh-table"]["reference"] == "TrH, tables 1, 7 and 8"
