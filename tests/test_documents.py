"""What the documentation shows works as it stands."""

import re
import shlex
from pathlib import Path

import pytest

import atoll
from atoll.attacks.suites import parse_attacks
from atoll.cli import main, parse
from atoll.plots import plot_curves
from atoll.runs.run import open_run
from atoll.studies import STUDIES
from atoll.threat import ThreatModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


def run_examples(text, name):
    names: dict[str, object] = {"__name__": name}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, name, "exec"), names)  # each goes on where the one before it ended, as a reader would


def commands():
    """The words after ``atoll`` of all commands in blocks of README, guides and other pages."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if re.match(r"\s*(torchrun .* -m )?atoll (?!.*\.\.\.$)", line):
                words = shlex.split(line, comments=True)
                yield pytest.param(words[words.index("atoll") + 1 :], id=f"{page.stem}: {' '.join(words)}")


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert max(len(re.findall(r"\S.*", block)) for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)) <= 10
    run_examples(README, "README.md")
    printed = capsys.readouterr().out
    assert "robust accuracy" in printed
    assert "initial accuracy" in printed
    assert (tmp_path / "runs/readme/adversarial.png").stat().st_size > 1000
    # and the curves of that run
    figure = plot_curves(open_run(tmp_path / "runs/readme"))
    assert [len(axis.lines) for axis in figure.axes] == [1, 2]  # AT has no clean pass on training data


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_python_of_guides_runs(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(guide.read_text(), guide.name)


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_valid(words):
    options = parse(words)
    if options.verb == "train" and not options.resume:
        assert main([*words, "--dry-run"]) == 0
    if options.verb == "study":
        assert options.name in {None, *STUDIES.members()}
    if options.verb in ("attack", "certify"):
        norm = getattr(options, "norm", "l2") or "linf"  # `certify` is about l2, and takes several radii
        assert all(parse_attacks(options.attacks, ThreatModel(norm, eps)) for eps in (options.eps or "0.1").split(","))


def test_the_table_names_only_what_exists():
    from atoll.registry import REGISTRIES, registry

    known = {name for kind in REGISTRIES for name in registry(kind).members()} | set(dir(atoll)) | {"Timm"}
    table = README.split("## What is implemented")[1].split("\n## ")[0]
    named = {n for row in table.splitlines() if row.startswith("|") for n in re.findall(r"`([A-Z]\w+)`", row)}
    assert named <= known, named - known


def test_what_held_is_said_of_every_study():
    text = (ROOT / "docs" / "results" / "claims.md").read_text()
    assert set(re.findall(r"\[([a-z-]+)\]\(", text)) >= STUDIES.members().keys()


def test_everything_in_all_can_be_imported():
    assert all(getattr(atoll, name) is not None for name in atoll.__all__)
    with pytest.raises(AttributeError):
        _ = atoll.nothing
