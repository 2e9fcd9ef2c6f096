"""Numbers that studies share are those of the test at the end of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.attacks import APGD
from atoll.attacks.suites import SUITES
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
