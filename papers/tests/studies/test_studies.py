"""Every study runs at its smallest scale; all scales have valid cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.runs.recipe import build_recipe, rows
from atoll.runs.run import Run
from atoll.studies import StudyResults
from atoll.studies.base import SCALES
from atoll.studies.engine import sort_cells
from made import STUDIES


@pytest.mark.parametrize("name", STUDIES)
def test_smoke(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", name, "--scale", "smoke", "--out", str(tmp_path / "study"), "--json"]
    assert main(command) == 0
    output = json.loads(capsys.readouterr().out)
    assert not output["failed"]
    assert output["claims"]
    page = (tmp_path / "study" / "README.md").read_text()
    assert f"atoll study {name} --scale smoke" in page
    assert all(claim["claim"] in page for claim in output["claims"])
    assert (tmp_path / "study" / "table.csv").exists()
    raw = json.loads((tmp_path / "study" / "raw.json").read_text())
    cells = STUDIES[name].cells("smoke")
    assert len(raw["cells"]) == len(cells)
    # Whatever is lost, the rest is told.
    numbers = {cell: record["numbers"] for cell, record in zip(cells, raw["cells"], strict=True)}
    for lost in cells if len(cells) > 1 else ():
        kept = {cell: known for cell, known in numbers.items() if cell != lost}
        runs = {cell: Run(tmp_path / "study" / "cells" / cell.name) for cell in kept if cell.recipe}
        assert STUDIES[name].report(StudyResults("smoke", kept, {lost: "it was lost"}, runs)).claims


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_cells_are_recipes(name: str, scale: str) -> None:
    cells = sort_cells(STUDIES[name].cells(scale))  # type: ignore[arg-type]
    assert cells
    trained = {cell.recipe: cell for cell in cells if cell.recipe is not None}
    for recipe in trained:
        assert recipe in rows(recipe.partition("/")[0])
    for recipe, cell in list(trained.items())[:3]:  # that all rows of all books build is tested elsewhere
        build_recipe(recipe, f"seed={cell.seed}", *cell.overrides)


def test_unknown_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "no-such-study"]) == 1
    assert "expected one of trh-two-moons" in " ".join(capsys.readouterr().err.split())
