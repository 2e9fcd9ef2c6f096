"""A study in one file outside the package works like those of the papers."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from atoll import registry
from atoll.cli import main
from atoll.registry import Registry
from atoll.runs.run import Run
from atoll.studies import STUDIES
from atoll.studies.cell import CellResult

STUDY = """
from atoll.studies import Cell, Column, Study, Table
from atoll.studies.claims import claim_increase

TINY = (
    "data.limit=64", "model.widths=[2,2]", "model.hidden=4", "attack.steps=1", "trainer.epochs=1",
    "trainer.validation_steps=1", "trainer.test_steps=0",
)


class Mine(Study):
    \"\"\"Standard training against AT.\"\"\"

    name = "mine"
    title = "My own study"
    reference = "My paper, table 1"

    def cells(self, scale):
        return [Cell(row, 0, "digits-at", (*TINY, f"loss={row}")) for row in ("Standard", "AT")]

    def measure(self, cell, run, scale, dependencies):
        if (run.folder / "stop").exists():
            raise RuntimeError("stopped")
        return {"PGD-2": 100 * run.attack("PGD-2", points=20, checkpoint="last").robust.value, "width": 2}

    def tables(self, results):
        return {"Accuracy": Table([Column("PGD-2", "high")], {r: [results.mean(r, "PGD-2")] for r in results.rows})}

    def claims(self, results):
        return [claim_increase("AT helps", results, [("AT", "Standard")], "PGD-2")]
"""


def times(folder: Path) -> dict[str, int]:
    """When the files of the cells were written, without those that every start writes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("environment.json",)]
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_a_study_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_study.py"
    file.write_text(STUDY)
    command = ["study", f"{file}:Mine", "--out", str(tmp_path / "study"), "--json"]
    cells = tmp_path / "study" / "cells"
    (cells / "at-0").mkdir(parents=True)
    (cells / "at-0" / "stop").touch()
    assert main(command) == 1  # a cell failed
    output = json.loads(capsys.readouterr().out)
    assert output["failed"] == {"at-0": "RuntimeError: stopped"}
    assert "RuntimeError: stopped" in (cells / "at-0.error.txt").read_text()

    before = times(cells / "standard-0")
    (cells / "at-0" / "stop").unlink()
    assert main(command) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["claims"] == [
        {
            "claim": "AT helps",
            "outcome": "not testable",
            "message": "at least two seeds of each row are needed",
            "smallest_effect": None,
            "seeds_needed": None,
        }
    ]
    assert times(cells / "standard-0") == before
    assert not (cells / "at-0.error.txt").exists()
    before = times(cells)
    assert main(command) == 0
    assert times(cells) == before

    run = Run(cells / "at-0")
    (cell,) = run.results("cell")
    assert isinstance(cell, CellResult)
    assert (cell.settings.study, cell.settings.row, cell.settings.cell_seed) == ("mine", "AT", 0)
    (attack,) = (result for result in run.results("attack") if result.settings.attacks == "PGD-2")  # type: ignore[attr-defined]
    assert cell.numbers == {"PGD-2": 100 * attack.robust.value, "width": 2}  # type: ignore[attr-defined]
    raw = json.loads((tmp_path / "study" / "raw.json").read_text())
    assert raw["cells"][1]["numbers"] == cell.numbers

    page = tmp_path / "report.html"
    assert main(["report", str(cells / "standard-0"), str(cells / "at-0"), "-o", str(page)]) == 0
    text = page.read_text()
    assert "Study mine" in text
    assert "width" in text


def test_a_study_of_a_file_can_be_sent_to_another_process(tmp_path: Path) -> None:
    file = tmp_path / "my_study.py"
    file.write_text(STUDY)
    study = STUDIES.resolve(f"{file}:Mine").cls()
    study.extra = 3
    assert b"atoll_file_" not in pickle.dumps(study)  # a module that only this process has
    copy = pickle.loads(pickle.dumps(study))
    assert (type(copy), copy.extra) == (type(study), 3)


def test_a_study_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebody_elses_study.py").write_text(STUDY)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "somebody_elses_study:Mine", "atoll.studies")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "atoll.studies" else [])
    studies = Registry("study", "studies", "atoll.studies.base.Study", "atoll.studies")
    assert studies.members()["mine"].summary == "Standard training against AT."
    assert studies.resolve("mine").cls.title == "My own study"  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [["study", "mien-stuty"], ["ls", "study", "mien-stuty"]])
def test_unknown_study(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert "expected a study, got 'mien-stuty'" in " ".join(capsys.readouterr().err.split())
