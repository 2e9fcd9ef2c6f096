"""Progress bars in terminals and notebooks."""

import io
import re

import pytest
from IPython.core.formatters import DisplayFormatter
from rich.console import Console

from atoll import progress
from atoll.progress import ProgressBar, show_progress
from atoll.runs.run import open_run
from atoll.runs.train import train
from support import SMALL


class Cell:
    """What a notebook shows of an object with a display id."""

    def __init__(self):
        self.shown = []

    def update(self, thing):
        data, _ = DisplayFormatter().format(thing)
        self.shown.append(data["text/html"])

    @property
    def text(self):
        return " ".join(re.sub(r"<[^>]*>", "", self.shown[-1]).split())


@pytest.fixture
def cell(monkeypatch):
    """As if bars were in a notebook without ipywidgets."""
    cell = Cell()

    def display(thing, display_id=False):
        cell.update(thing)
        return cell if display_id else None

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(force_jupyter=True))
    monkeypatch.setattr(progress, "_SECONDS", 0)
    return cell


def test_a_bar_in_a_notebook_is_updated_in_place_and_stays(cell, recwarn):
    with show_progress("attack [bold]") as report:
        assert len(cell.shown) == 1
        report("<PGD-20>", 30, 120)
        assert "30/120" in cell.text
        assert "attack [bold]" in cell.text
        assert "&lt;PGD-20&gt;" in cell.text
        report("CW", 120, 120)
    assert "120/120" in cell.text
    assert not recwarn.list


def test_notebooks_are_not_flooded(cell, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 1000)
    with show_progress("attack") as report:
        for done in range(100):
            report("PGD", done, 100)
    assert len(cell.shown) <= 3
    assert "99/100" in cell.text


def test_a_bar_in_a_terminal_is_gone_when_it_is_done():
    file = io.StringIO()
    bar = ProgressBar("layers", Console(file=file, force_terminal=True, width=90))
    with bar:
        task = bar.add_task("norms", total=4, note="")
        bar.update(task, completed=3, note="conv1", refresh=True)
        assert "3/4" in file.getvalue()
        assert "conv1" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # the line is erased


def test_other_processes_show_nothing(monkeypatch):
    monkeypatch.setattr(progress, "is_main", lambda: False)
    file = io.StringIO()
    with ProgressBar("", Console(file=file, force_terminal=True)) as bar:
        bar.update(bar.add_task("norms", total=4, note=""), completed=3)
    assert file.getvalue() == ""


def test_training_shows_progress_only_if_asked(tmp_path, capsys, cell):
    recipe, *overrides = [*SMALL, "trainer.epochs=1"]
    train(recipe, *overrides, out=tmp_path / "run", progress=True)
    texts = " ".join(re.sub(r"<[^>]*>", "", html) for html in cell.shown)
    for part in ("training", "images/s", "test", "epoch   1  loss"):
        assert part in texts
    cell.shown.clear()
    train(recipe, *overrides, out=tmp_path / "run", resume=True)
    assert (capsys.readouterr(), cell.shown) == (("", ""), [])


def test_measurements_show_progress_only_if_asked(trained, capsys, cell):
    run = open_run(trained)
    run.attack("FGSM", points=21)
    assert (capsys.readouterr(), cell.shown) == (("", ""), [])
    run.attack("FGSM", points=22, progress=True)
    assert "attack" in cell.text
