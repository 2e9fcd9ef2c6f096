"""Cells are run once, kept, in order, and none of them stops the others; on this process and on Ray."""

from __future__ import annotations

import csv
import json
import math
import signal
from pathlib import Path

import pytest

from atoll.errors import AtollError, InputError
from atoll.runs.recipe import read_recipe
from atoll.stats import Estimate
from atoll.studies import Cell, Column, StudyReport, StudyResults, Table, run_study
from atoll.studies.engine import CellRunner, merge_overrides, sort_cells
from studies.toy import Toy, Trained


def seen(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()]


def test_every_cell_once_after_what_it_needs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found, _ = run_study(Toy(log), "smoke", tmp_path / "study")
    order = seen(log)
    assert sorted(order) == sorted(cell.name for cell in found.numbers)
    assert order.index("a-0") < order.index("c-0")
    assert found.rows == ["c", "a", "b"]
    assert found.paired("b", "a", "x") == pytest.approx([1.0, 1.0, 1.0])


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_study(Toy(log), "smoke", tmp_path / "study", on_done=lambda _, done, total: _stop(done == 3))
    before = seen(log)
    assert len(before) == 3
    run_study(Toy(log), "smoke", tmp_path / "study")
    assert len(seen(log)) == 7
    assert len(set(seen(log))) == 7
    # Another scale is another definition: nothing is taken for what it is not.
    run_study(Toy(log), "cpu", tmp_path / "study")
    assert len(seen(log)) == 14


def test_the_cells_own_values_outlive_another_data_set() -> None:
    cell = Cell("a", 3, "mnist-at", ("data.limit=7", "trainer.epochs=2"))
    user = ["data.class_path=Npz", "data.path=mnist.npz", "trainer.epochs=5"]
    tree = read_recipe("mnist-at", [f"seed={cell.seed}", *merge_overrides(cell.overrides, user)])
    assert tree["data"] == {"class_path": "Npz", "init_args": {"limit": 7, "path": "mnist.npz"}}
    assert (tree["seed"], tree["trainer"]["epochs"]) == (3, 5)


def test_values_for_some_rows(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "study"
    run_study(Toy(log), "smoke", folder, overrides=["[bc]:pretrained=mine/file", "trainer.epochs=5"])
    assert "atoll study toy --scale smoke trainer.epochs=5\n" in (folder / "README.md").read_text()
    # What is said of other rows does not concern those of this one.
    run_study(Toy(log), "smoke", folder, overrides=["trainer.epochs=5"])
    assert sorted(seen(log)[7:]) == ["b-0", "b-1", "b-2", "c-0"]
    work = CellRunner(Toy(log), "smoke", folder, ("[bc]:pretrained=f", "model={class_path: MLP}"))
    assert [work.overrides_for(Cell(row)) for row in ("a", "b")] == [
        ["model={class_path: MLP}"],
        ["pretrained=f", "model={class_path: MLP}"],
    ]
    with pytest.raises(InputError, match="d:seed=1: expected rows of toy before the colon"):
        run_study(Toy(log), "smoke", folder, overrides=["d:seed=1"])


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


def test_processes_that_make_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="processes: expected at least 1, got 0"):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path, processes=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        run_study(Toy(tmp_path / "log"), "smoke", tmp_path)


def _stop(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


def test_a_broken_record_is_measured_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_study(Toy(log), "smoke", tmp_path / "study")
    for name, text in (("a-0", '{"definition"'), ("a-1", "[]"), ("b-2", "{}")):
        (tmp_path / "study" / "cells" / f"{name}.json").write_text(text)
    run_study(Toy(log), "smoke", tmp_path / "study")
    assert sorted(seen(log)[7:]) == ["a-0", "a-1", "b-2"]


def test_a_failure_is_told_and_stops_nobody(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "study"
    found, _ = run_study(Toy(log, fails=("a-0", "b-1")), "smoke", folder)
    assert {cell.name: reason for cell, reason in found.failed.items()} == {
        "c-0": "needs a-0, which failed",
        "a-0": "a-0 <b>will not</b> | do",
        "b-1": "b-1 <b>will not</b> | do",
    }
    assert len(found.numbers) == 4
    page = (folder / "README.md").read_text()
    assert "- c-0: needs a-0, which failed" in page
    assert "| c | - | seed 0: needs a-0, which failed |" in page
    assert "| a | 1.15 ± 0.05 | seed 0: a-0 <b>will not</b> \\| do |" in page
    assert "InputError" in (folder / "cells" / "a-0.error.txt").read_text()
    raw = json.loads((folder / "raw.json").read_text())
    assert [cell["row"] for cell in raw["failed"]] == ["c", "a", "b"]
    # Failures are not kept: mended, they are tried again.
    found, _ = run_study(Toy(log), "smoke", folder)
    assert not found.failed
    assert len(seen(log)) == 6 + 3


def test_all_failed(tmp_path: Path) -> None:
    fails = tuple(cell.name for cell in Toy(tmp_path).cells("smoke"))
    with pytest.raises(AtollError, match="every cell failed; the first: needs a-0"):
        run_study(Toy(tmp_path / "log", fails=fails), "smoke", tmp_path / "study")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([Cell("a"), Cell("A")], "the same twice"),
        ([Cell("a", depends_on=("b-0",))], "got b-0"),
        ([Cell("a", depends_on=("b-0",)), Cell("b", depends_on=("a-0",))], "a-0 needs b-0 needs a-0"),
    ],
)
def test_grids_that_make_no_sense(cells: list[Cell], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sort_cells(cells)


def test_marks() -> None:
    column = Column("robust", "high")
    rows = {name: [Estimate(value, error)] for name, value, error in [("a", 5, 0.4), ("b", 4.4, 0.3), ("c", 4, 0.5)]}
    table = Table([column], rows)
    assert [table.mark(row, 0) for row in rows] == ["best", "silver", None]  # 5 - 0.4 <= 4.4 + 0.3; 4 + 0.5 < 4.6
    assert [Table([Column("time", "low")], rows).mark(row, 0) for row in rows] == [None, "silver", "best"]
    assert [Table([Column("time")], rows).mark(row, 0) for row in rows] == [None] * 3


def test_tables_that_lack_numbers_and_have_bars_in_their_names() -> None:
    nothing = Estimate(float("nan"), float("nan"))
    table = Table(
        [Column("x | y", "high")], {"one seed": [Estimate(1.25, float("nan"))], "a|b": [nothing], "c": [None]}
    )
    assert table.markdown().splitlines()[2:] == ["| one seed | **1.25** |", "| a\\|b | - |", "| c | - |"]
    rows = list(csv.reader(table.csv().splitlines()))
    assert rows[1] == ["one seed", "1.25", "", "best"]
    assert [len(row) for row in rows] == [4] * 4
    (axis,) = table.figure().axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["one seed", "a|b", "c"]
    assert [len(line.get_xdata()) for line in axis.lines] == [1]  # one dot, and no bar of an error that is not known


def test_a_picture_of_a_table(tmp_path: Path) -> None:
    run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study")
    assert "![table](table.png)" in (tmp_path / "study" / "README.md").read_text()
    rows = {name: [Estimate(value, 0.3), "words"] for name, value in [("a", 5.0), ("b", 4.5), ("c", 3.0)]}
    (axis,) = Table([Column("x", "high"), Column("not numbers")], rows).figure().axes
    dots = [container.lines[0] for container in axis.containers]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in dots] == [(5.0, 0), (4.5, 1), (3.0, 2)]
    assert len({(line.get_color(), line.get_markerfacecolor()) for line in dots}) == 3  # best, silver, neither


@pytest.mark.parametrize("tables", [{}, {"empty": Table([Column("x")], {})}])
def test_a_study_may_have_little_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Table]
) -> None:
    monkeypatch.setattr(Toy, "conclude", lambda self, found: StudyReport(tables, []))
    run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study")
    assert (tmp_path / "study" / "table.png").exists() == bool(tables)


def test_means_over_seeds() -> None:
    found = StudyResults("smoke", {Cell("a", 0): {"x": 1.0}, Cell("a", 1): {"x": 3.0}, Cell("a", 2): {"x": None}})
    mean = found.mean("a", "x", 100)
    assert mean is not None
    assert (mean.value, mean.standard_error) == pytest.approx((200.0, 100.0))
    assert found.mean("a", "y") is None


def test_who_has_the_last_word() -> None:
    cell = ["data.limit=100", "model.class_path=MLP", "trainer.epochs=3"]
    user = ["trainer.epochs=1", "data.class_path=Npz", "data.path=a.npz", "model.class_path=LiResNet"]
    tree = read_recipe("mnist-flat/at-base", merge_overrides(cell, user))
    assert tree["data"] == {"class_path": "Npz", "init_args": {"limit": 100, "path": "a.npz"}}
    assert tree["model"] == {"class_path": "LiResNet"}
    assert tree["trainer"]["epochs"] == 1


def test_pairs_leave_out_what_is_missing() -> None:
    numbers = {Cell("a", 0): {"x": 1.0}, Cell("a", 1): {"x": None}, Cell("b", 0): {"x": 3.0}, Cell("b", 1): {"x": 2.0}}
    found = StudyResults(
        "smoke",
        numbers | {Cell("a", 2): {}, Cell("b", 2): {"x": 5.0}, Cell("a", 3): {"x": math.nan}, Cell("b", 3): {"x": 1.0}},
    )
    assert found.paired("b", "a", "x") == [2.0]
    assert found.paired("b", "a", "x", of=lambda x: x**2) == [8.0]
