"""Every study runs at its smallest scale; all scales have valid cells; claims need enough cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.runs.recipe import build_recipe, variants
from atoll.runs.run import Run
from atoll.studies import Cell, StudyResults
from atoll.studies.base import SCALES, Numbers, Scale
from atoll.studies.engine import sort_cells
from atoll_papers.studies.locality import LOSSES, SIZES
from atoll_papers.studies.threat_switching import DEFINITIONS
from study_cases import STUDIES, make_results, outcomes
from wci_cases import factors, rates

QUICK = ("trh-cost", "rays", "trh-lambda")  # the cheapest without and with trained cells; the others take a minute
LOCALITY = ("locality-robustness", "locality-accuracy", "attribution-distance")  # they share cells


def smoke(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> StudyResults:
    """Run a study at its smallest scale and check its files."""
    study = STUDIES[name]
    assert main(["study", name, "--scale", "smoke", "--out", str(folder), "--json", *options]) == 0
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
    parent = Path(options[1]) if options else folder / "cells"
    runs = {cell: Run(parent / cell.name) for cell in cells if cell.recipe}
    for cell, run in runs.items():
        assert [result.numbers for result in run.results("cell")] == [numbers[cell]]  # type: ignore[attr-defined]
    for missing in cells if len(cells) > 1 else ():
        rest = {cell: n for cell, n in numbers.items() if cell != missing}
        for failed in ({missing: "it failed"}, {}):  # or it was not selected
            results = StudyResults("smoke", rest, failed, {c: r for c, r in runs.items() if c != missing})
            assert study.claims(results)
            assert study.tables(results)
            assert study.notes(results)
    return StudyResults("smoke", numbers, {}, runs)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STUDIES if name not in LOCALITY],
)
@pytest.mark.pictures
def test_smoke(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke(name, tmp_path / "study", capsys)


def test_smoke_of_a_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Studies of a family share cells, and robust networks start from the standard one."""
    cells = tmp_path / "cells"
    first = smoke(LOCALITY[0], tmp_path / LOCALITY[0], capsys, "--cells", str(cells))
    files = {path: path.stat().st_mtime_ns for path in cells.glob("*/results/*/*/result.json")}
    for name in LOCALITY[1:]:
        results = smoke(name, tmp_path / name, capsys, "--cells", str(cells))
        assert results.numbers.items() <= first.numbers.items()
    assert {path: path.stat().st_mtime_ns for path in cells.glob("*/results/*/*/result.json")} == files
    runs = {cell.row: run for cell, run in first.runs.items()}
    start = runs["start, small"].checkpoint_path("last") / "model.safetensors"
    assert runs["start, small"].recipe["pretrained"] is None
    assert all(Path(runs[f"{loss}, small"].recipe["pretrained"]) == start.resolve() for loss in LOSSES)
    cell = next(cell for cell in first.numbers if cell.row == "at, small")
    result = runs["at, small"].attack("PGD-20", checkpoint="last", points=SIZES["smoke"].points)
    assert result.folder is not None
    assert result.folder / "result.json" in files  # the study has measured and stored it
    assert first.numbers[cell]["PGD-20"] == result.robust.value


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_cells_have_recipes(name: str, scale: Scale) -> None:
    cells = sort_cells(STUDIES[name].cells(scale))
    assert cells
    trained = {cell.recipe: cell for cell in cells if cell.recipe is not None}
    for recipe in trained:
        assert recipe in variants(recipe.partition("/")[0])
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
    numbers |= {"share": 66.7, "local share": 33.3, "parameters": 1000.0}
    numbers |= {f"{title}: {name}": 10.0 for title in DEFINITIONS.values() for name in ("mean", "first half")}
    series = {"epochs": [2, 3]} | {f"{title}: switching": [12.0, 8.0] for title in DEFINITIONS.values()}
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
    assert json.loads(capsys.readouterr().out)["studies"]["trh-table"]["reference"] == "TrH, tables 1, 7 and 8"
