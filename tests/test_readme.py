"""What the documentation shows works as it stands."""

import re
import shlex
from pathlib import Path

import pytest

import atoll
from atoll.cli import main
from atoll.plots import plot_curves
from atoll.run import open_run

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_examples_run(tmp_path, monkeypatch, capsys):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in examples:  # each goes on where the one before it ended, as a reader would
        assert len([line for line in example.splitlines() if line.strip()]) <= 10
        exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "robust accuracy" in printed
    assert "initial accuracy" in printed
    assert (tmp_path / "runs/readme/adversarial.png").stat().st_size > 1000
    # and the curves of that run
    figure = plot_curves(open_run(tmp_path / "runs/readme"))
    assert [len(axis.lines) for axis in figure.axes] == [1, 2]  # AT has no clean pass on training data


@pytest.mark.parametrize(
    "words", [shlex.split(line.split("#")[0])[1:] for line in README.splitlines() if line.startswith("atoll train ")]
)
def test_commands_are_valid(words):
    if "--resume" not in words:
        assert main(["train", *words[1:], "--dry-run"]) == 0


def test_the_table_names_only_what_exists():
    from atoll.registry import KINDS, members

    known = {name for kind in KINDS for name in members(kind)} | set(dir(atoll)) | {"Timm"}
    table = README.split("## What is implemented")[1].split("\n## ")[0]
    named = {n for row in table.splitlines() if row.startswith("|") for n in re.findall(r"`([A-Z]\w+)`", row)}
    assert named <= known, named - known


def test_everything_in_all_can_be_imported():
    assert all(getattr(atoll, name) is not None for name in atoll.__all__)
    with pytest.raises(AttributeError):
        _ = atoll.nothing
