"""Cells run once and in order, are stored, and do not stop each other."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from atoll.distributed import default_device, use_device
from atoll.errors import AtollError, InputError, RecipeError
from atoll.runs.recipe import read_recipe
from atoll.studies import Cell, Column, StudyResults, Table, engine, run_study
from atoll.studies.engine import CellOutcome, CellRunner, merge_overrides, provenance, sort_cells
from atoll.threads import keep_threads
from studies.toy import Toy, Trained


def seen(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()]


def test_every_cell_runs_once_after_its_dependencies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    results, _ = run_study(Toy(log), "smoke", tmp_path / "study")
    order = seen(log)
    assert sorted(order) == sorted(cell.name for cell in results.numbers)
    assert order.index("a-0") < order.index("c-0")
    assert results.rows == ["c", "a", "b"]
    assert results.paired("b", "a", "x") == pytest.approx([1.0, 1.0, 1.0])


def test_resume(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_study(Toy(log), "smoke", tmp_path / "study", on_done=lambda _, done, total: _stop(done == 3))
    before = seen(log)
    assert len(before) == 3
    run_study(Toy(log), "smoke", tmp_path / "study")
    assert len(seen(log)) == 7
    assert len(set(seen(log))) == 7
    # Another scale is another definition.
    run_study(Toy(log), "cpu", tmp_path / "study")
    assert len(seen(log)) == 14


def test_overrides_of_the_cell_apply_to_another_data_set() -> None:
    cell = Cell("a", 3, "mnist-at", ("data.limit=7", "trainer.epochs=2"))
    user = ["data.class_path=Npz", "data.path=mnist.npz", "trainer.epochs=5"]
    tree = read_recipe("mnist-at", [f"seed={cell.seed}", *merge_overrides(cell.overrides, user)])
    assert tree["data"] == {"class_path": "Npz", "init_args": {"limit": 7, "path": "mnist.npz"}}
    assert (tree["seed"], tree["trainer"]["epochs"]) == (3, 5)


def test_overrides_for_some_rows(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "study"
    run_study(Toy(log), "smoke", folder, overrides=["[bc]:pretrained=mine/file", "trainer.epochs=5"])
    page = (folder / "README.md").read_text()
    assert "    atoll study studies.toy.Toy --scale smoke '[bc]:pretrained=...' trainer.epochs=5\n" in page
    # Overrides of other rows do not change the definition of a row.
    run_study(Toy(log), "smoke", folder, overrides=["trainer.epochs=5"])
    assert sorted(seen(log)[7:]) == ["b-0", "b-1", "b-2", "c-0"]
    work = CellRunner(Toy(log), "smoke", folder, ("[bc]:pretrained=f", "model={class_path: MLP}"))
    assert [work.overrides_for(Cell(row)) for row in ("a", "b")] == [
        ["model={class_path: MLP}"],
        ["pretrained=f", "model={class_path: MLP}"],
    ]
    with pytest.raises(InputError, match="d:seed=1: expected a pattern that matches rows of toy before the colon"):
        run_study(Toy(log), "smoke", folder, overrides=["d:seed=1"])


def test_selected_cells_run_with_what_they_depend_on(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "study"
    results, report = run_study(Toy(log), "smoke", folder, rows=["[bc]"], seeds=[0, 2])
    assert seen(log) == ["a-0", "c-0", "b-0", "b-2"]
    assert results.rows == ["c", "a", "b"]
    selection = "rows [bc], seeds 0, 2: 4 of 7 cells, 1 of them because others depend on them"
    assert report.notes == [f"This report is partial ({selection})."]
    page = (folder / "README.md").read_text()
    assert "    atoll study studies.toy.Toy --scale smoke --rows '[bc]' --seeds 0,2\n" in page
    assert "seeds 0, 2, 0 of 4 cells failed" in page
    assert report.notes[0] in page
    assert json.loads((folder / "raw.json").read_text())["selection"] == selection
    results, report = run_study(Toy(log), "smoke", folder)  # only the rest is measured
    assert sorted(seen(log)[4:]) == ["a-1", "a-2", "b-1"]
    assert not report.notes
    assert json.loads((folder / "raw.json").read_text())["selection"] == ""


@pytest.mark.parametrize(
    ("rows", "seeds", "message"),
    [
        (["a", "d*"], None, r"rows: expected a pattern that matches rows of the study \(c, a, b\), got 'd\*'"),
        ([], [1, 7], r"seeds: expected seeds of the study \(0, 1, 2\), got 7"),
        (["c"], [1], "rows and seeds: expected a selection of at least one cell, got none"),
        ([], [], "rows and seeds: expected a selection of at least one cell, got none"),
    ],
)
def test_a_selection_of_nothing(tmp_path: Path, rows: list[str], seeds: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", rows=rows, seeds=seeds)
    assert not (tmp_path / "study").exists()


def test_all_engines_use_the_same_number_of_threads(tmp_path: Path) -> None:
    runners: list[CellRunner] = []

    def elsewhere(runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        runners.append(runner)
        return engine.run_sequentially(runner, cells)

    with keep_threads(3):
        for options in ({}, {"processes": 2}, {"processes": 8}, {"threads": 5}, {"processes": 2, "threads": 5}):
            run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", engine=elsewhere, **options)
    assert [runner.threads for runner in runners] == [3, 1, 1, 5, 5]
    assert torch.get_num_threads() == 1


def test_short_forms_mean_the_same_as_full_keys(tmp_path: Path) -> None:
    cell = Cell("a", 0, "digits-at", ("loss=TRADES", "trainer.epochs=2"))
    short = CellRunner(Trained(), "smoke", tmp_path, ("epochs=5", "[ab]:lambda_t=3", "root=mine"))
    full = CellRunner(Trained(), "smoke", tmp_path, ("trainer.epochs=5", "loss.lambda_t=3", "data.root=mine"))
    assert short.overrides_for(cell) == full.overrides_for(cell) == list(full.overrides)
    assert short.settings(cell) == full.settings(cell)  # so finished cells are not trained again
    merged = merge_overrides(cell.overrides, short.overrides_for(cell))
    assert read_recipe("digits-at", merged)["trainer"]["epochs"] == 5
    results = StudyResults("smoke", {cell: {}})
    assert provenance(Trained(), results, short.overrides)[0].endswith("epochs=5 '[ab]:lambda_t=3' root=...")
    with pytest.raises(RecipeError, match=r"epochz: unknown key; did you mean trainer\.epochs"):
        run_study(Trained(), "smoke", tmp_path, overrides=["epochz=5"])


def test_cells_compute_on_the_device_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the processes of another engine, which get the runner alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    devices: list[torch.device] = []
    monkeypatch.setattr(CellRunner, "_measure", lambda self, cell: devices.append(default_device()) or {"x": 1.0})

    def elsewhere(runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        for cell in cells:
            with use_device("auto"):
                yield pickle.loads(pickle.dumps(runner))(cell)

    with use_device("cuda:1"):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", engine=elsewhere)
    assert set(map(str, devices)) == {"cuda:1"}


def test_several_processes_train_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick: what is launched; the slow test below launches it."""
    launched: list[int] = []

    def launch(processes: int, training: Callable[[], object]) -> None:
        launched.append(processes)
        if "odd" in str(training):
            raise AtollError("the workers failed")
        training()

    monkeypatch.setattr(engine, "launch", launch)
    results, _ = run_study(Trained(epochs=1), "smoke", tmp_path, processes=2)
    assert launched == [2, 2]
    assert list(results.failed.values()) == ["the workers failed"]
    assert [cell.row for cell in results.numbers] == ["even"]


@pytest.mark.slow
def test_two_processes_train_a_cell_as_one_does(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    one, _ = run_study(Trained(), "smoke", tmp_path / "one")
    two, _ = run_study(Trained(), "smoke", tmp_path / "two", processes=2)
    assert signal.getsignal(signal.SIGINT) is handler
    even = next(iter(two.numbers))
    assert (one.numbers[even]["processes"], two.numbers[even]["processes"]) == (1, 2)
    assert two.numbers[even]["weights"] == pytest.approx(one.numbers[even]["weights"], rel=1e-4, abs=1e-5)
    (reason,) = two.failed.values()
    assert "batch_size: expected a multiple of 2 processes" in reason
    assert "\n" not in reason


def test_invalid_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="processes: expected at least 1, got 0"):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path, processes=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path)


def _stop(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


def test_a_damaged_record_is_measured_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_study(Toy(log), "smoke", tmp_path / "study")
    for name, text in (("a-0", '{"definition"'), ("a-1", "[]"), ("b-2", "{}")):
        (tmp_path / "study" / "cells" / f"{name}.json").write_text(text)
    run_study(Toy(log), "smoke", tmp_path / "study")
    assert sorted(seen(log)[7:]) == ["a-0", "a-1", "b-2"]


@pytest.mark.pictures
def test_a_failure_is_reported_and_does_not_stop_other_cells(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "study"
    results, _ = run_study(Toy(log, fails=("a-0", "b-1")), "smoke", folder)
    assert {cell.name: reason for cell, reason in results.failed.items()} == {
        "c-0": "depends on a-0, which failed",
        "a-0": "a-0 <b>fails</b> | here",
        "b-1": "b-1 <b>fails</b> | here",
    }
    assert len(results.numbers) == 4
    page = (folder / "README.md").read_text()
    assert "![table](table.png)" in page
    assert "- c-0: depends on a-0, which failed" in page
    assert "| c | - | seed 0: depends on a-0, which failed |" in page
    assert "| a | 1.15 ± 0.05 | seed 0: a-0 <b>fails</b> \\| here |" in page
    assert "InputError" in (folder / "cells" / "a-0.error.txt").read_text()
    raw = json.loads((folder / "raw.json").read_text())
    assert [cell["row"] for cell in raw["failed"]] == ["c", "a", "b"]
    # Failures are not stored: the next run tries them again.
    results, _ = run_study(Toy(log), "smoke", folder)
    assert not results.failed
    assert len(seen(log)) == 6 + 3


def test_a_page_starts_with_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = datetime.now(UTC).date()
    monkeypatch.setattr(engine, "launch", lambda processes, training: training())
    run_study(
        Toy(tmp_path / "log", fails=("b-1",)),
        "smoke",
        tmp_path / "study",
        overrides=["pretrained=null", "data.root=mine", "a:model={class_path: MLP}"],
        processes=2,
    )
    title, _, command, _, made, *_ = (tmp_path / "study" / "README.md").read_text().split("\n")
    assert title == "# A toy"
    expected = "--processes 2 pretrained=null data.root=... 'a:model={class_path: MLP}'"
    assert command == f"    atoll study studies.toy.Toy --scale smoke {expected}"
    date, _, rest = made.partition(", ")
    assert before <= datetime.fromisoformat(date).date() <= datetime.now(UTC).date()
    versions = f"atoll {version('atoll')}, torch {torch.__version__}"
    assert rest == f"{versions}. Scale `smoke`, seeds 0, 1, 2, 1 of 7 cells failed."


def test_what_the_user_has_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "required", lambda self, cell, scale: {"pretrained": "weights"} if cell.row == "b" else {})
    log, folder = tmp_path / "log", tmp_path / "study"
    for overrides in ([], ["a:pretrained=file"], ["trainer.epochs=1"]):
        with pytest.raises(InputError, match="row b at scale smoke requires pretrained=FILE, weights"):
            run_study(Toy(log), "smoke", folder, overrides=overrides)
    assert not log.exists()
    for override in ("pretrained=null", "b:pretrained=file"):
        results, _ = run_study(Toy(log), "smoke", folder, overrides=[override])
        assert not results.failed


def test_all_failed(tmp_path: Path) -> None:
    fails = tuple(cell.name for cell in Toy(tmp_path).cells("smoke"))
    with pytest.raises(AtollError, match="all cells failed; the first error was: depends on a-0"):
        run_study(Toy(tmp_path / "log", fails=fails), "smoke", tmp_path / "study")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([Cell("a"), Cell("A")], "expected unique names"),
        ([Cell("a", depends_on=("b-0",))], "got b-0"),
        ([Cell("a", depends_on=("b-0",)), Cell("b", depends_on=("a-0",))], "a-0 -> b-0 -> a-0"),
    ],
)
def test_invalid_grids(cells: list[Cell], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sort_cells(cells)


@pytest.mark.parametrize("tables", [{}, {"empty": Table([Column("x")], {})}])
def test_a_study_without_tables_or_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Table]
) -> None:
    monkeypatch.setattr(Toy, "tables", lambda self, results: tables)
    run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study")
    assert (tmp_path / "study" / "table.png").exists() == bool(tables)


def test_overrides_of_the_user_take_precedence() -> None:
    cell = ["data.limit=100", "model.class_path=MLP", "trainer.epochs=3"]
    user = ["trainer.epochs=1", "data.class_path=Npz", "data.path=a.npz", "model.class_path=LiResNet"]
    tree = read_recipe("mnist-flat/at-base", merge_overrides(cell, user))
    assert tree["data"] == {"class_path": "Npz", "init_args": {"limit": 100, "path": "a.npz"}}
    assert tree["model"] == {"class_path": "LiResNet"}
    assert tree["trainer"]["epochs"] == 1
