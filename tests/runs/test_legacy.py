"""Runs and results of version 0.1 still open."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from atoll.attacks.measure import AttackResult
from atoll.runs.legacy import read_results
from atoll.runs.run import open_run

OLD = Path(__file__).parent / "version_0_1"


@pytest.fixture
def old(tmp_path):
    return open_run(shutil.copytree(OLD, tmp_path / "run"))


def test_every_result_of_the_version_before_is_read(old):
    results, errors = old.read_results()
    assert [result.kind for result in results if not result.settings.__dict__.get("attacks", "").startswith("PGD")] == [
        "attack",
        "certify",
        "certify",
        "curvature",
        "explain",
    ]
    assert len(errors) == 1
    assert "which loss" in errors[0]


def test_numbers_are_those_of_the_files(old):
    tree = json.loads(next(OLD.glob("evaluations/*/evaluation.json")).read_text())
    (attack,) = [r for r in old.results("attack") if r.settings.attacks == "fast"]
    assert (attack.robust.correct, attack.robust.total) == (tree["robust"]["correct"], tree["robust"]["total"])
    assert [a.broken for a in attack.attacks] == [a["broken"] for a in tree["attacks"]]
    tree = json.loads((OLD / "curvature" / "curvature.json").read_text())
    (curvature,) = old.results("curvature")
    assert curvature.wci.value == tree["wci"]["value"]
    assert [layer.trace.value for layer in curvature.layers] == [layer["trace"]["value"] for layer in tree["layers"]]
    assert curvature.landscape() is None
    tree = json.loads((OLD / "explain" / "explain.json").read_text())
    (explanation,) = old.results("explain")
    assert explanation.methods["BIG"].infidelity.value == tree["methods"]["BIG"]["infidelity"]["value"]["value"]
    tree = json.loads((OLD / "certificates" / "certification.json").read_text())
    proven = next(r for r in old.results("certify") if r.lipschitz is not None)
    assert proven.verified[0].accuracy.correct == tree["verified"][0]["correct"]


def test_the_old_final_test_has_a_name_of_its_own(old):
    tests = [r for r in old.results("attack") if isinstance(r, AttackResult) and "version 0.1" in r.settings.attacks]
    assert {(r.subject.origin.weights, r.subject.origin.step) for r in tests} >= {("raw", 12), ("swa", 12)}
    assert old.tests() == []  # PGD-2 now steps differently


def test_models_and_measurements_work_on_old_runs(old):
    assert old.model("last", "swa")(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    result = old.attack("PGD-2", points=10)
    assert result.subject.origin.run == "run"
    assert result in old.results("attack")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"run": 1}', "[" * 100_000, '{"points": "many"}', "\x00"])
def test_damaged_files_of_the_version_before_are_named_not_raised(tmp_path, text):
    folder = shutil.copytree(OLD, tmp_path / "run")
    files = [
        *folder.glob("evaluations/*/evaluation.json"),
        folder / "curvature" / "curvature.json",
        folder / "explain" / "explain.json",
        folder / "certificates" / "certification.json",
        folder / "result.json",
    ]
    for file in files:
        file.write_text(text)
    results, errors = read_results(folder)
    assert [result.kind for result in results] == ["certify"]  # the smoothing that was left alone
    assert len(errors) == len(files) + 1


def test_a_result_that_is_a_link_out_of_the_run_is_not_read(tmp_path):
    folder = shutil.copytree(OLD, tmp_path / "run")
    (folder / "curvature" / "curvature.json").rename(tmp_path / "secret.json")
    (folder / "curvature" / "curvature.json").symlink_to(tmp_path / "secret.json")
    results, errors = read_results(folder)
    assert "curvature" not in {result.kind for result in results}
    assert any("a link to a file outside the run folder" in error for error in errors)
