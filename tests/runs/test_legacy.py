"""Runs and results of version 0.1 still open."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from atoll.attacks.evaluate import AttackSummary
from atoll.attacks.measure import AttackResult
from atoll.runs.legacy import read_results
from atoll.runs.run import open_run
from atoll.stats import Accuracy, Estimate

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


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one(run, kind):
    """The only result of a kind, without those of the final test."""
    (result,) = (r for r in run.results(kind) if "version 0.1" not in getattr(r.settings, "attacks", ""))
    return result


def test_what_every_result_has_is_read(old):
    for kind, points, split, step in (
        ("attack", 20, "test", 8),
        ("curvature", 32, "train", 8),
        ("explain", 8, "test", 8),
    ):
        result = one(old, kind)
        assert (result.points, result.settings.points, result.settings.split) == (points, points, split)
        origin = result.subject.origin
        assert (origin.run, origin.step, origin.weights) == ("legacy", step, "raw")
        assert (result.subject.digest, result.inputs) == ("", "")  # not known
        assert (result.environment.atoll, result.environment.torch) == ("0.1", "2.13.0+cpu")
        assert (result.environment.threads, result.environment.processes, result.environment.date) == (0, 0, "")


@pytest.mark.parametrize(
    ("suite", "cascade", "individual"),
    [("fast", True, False), ("standard", True, False), ("standard", False, True), ("FGSM", False, False)],
)
def test_attacks_of_a_suite_were_run_in_a_cascade_or_individually(old, suite, cascade, individual):
    (path,) = old.folder.glob("evaluations/*/evaluation.json")
    edit(path, suite=suite, cascade=cascade, adbd={"mean": 0.25, "standard_error": 0.5})
    result = one(old, "attack")
    assert (result.settings.attacks, result.settings.individual) == (suite, individual)
    assert (result.settings.norm, result.settings.eps) == ("linf", "0.15")
    assert (result.settings.adbd, result.adbd.value, result.adbd.standard_error) == (True, 0.25, 0.5)
    assert (result.batch_size, result.clean) == (512, Accuracy(3, 20))


def test_certificates_are_proofs_or_probabilities(old):
    proof = next(result for result in old.results("certify") if not result.is_probabilistic)
    smooth = next(result for result in old.results("certify") if result.is_probabilistic)
    assert (proof.settings.eps, proof.settings.attack, proof.settings.precision) == ("0.5", True, "float64")
    assert (proof.empirical[0].eps, proof.empirical[0].accuracy) == (0.5, Accuracy(1, 20))
    assert (proof.check.attacked, proof.relative_cost) == (5, 1.0877251337913538)
    assert {layer.method for layer in proof.layers[:2]} == {"exact"}
    settings = smooth.settings
    assert (settings.smooth, settings.samples, settings.alpha, settings.attack) == (0.25, 200, 0.001, False)
    edit(
        old.folder / "certificates" / "certification.json",
        rejected=[{"data": "noise", "eps": 0.5, "correct": 3, "total": 4}],
    )
    proof = next(result for result in old.results("certify") if not result.is_probabilistic)
    assert [(row.data, row.eps, row.share) for row in proof.rejected] == [("noise", 0.5, Accuracy(3, 4))]


def test_curvature_was_measured_at_the_inputs_of_its_loss(old):
    result = one(old, "curvature")
    assert (result.loss, result.attacked, result.settings.steps) == ("AT", True, 10)
    assert (result.settings.top, result.settings.gap, len(result.eigenvalues)) == (3, True, 3)
    assert result.pac_bayes[0].message.startswith("vacuous: 7.05")
    for loss, attacked in (("Standard", False), ("TRADES", True)):
        edit(old.folder / "curvature" / "curvature.json", loss=loss)
        assert one(old, "curvature").attacked == attacked


def test_explanations_of_points_and_of_images_are_read(old):
    path = old.folder / "explain" / "explain.json"
    methods = json.loads(path.read_text())["methods"]
    quarter, half = ({"value": value, "standard_error": 0.0} for value in (0.25, 0.5))
    methods["SM"]["locality"] = {"precision": quarter, "recall": half, "f1": quarter}
    methods["SM"]["sanity"] = {"passed": False, "layers": [{"layer": "head", "correlation": half}]}
    del methods["IG"]["sanity"]
    edit(path, methods=methods)
    result = one(old, "explain")
    assert result.calls == (872 + 776) / 8
    assert (result.searches, result.titles) == ({"FAB from clean": 8}, ("",) * 8)
    saliency, integrated = result.methods["SM"], result.methods["IG"]
    assert (saliency.precision.value, saliency.recall.value, saliency.f1.value) == (0.25, 0.5, 0.25)
    assert (saliency.sanity_passed, saliency.sanity_layers) == (False, (("head", Estimate(0.5)),))
    assert (integrated.sanity_passed, integrated.sanity_layers, integrated.f1) == (None, (), None)
    images = [f"{number}.png" for number in range(8)]
    edit(path, split=None, images=images)
    result = one(old, "explain")
    assert (result.settings.split, result.titles) == ("test", tuple(images))
    (old.folder / "curvature" / "landscape-weights.npz").unlink()
    assert old.read_results()[1] == []


def final_tests(run):
    """Weights, step and number of broken points of the final test."""
    tests = [r for r in run.results("attack") if r.settings.attacks.endswith("(version 0.1)")]
    return {(r.subject.origin.weights, r.subject.origin.step): r.clean.correct - r.robust.correct for r in tests}


def test_the_old_final_test_is_one_result_per_checkpoint_and_weights(old):
    tree = json.loads((old.folder / "result.json").read_text())
    tree["best"]["robust"]["correct"] = 30
    edit(old.folder / "result.json", best=tree["best"])
    assert final_tests(old) == {("raw", 8): 6, ("raw", 12): 0, ("swa", 4): 0, ("swa", 12): 0}
    (result,) = (r for r in old.results("attack") if r.subject.origin.step == 8 and r.settings.attacks[:3] == "PGD")
    assert (result.subject.origin.epoch, result.points) == (2, 360)
    accuracy = Accuracy(30, 360)
    assert result.attacks == (AttackSummary("PGD-2 (version 0.1)", accuracy, 36, 6, 0, 0, 0.0),)
    edit(old.folder / "index.json", best={"raw": 12, "swa": 4})  # the last checkpoint is also the best
    assert final_tests(old) == {("raw", 12): 0, ("swa", 4): 0, ("swa", 12): 0}
    del tree["swa"]["best"]
    edit(old.folder / "result.json", swa=tree["swa"])
    assert final_tests(old).keys() == {("raw", 12), ("swa", 12)}


def test_an_old_final_test_without_attack_or_with_certificates(old):
    tree = json.loads((old.folder / "result.json").read_text())
    del tree["last"]["robust"]
    tree["last"]["vra"] = {"correct": 9, "total": 360}
    edit(old.folder / "result.json", last=tree["last"], best=tree["last"], swa=None, attack=None)
    results = [result for result in read_results(old.folder)[0] if result.points == 360]
    attacks = [result for result in results if result.kind == "attack"]
    proofs = [result for result in results if result.kind == "certify"]
    assert [result.subject.origin.step for result in attacks] == [8, 12]
    assert [(r.settings.attacks, r.attacks, r.clean, r.robust) for r in attacks] == [
        ("none", (), Accuracy(36, 360), Accuracy(36, 360))
    ] * 2
    assert [(proof.verified[0].eps, proof.verified[0].accuracy) for proof in proofs] == [(0.15, Accuracy(9, 360))] * 2
    assert not proofs[0].settings.attack


def test_what_is_missing_in_an_old_file_is_named(old):
    (old.folder / "curvature" / "curvature.json").write_text('{"threat": {}}')
    (old.folder / "explain" / "explain.json").write_text("[1]")
    _, errors = old.read_results()
    assert "curvature/curvature.json cannot be read: missing 'traces'" in errors
    assert any(error.startswith("explain/explain.json cannot be read: list indices") for error in errors)


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
