"""The numbers of a cell are a result of its run, as long as the run keeps its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll.errors import InputError
from atoll.measure import measure, measurement
from atoll.runs.run import Run
from atoll.studies.cell import CellResult, CellSettings, load_cell, store_cell
from support import change

SETTINGS = CellSettings(study="mine", scale="smoke", row="AT", cell_seed=0, definition={"study": "mine", "seed": 0})


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    shutil.copytree(trained, tmp_path / "run")
    return Run(tmp_path / "run")


def test_numbers_are_stored_with_the_run(run: Run) -> None:
    assert load_cell(run, SETTINGS) is None
    numbers = {"x": 1 / 3, "series": (1.0, float("nan")), "names": ["a"], "none": None}
    result = store_cell(run, SETTINGS, lambda: numbers)
    assert result.numbers == {"x": 1 / 3, "series": [1.0, None], "names": ["a"], "none": None}
    (listed,) = run.results("cell")
    assert isinstance(listed, CellResult)
    assert (listed.settings, listed.numbers, listed.stale) == (SETTINGS, result.numbers, "")
    assert listed.subject.origin.step == run.step("last")
    assert load_cell(run, SETTINGS) == result


def test_another_definition_is_another_cell(run: Run) -> None:
    store_cell(run, SETTINGS, lambda: {"x": 1.0})
    other = CellSettings(study="mine", scale="smoke", row="AT", cell_seed=0, definition={"study": "mine", "seed": 1})
    assert load_cell(run, other) is None
    store_cell(run, other, lambda: {"x": 2.0})
    cells = [load_cell(run, settings) for settings in (SETTINGS, other)]
    assert [cell.numbers["x"] for cell in cells if cell is not None] == [1.0, 2.0]


def test_a_cell_is_not_finished_if_its_run_is_not(run: Run) -> None:
    store_cell(run, SETTINGS, lambda: {"x": 1.0})
    change(run.folder / "index.json", finished=False)
    assert load_cell(run, SETTINGS) is None


def test_numbers_of_other_weights_are_stale(run: Run) -> None:
    result = store_cell(run, SETTINGS, lambda: {"x": 1.0})
    path = next((run.folder / "results" / "cell").glob("*/result.json"))
    assert result.folder == path.parent
    shutil.rmtree(run.checkpoint_path("last"))
    (listed,) = Run(run.folder).results("cell")
    assert listed.stale
    assert load_cell(Run(run.folder), SETTINGS) is None


def test_only_the_study_can_measure_a_cell(run: Run) -> None:
    assert measurement("cell").result is CellResult
    with pytest.raises(InputError, match="run `atoll study mine`"):
        measure(run.subject("last"), SETTINGS)
