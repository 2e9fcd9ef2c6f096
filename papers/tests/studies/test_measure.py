"""Numbers that studies share are those of the test at the end of training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll.attacks import APGD
from atoll.attacks.suites import SUITES
from atoll.cli import main
from atoll.runs.run import Run
from atoll.runs.train import train
from atoll_papers.studies.gloro_table import TINY_GLORO
from atoll_papers.studies.measure import accuracies, certified, certified_as_trained


def test_certified(tmp_path: Path) -> None:
    longer = ("data.limit=300", "model.hidden=[32]", "trainer.epochs=10", "threat.eps=0.1", "data.validation=0")
    run = train("digits-gloro", *TINY_GLORO, *longer, out=tmp_path / "run")
    numbers = certified(run, [0.1, 0.3], attacks="PGD-2", check=5, which="last")
    test = next(row for row in run.tests() if row.checkpoint == "last")
    assert test.verified is not None
    assert numbers["clean"] == pytest.approx(100 * test.clean.value)
    assert numbers["VRA 0.1"] == pytest.approx(100 * test.verified.value)
    assert 0 < numbers["VRA 0.3"] <= numbers["VRA 0.1"] <= numbers["ERA 0.1"] <= numbers["clean"]
    assert numbers["attacked"] == 5
    assert numbers["curve"]["verified"][0] * 100 == pytest.approx(numbers["clean"])
    trained = certified_as_trained(run, points=None, attacks="PGD-2", check=5)
    assert trained["VRA"] == numbers["VRA 0.1"]  # without validation points, the best checkpoint is the last


def test_accuracies(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PGD of a study is that of `atoll attack` and of the test at the end of training."""
    monkeypatch.setitem(SUITES, "standard", lambda threat: {"APGD-CE": APGD(threat, steps=3)})  # for a sample
    numbers = accuracies(tiny_run, which="last", attacks=("PGD-2", "CW-2"), autoattack="fast")
    test = next(row for row in tiny_run.tests() if row.checkpoint == "last")
    assert test.robust is not None
    assert (numbers["clean"], numbers["PGD-2"]) == (100 * test.clean.value, 100 * test.robust.value)
    assert numbers["AutoAttack"] <= numbers["clean"]
    settings = {result.settings.attacks for result in tiny_run.results("attack")}  # type: ignore[attr-defined]
    assert settings >= {"PGD-2", "PGD-2,CW-2", "fast"}
    assert numbers["clean"] > 30  # better than chance, so that the comparison means something


def test_trainer_command_and_study_agree_on_pgd_20(tmp_path: Path) -> None:
    """Each of them runs the attack itself, in a run of its own without stored results."""
    recipe = ("digits-flat/at-base", "model={class_path: MLP, init_args: {hidden: [32]}}", "data.limit=300")
    steps = ("attack.steps=2", "trainer.epochs=6", "trainer.validation_steps=1", "trainer.test_steps=20")
    train(*recipe, *steps, out=tmp_path / "trainer")
    for name in ("command", "study"):
        shutil.copytree(tmp_path / "trainer", tmp_path / name, ignore=shutil.ignore_patterns("results"))
    assert main(["attack", str(tmp_path / "command"), "--attacks", "PGD-20", "--json"]) == 0
    column = accuracies(Run(tmp_path / "study"))["PGD-20"]

    stored = {name: Run(tmp_path / name).attack("PGD-20") for name in ("trainer", "command", "study")}
    assert stored["trainer"].robust.correct > 0
    assert stored["trainer"].clean.correct > stored["trainer"].robust.correct
    assert column == 100 * stored["trainer"].robust.value
    inputs = [(result.folder / "adversarial.safetensors").read_bytes() for result in stored.values() if result.folder]
    assert len(inputs) == 3
    assert len(set(inputs)) == 1  # adversarial inputs, labels and the verdict on every point
