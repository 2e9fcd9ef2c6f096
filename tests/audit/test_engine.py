"""An audit runs its plan, resumes to the same results, executes nothing that a folder names, and works as a gate."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load

from atoll.audit import audit
from atoll.audit.engine import Record, _State
from atoll.audit.plan import STEPS, Facts
from atoll.audit.speed import Speed, measure_speed
from atoll.cli import main
from atoll.errors import InputError
from atoll.runs.run import open_run
from atoll.runs.train import train
from atoll.threat import ThreatModel
from subject_cases import stored_files
from support import SMALL, change, rewrite

SLOW = Speed(forward=0.01, gradient=0.012, noisy=0.01, corruptions=0.5, points=360, rows=64)  # for short plans
BUDGET = "45m"
SHORT = "6m"
QUICK = ("health", "attack", "corruptions")


@pytest.fixture(autouse=True)
def _same_speed(monkeypatch):
    """Plans depend on the machine; tests must not."""
    monkeypatch.setattr("atoll.audit.engine.measure_speed", lambda subject, device: SLOW)
    monkeypatch.setattr("atoll.audit.engine.SLACK", 1e9)  # no machine is late


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(SMALL[0], *SMALL[1:], out=tmp_path_factory.mktemp("audit") / "run")


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    return open_run(tmp_path / "run")


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """A complete audit."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(trained.folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.audit.engine.measure_speed", lambda subject, device: SLOW)
        patch.setattr("atoll.audit.engine.SLACK", 1e9)
        return audit(open_run(folder), budget=BUDGET)


def test_every_step_runs_and_is_on_the_page(finished):
    assert [stage.step.name for stage in finished.stages] == list(STEPS)
    assert {stage.record.state for stage in finished.stages} == {"done"}
    assert finished.results.keys() == STEPS.keys()
    page = finished.page.read_text()
    for words in ("Evidence", "Robustness to evasion", "Certified radius", "not measured", "verdict"):
        assert words in page
    assert finished.finding in page.replace("\N{NO-BREAK SPACE}", " ") or finished.finding.partition(" ")[0] in page
    assert finished.finding.startswith("Under attack, the network is right on")
    tree = json.loads((finished.run.folder / "audit" / "audit.json").read_text())
    assert tree["schema"] == 1
    assert len(tree["properties"]) == 6
    assert all(each["evidence"] and each["not_measured"] for each in tree["properties"])
    evidence = [row for each in tree["properties"] for row in each["evidence"]]
    assert all((finished.run.folder / row["result"] / "result.json").is_file() for row in evidence)
    assert all(row["command"].startswith("atoll ") and row["subject"] and row["inputs"] for row in evidence)
    assert "left out" not in str(finished)


def test_a_finished_audit_measures_nothing_again(finished, monkeypatch):
    def measured(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr("atoll.attacks.measure.MeasureAttack.measure", measured)
    monkeypatch.setattr("atoll.explain.measure.MeasureExplanation.measure", measured)
    before = stored_files(finished.run.folder / "results")
    again = audit(open_run(finished.run.folder), budget=BUDGET)
    assert [stage.to_json() for stage in again.stages] == [stage.to_json() for stage in finished.stages]
    assert stored_files(finished.run.folder / "results") == before


class Stopped(BaseException):
    pass


def without_times(tree):
    """Plain data without what differs between two audits: times, and the name of the run."""
    if isinstance(tree, dict):
        return {k: without_times(v) for k, v in tree.items() if k not in ("date", "seconds", "checksum", "run")}
    return [without_times(part) for part in tree] if isinstance(tree, list) else tree


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """An audit that was not stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(trained.folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.audit.engine.measure_speed", lambda subject, device: SLOW)
        return audit(open_run(folder), budget=SHORT, only=QUICK)


@pytest.mark.parametrize("call", [0, 3, 9])
def test_a_stopped_audit_resumes_to_the_same_results(run, whole, call):
    calls = iter(range(10**6))

    def stop(*arguments):
        if next(calls) == call:
            raise Stopped

    with pytest.raises(Stopped):
        audit(run, budget=SHORT, only=QUICK, on_progress=stop)
    plans = []
    resumed = audit(open_run(run.folder), budget=SHORT, only=QUICK, on_plan=lambda steps, known: plans.append(known))
    assert plans == [True]
    assert [stage.step for stage in resumed.stages] == [stage.step for stage in whole.stages]
    mine, other = (stored_files(each.run.folder / "results") for each in (resumed, whole))
    assert mine.keys() == other.keys()
    for path in mine:
        if path.endswith("result.json"):
            assert without_times(mine[path]) == without_times(other[path])
        elif path.endswith(".safetensors"):  # whose metadata have no fixed order
            first, second = load(mine[path]), load(other[path])
            assert all(torch.equal(first[name], second[name]) for name in first | second)


DAMAGE = {
    "empty": lambda tree: None,
    "other model": lambda tree: tree | {"key": {**tree["key"], "subject": "0"}},
    "facts": lambda tree: tree | {"facts": {"speed": "evil.py:Speed"}},
    "records": lambda tree: tree | {"records": [{"state": "perfect"}]},
    "too many records": lambda tree: tree | {"records": [{"state": "done", "seconds": 1.0}] * 99},
    "changes": lambda tree: tree | {"changes": [[0, "x", 1]]},
    "list": lambda tree: [tree],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_plan_is_made_again(run, name):
    only = ("health",)
    whole = audit(run, budget=BUDGET, only=only)
    path = run.folder / "audit" / "plan.json"
    tree = DAMAGE[name](json.loads(path.read_text()))
    if isinstance(tree, dict):
        rewrite(path, tree)
    else:
        path.write_text("" if tree is None else json.dumps(tree))
    plans = []
    again = audit(run, budget=BUDGET, only=only, on_plan=lambda steps, known: plans.append(known))
    assert plans == [False]
    assert again.results["health"].clean == whole.results["health"].clean


def test_a_step_that_fails_does_not_stop_the_others(run, monkeypatch):
    def fail(*arguments, **options):
        raise InputError("no gradient")

    monkeypatch.setattr("atoll.attacks.measure.evaluate", fail)
    result = audit(run, budget=BUDGET, only=("health", "attack", "certify"))
    assert [stage.record.state for stage in result.stages] == ["done", "failed", "done"]
    assert result.stages[1].record.message == "no gradient"
    assert "no gradient" in str(result)
    assert result.failures({"robust": 0}) == ["robust was not measured, so nothing shows that it is at least 0 %"]


def test_a_late_audit_measures_less(tmp_path, monkeypatch):
    """If steps take ten times as long as planned, the others are planned again, and a resumed audit knows it."""
    monkeypatch.setattr("atoll.audit.engine.SLACK", 20.0)
    facts = Facts(SLOW, ThreatModel("linf", 0.1), training_points=360)
    state = _State(tmp_path, {"a": 1}, facts, 7200.0, ())
    before = state.steps
    state.finish(0, Record("done", before[0].seconds))
    assert state.steps == before
    state.finish(1, Record("done", 1.9 * before[1].seconds))
    after = state.steps
    assert after[:2] == before[:2]
    left = 7200 - before[0].seconds - 1.9 * before[1].seconds
    assert sum(step.seconds for step in after[2:]) <= left
    points = [[step.settings.points if step.settings else 0 for step in steps[2:]] for steps in (before, after)]
    assert all(new <= old for old, new in zip(*points, strict=True))
    assert points[0] != points[1]
    assert _State.load(tmp_path, {"a": 1}, ()).stages == state.stages


def test_a_gate_compares_the_lower_end(finished):
    clean = finished.number("clean")
    low = 100 * clean.interval[0]
    assert finished.failures({"clean": low - 0.01}) == []
    (failure,) = finished.failures({"clean": low + 0.01})
    assert failure.startswith("clean is ")
    assert "does not show that it is at least" in failure
    for name in ("robust", "corrupted", "verified", "smoothed"):
        assert finished.failures({name: 0}) == []
        assert len(finished.failures({name: 100})) == 1
    with pytest.raises(InputError, match="did you mean robust"):
        finished.failures({"robus": 1})


def test_the_command(finished, capsys):
    words = ["audit", str(finished.run.folder), "--budget", BUDGET]
    assert main([*words, "--fail-under", "clean=100,robust=0"]) == 3
    output = capsys.readouterr()
    assert "does not show that it is at least 100 %" in output.out
    assert "Plan of the earlier audit" in output.err
    assert main([*words, "--json", "--fail-under", "robust=0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == "audit"
    assert answer["failures"] == []
    assert answer["audit"]["finding"] == finished.finding
    for wrong, message in {
        ("--budget", "soon"): "expected a duration",
        ("--fail-under", "robust"): "expected limits in percent",
        ("--only", "atack"): "did you mean attack?",
        ("--norm", "l7"): "l7",
    }.items():
        assert main([*words, *wrong]) in (1, 2)
        assert message in capsys.readouterr().err


def test_speed_is_measured(trained):
    speed = measure_speed(trained.subject(), torch.device("cpu"))
    assert 0 < speed.forward < 1
    assert 0 < speed.gradient < 1
    assert 0 < speed.noisy < 1
    assert 0 < speed.corruptions < 60
    assert speed.points == 360


@pytest.mark.slow
def test_a_killed_command_resumes_bit_identically(trained, tmp_path):
    """SIGKILL at random moments; the same command resumes, and follows the plan of the audit that was not killed."""

    def run(folder, timeout=None):
        command = [sys.executable, "-m", "atoll", "audit", str(folder), "--budget", "40s"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            assert process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()

    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    shutil.copytree(trained.folder, whole)
    began = time.monotonic()
    run(whole)
    seconds = time.monotonic() - began
    shutil.copytree(trained.folder, killed)
    plan = json.loads((whole / "audit" / "plan.json").read_text())
    planned = [record for record in plan["records"] if record["state"] == "done"]
    assert planned
    (killed / "audit").mkdir()
    # A generous budget for the plan, so that no machine is late; the steps follow from its key, facts and budget.
    shutil.copy(whole / "audit" / "plan.json", killed / "audit" / "plan.json")
    change(killed / "audit" / "plan.json", records=[])
    draw = random.Random(0)
    for _ in range(4):
        run(killed, draw.uniform(0.1, 0.6) * seconds)
    run(killed)
    after = json.loads((killed / "audit" / "plan.json").read_text())
    assert without_times(after["records"]) == without_times(plan["records"])
    mine, other = (stored_files(folder / "results") for folder in (killed, whole))
    assert mine.keys() == other.keys()
    for path in mine:
        if path.endswith("result.json"):
            assert without_times(mine[path]) == without_times(other[path])
