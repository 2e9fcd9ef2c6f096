"""What a run answers about its recipe, checkpoints and results.  The runs are copies of one of version 0.1."""

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from atoll.attacks.measure import AttackSettings, MeasureAttack
from atoll.certify import GloRo
from atoll.certify.measure import CertifySettings, Verified
from atoll.errors import AtollError, CheckpointError, DamagedError, InputError, ResultError
from atoll.export import Exported
from atoll.files import sha256, write_record
from atoll.runs import run as run_module
from atoll.runs.data_record import DataRecord
from atoll.runs.run import Run, TestRow, check_which, model_from, open_run
from atoll.stats import Accuracy
from atoll.subject import Origin
from atoll.training.checkpoint import load_checkpoint
from support import change

OLD = Path(__file__).parent / "version_0_1"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(OLD, tmp_path / "run")


@pytest.fixture
def run(folder):
    return open_run(folder)


@pytest.fixture
def data(run):
    """The record of its data, which version 0.1 did not write."""
    return DataRecord.of(run.data)


def write_index(folder, **index):
    write_record(folder / "index.json", "the checkpoints", index)


def edit_recipe(folder, **sections):
    """Replace sections, or remove those that are None."""
    tree = yaml.safe_load((folder / "recipe.yaml").read_text()) | sections
    tree = {name: section for name, section in tree.items() if section is not None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))


# --- opening ----------------------------------------------------------------------------------------------------------


def test_what_is_not_a_run_gets_a_helpful_answer(run, tmp_path):
    (run.folder / "results").mkdir()
    with pytest.raises(CheckpointError, match=rf"rum is not a run; did you mean {tmp_path}/run\?"):
        open_run(tmp_path / "rum")
    with pytest.raises(CheckpointError, match=r"no/where is not a run; expected a folder with a recipe\.yaml"):
        open_run(tmp_path / "no" / "where")
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a run; choose one in it, such as {tmp_path}/run"):
        open_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"results is not a run: it has no recipe\.yaml"):
        open_run(run.folder / "results")
    shutil.copytree(OLD, run.folder / "inner")
    assert open_run(run.folder).step("last") == 12  # a run may be in the folder of another one


@pytest.mark.parametrize("section", ["data", "threat", "loss"])
def test_a_recipe_without_a_section_is_one_sentence(folder, section):
    edit_recipe(folder, **{section: None})
    with pytest.raises(CheckpointError, match=rf"recipe\.yaml: {section}: this section is required"):
        getattr(open_run(folder), section)


@pytest.mark.parametrize(("trainer", "got"), [([1], r"\[1\]"), ("x", "'x'"), ({"test_steps": "os.system"}, "'os.sys")])
def test_steps_of_the_final_test_that_are_no_number_are_one_sentence(folder, trainer, got):
    edit_recipe(folder, trainer=trainer)
    with pytest.raises(CheckpointError, match=rf"trainer\.test_steps: expected an integer, got {got}"):
        open_run(folder).tests()


@pytest.mark.parametrize(
    ("trainer", "attacks"), [({}, "PGD-20"), ({"test_steps": 7}, "PGD-7"), ({"test_steps": 0}, "none")]
)
def test_the_final_test_has_the_steps_of_the_recipe(folder, trainer, attacks):
    edit_recipe(folder, trainer=trainer)
    assert open_run(folder).test_settings == AttackSettings(attacks=attacks)


def test_code_of_others_runs_only_with_trust(folder, tmp_path):
    (tmp_path / "mine.py").write_text("from atoll.losses import Standard\nclass Mine(Standard):\n    pass\n")
    edit_recipe(folder, loss=f"{tmp_path}/mine.py:Mine")
    for run in (open_run(folder), Run(folder), open_run(folder, trust=False)):
        with pytest.raises(AtollError, match="runs code from outside Atoll; pass --trust"):
            _ = run.loss
    assert type(open_run(folder, trust=True).loss).__name__ == "Mine"


def test_runs_can_be_keys_and_never_change(run):
    moved = open_run(run.folder, data={"root": "elsewhere"})
    assert len({run, moved, Run(run.folder, trust=True)}) == 2  # the location of the data does not matter
    row = TestRow("best", "raw", None)
    for value, name in ((run, "trust"), (row, "weights")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, True)


def test_damaged_conventions_are_one_sentence(run):
    assert run.conventions is None
    (run.folder / "adopted.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adopted\.json is damaged; adopt the model again"):
        _ = open_run(run.folder).conventions


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_have_names_and_numbers(run):
    assert run.weight_sets == ["raw", "swa"]
    assert [run.step(), run.step("last"), run.step("best", "swa"), run.step("last", "swa")] == [8, 12, 4, 12]
    assert [run.step(4), run.step(12, "swa")] == [4, 12]
    names = {run.checkpoint_name(Origin(step=step)) for step in (4, 8, 12)}
    assert names == {"step 4", "best", "last"}
    assert run.checkpoint_name(Origin(step=4, weights="swa")) == "best"
    with pytest.raises(CheckpointError, match="has no checkpoint at step 5; expected one of 4, 8, 12"):
        run.step(5)
    with pytest.raises(InputError, match=r"expected best, last or a step, got 'beast'; did you mean best\?"):
        check_which("beast")
    with pytest.raises(InputError, match=r"expected best, last or a step, got 'x'$"):
        check_which("x")
    shutil.rmtree(run.folder / "checkpoints" / "00000008")
    assert run.step() == 12
    assert run.checkpoint_name(Origin(step=12)) == "best and last"


def test_a_run_without_index_has_only_its_last_checkpoint(run):
    (run.folder / "index.json").unlink()
    assert (run.index, run.weight_sets, run.step(), run.step(4)) == ({}, ["raw"], 12, 4)
    (run.folder / "metrics.jsonl").unlink()
    assert run.metrics == []
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(CheckpointError, match="run has no checkpoints"):
        run.step()


def test_metrics_have_all_epochs(run):
    assert {record["epoch"] for record in run.metrics} == {1, 2, 3}
    write_index(run.folder, last=12, best={"raw": 8}, epoch=4)
    with pytest.raises(DamagedError, match=r"metrics\.jsonl: 1 of 4 epochs are missing"):
        _ = run.metrics


def test_training_is_finished_when_the_index_says_so(run):
    assert run.is_finished  # version 0.1 wrote the final test to result.json
    (run.folder / "result.json").unlink()
    assert not run.is_finished
    for finished in (True, False):
        write_index(run.folder, last=12, best={"raw": 8}, finished=finished)
        assert run.is_finished == finished


@pytest.mark.parametrize(
    "index",
    [
        {"last": 12},
        {"best": {"raw": 8}},
        {"last": "12", "best": {"raw": 8}},
        {"last": 12, "best": [8]},
        {"last": 12, "best": {"raw": "8"}},
        {"last": 12, "best": {"raw": 8, "swa": None}},
        {"last": 12, "best": {"raw": 8}, "epoch": "3"},
        {"last": 12, "best": {"raw": 8}, "finished": 1},
        {"last": 12, "best": {"raw": 8}, "selected_on": ["test"]},
    ],
)
def test_an_index_of_another_kind_is_one_sentence(run, index):
    write_index(run.folder, **index)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: expected .*; resume the training to write"):
        run.step()
    (run.folder / "adopted.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: expected .*; adopt the model again"):
        run.step()


def test_a_selection_on_few_points_is_a_warning(run, data):
    assert run.selection_warning() == ""  # nothing is known about the data
    folder, best = run.folder, {"raw": 8, "swa": 99}
    for validation, is_warning in ((0, False), (1, True), (99, True), (100, False)):
        replace(data, validation=validation).save(folder)
        write_index(folder, last=12, best=best, selected_on="validation")
        message = f"selected on only {validation} validation points" if is_warning else ""
        assert message in run.selection_warning()
        assert bool(run.selection_warning()) == is_warning
    replace(data, validation=50).save(folder)
    assert run.selection_warning("best", "raw")
    for which, weights in (("last", "raw"), (8, "raw"), ("best", "swa"), ("best", "ema")):
        assert run.selection_warning(which, weights) == ""
    write_index(folder, last=12, best=best, selected_on="test")
    assert run.selection_warning() == ""


def test_weights_load_without_the_state_of_the_training(run):
    for path in run.folder.rglob("training.safetensors"):
        path.unlink()
    assert run.checkpoint("last").training == {}
    for step, which, weights, name in ((8, "best", "raw", "model"), (4, "best", "swa", "swa"), (12, 12, "swa", "swa")):
        path = run.folder / "checkpoints" / f"{step:08d}" / f"{name}.safetensors"
        subject = run.subject(which, weights)
        assert subject.origin == Origin(run="run", step=step, epoch=None, weights=weights, file=sha256(path))
        for model in (run.model(which, weights), subject.model):
            assert not model.training
            state = model.state_dict()
            assert all(torch.equal(state[key], tensor) for key, tensor in load_file(path).items())


MODEL = {"class_path": "MLP", "init_args": {}}
ABOUT = {  # wrong entries of a checkpoint, and what is expected
    "model": ([{"recipe": recipe} for recipe in ([], {}, {"model": "MLP"}, {"model": {}})], "a class and arguments"),
    "input_shape": ([{"input_shape": s} for s in (None, 8, [0, 8], [-1], [True, 8], [1.5], ["8"])], "a list of sizes"),
    "num_classes": ([{"num_classes": count} for count in (None, 0, -1, True, 2.5, "10")], "a number of classes"),
    "bounds": ([{"bounds": b} for b in ([0], [0, 1, 2], ["0", "1"], "01", {"a": 0, "b": 1})], "two numbers or null"),
    "step": ([{"step": "8"}], "an integer"),
    "epoch": ([{"epoch": 1.5}], "an integer"),
}


@pytest.mark.parametrize("name", ABOUT)
def test_a_checkpoint_that_describes_no_model_is_one_sentence(name):
    checkpoint = load_checkpoint(OLD / "checkpoints" / "00000008")
    cases, expected = ABOUT[name]
    for changes in cases:
        wrong = replace(checkpoint, about=checkpoint.about | changes)
        with pytest.raises(CheckpointError, match=f"^there/checkpoint.json: {name}: expected {expected}$"):
            model_from(wrong, "there")


def test_a_model_of_a_checkpoint_needs_no_pretrained_weights(monkeypatch):
    checkpoint, trees = load_checkpoint(OLD / "checkpoints" / "00000008"), []

    def build(hint, tree, name, *, trust):
        trees.append(tree)
        raise InputError("it is built no further")

    monkeypatch.setattr(run_module, "build_part", build)
    for arguments in ({"pretrained": True, "depth": 1}, {"depth": 1}):
        recipe = {"model": {"class_path": "ResNet", "init_args": arguments}}
        with pytest.raises(InputError, match="it is built no further"):
            model_from(replace(checkpoint, about=checkpoint.about | {"recipe": recipe}), "there")
    assert [tree["init_args"] for tree in trees] == [{"pretrained": False, "depth": 1}, {"depth": 1}]


def test_a_checkpoint_without_recipe_has_only_weights():
    checkpoint = load_checkpoint(OLD / "checkpoints" / "00000008")
    about = {name: value for name, value in checkpoint.about.items() if name != "recipe"}
    with pytest.raises(CheckpointError, match="there does not contain a recipe; build the model yourself"):
        model_from(replace(checkpoint, about=about), "there")
    smallest = {"input_shape": [1], "num_classes": 2, "bounds": None, "recipe": {"model": MODEL}}
    with pytest.raises(CheckpointError, match="there does not fit the architecture"):
        model_from(replace(checkpoint, about=smallest), "there")


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_their_dates(run):
    for points in (3, 4):
        run.attack("none", points=points)
    stored = {result.points: result.folder / "result.json" for result in run.results() if result.folder}
    for first, second in ((3, 4), (4, 3)):
        for points, date in ((first, "2026-01-01T00:00:00+00:00"), (second, "2026-01-02T00:00:00+00:00")):
            result = next(result for result in run.results() if result.folder and result.points == points)
            environment = dataclasses.asdict(replace(result.environment, date=date))
            change(stored[points], environment=environment)
        assert [result.points for result in run.results() if result.folder] == [first, second]
    change(stored[3], environment=None)
    results = run.results()
    assert [result.points for result in results if result.folder] == [3, 4]
    assert results[-1].points == 4
    assert {result.kind for result in run.results("attack")} == {"attack"}
    for name in ("0 unfinished", "damaged"):
        (run.folder / "results" / "attack" / name).mkdir()
    (run.folder / "results" / "attack" / "damaged" / "result.json").write_text("{")
    again, errors = run.read_results()
    assert again == results
    assert [error for error in errors if "damaged/result.json cannot be read" in error] == errors[:1]


@pytest.fixture
def legacy(run):
    """One result under attack and one with certificates."""
    results = [replace(result, stale="") for result in run.results()]
    attack = next(result for result in results if result.kind == "attack")
    proof = next(result for result in results if result.kind == "certify" and not result.is_probabilistic)
    return attack, proof


@pytest.fixture
def tested(run, legacy, monkeypatch):
    """A run with made-up results, oldest first; the number of correct points tells them apart."""
    attack, proof = legacy

    def attacked(correct, step, weights="raw", **changes):
        settings = replace(AttackSettings(attacks="PGD-2", norm="linf", eps="0.15"), **changes.pop("settings", {}))
        origin = Origin(step=step, epoch=step // 4, weights=weights)
        accuracy = {"clean": Accuracy(correct, 10), "robust": Accuracy(correct - 1, 10)}
        return replace(attack, settings=settings, subject=replace(attack.subject, origin=origin), **accuracy | changes)

    def certified(correct, step, **settings):
        settings = replace(CertifySettings(attack=False, eps="0.15", precision="float64"), **settings)
        verified = (Verified(eps=0.15, accuracy=Accuracy(correct, 10)),)
        origin = Origin(step=step, epoch=step // 4)
        return replace(proof, settings=settings, subject=replace(proof.subject, origin=origin), verified=verified)

    results = [
        attacked(1, 8),
        attacked(2, 8),
        attacked(3, 4),
        attacked(4, 8, settings={"attacks": "FGSM"}),
        attacked(5, 8, settings={"points": 10}),
        attacked(6, 8, stale="measured with other weights"),
        attacked(7, 12),
        attacked(8, 12, "swa", attacks=()),
        certified(1, 8),
        certified(2, 8),
        certified(3, 8, precision="float32"),
        certified(4, 4),
    ]
    monkeypatch.setattr(Run, "results", lambda self, kind=None: results)
    return run


def test_tests_are_the_newest_results_with_the_settings_of_the_training(tested):
    rows = [(row.checkpoint, row.weights, row.epoch, row.clean.correct) for row in tested.tests()]
    assert rows == [("best", "raw", 2, 2), ("last", "raw", 3, 7), ("last", "swa", 3, 8)]
    best, last, average = tested.tests()
    assert (best.robust, best.verified) == (Accuracy(1, 10), Accuracy(2, 10))
    assert (last.robust, last.verified) == (Accuracy(6, 10), None)
    assert average.robust is None
    assert {name: part["correct"] for name, part in best.to_json().items()} == {"clean": 2, "robust": 1, "vra": 2}
    assert average.to_json().keys() == {"clean"}


def test_the_table_shows_the_tests(tested):
    table = tested.table()
    assert table.title == "run: SmallConvNet on Digits, trained with AT; test accuracy in %"
    assert table.columns == ["checkpoint", "epoch", "clean", "robust (PGD-2)", "verified"]
    assert table.rows == [
        ["best", "2", "20.00", "10.00", "20.00"],
        ["last", "3", "70.00", "60.00", "-"],
        ["last swa", "3", "80.00", "-", "-"],
    ]
    assert table.notes == []


def test_notes_of_the_table_say_what_to_beware_of(run, data, monkeypatch):
    monkeypatch.setattr(Run, "results", lambda self, kind=None: [])
    (run.folder / "result.json").unlink()
    assert run.table().columns == ["checkpoint", "epoch", "clean", "robust (PGD-2)"]
    assert run.table().notes == ["training is not finished"]
    write_index(run.folder, last=12, best={"raw": 8}, selected_on="test", finished=True)
    assert run.table().notes == ["best was selected on the test set"]
    write_index(run.folder, last=12, best={"raw": 8}, selected_on="validation", finished=True)
    replace(data, validation=7).save(run.folder)
    (note,) = run.table().notes
    assert "only 7 validation points" in note
    edit_recipe(run.folder, data="Nothing")
    (run.folder / "data.json").unlink()
    table = open_run(run.folder).table()
    assert (table.rows, len(table.notes)) == ([], 1)
    assert "expected a data set, got 'Nothing'" in table.notes[0]


@pytest.mark.parametrize("kind", ["attack", "certify", "curvature", "explain", "health"])
def test_measurements_are_of_the_best_checkpoint_and_show_no_progress_unless_asked(run, monkeypatch, kind):
    calls = []
    monkeypatch.setattr(Run, "measure", lambda self, settings, **options: calls.append((settings, options)))
    getattr(run, kind)(points=5)
    getattr(run, kind)(points=6, checkpoint=4, weights="swa", progress=True)
    assert [(settings.kind, settings.points) for settings, _ in calls] == [(kind, 5), (kind, 6)]
    assert [options for _, options in calls] == [
        {"checkpoint": "best", "weights": "raw", "progress": False},
        {"checkpoint": 4, "weights": "swa", "progress": True},
    ]


def test_a_stored_result_is_loaded_unless_restarted(run, monkeypatch):
    settings = AttackSettings(attacks="none", points=2)
    result = run.measure(settings, checkpoint="last", weights="swa")
    assert (result.subject.origin.step, result.subject.origin.weights) == (12, "swa")
    calls, compute = [], MeasureAttack.measure
    monkeypatch.setattr(MeasureAttack, "measure", lambda *arguments: calls.append(1) or compute(*arguments))
    assert run.measure(settings, checkpoint="last", weights="swa") == result
    assert not calls
    run.measure(settings, checkpoint="last", weights="swa", restart=True)
    assert calls


def test_progress_is_shown_or_reported(run, monkeypatch):
    shown, reported = [], []

    def show(title):
        shown.append(title)
        return run_module.nullcontext(None)

    monkeypatch.setattr(run_module, "show_progress", show)
    settings = AttackSettings(attacks="none", points=2)
    run.measure(settings)
    run.measure(settings, restart=True, progress=True, on_progress=lambda *task: reported.append(task))
    assert (shown, bool(reported)) == ([], True)
    run.measure(settings, progress=True)
    assert shown == ["attack"]


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_certified", "options", "radius"),
    [
        (False, {}, None),
        (False, {"certify": False}, None),
        (False, {"eps": "1/4"}, 0.25),
        (False, {"eps": "1/4", "certify": True}, 0.25),
        (False, {"eta": 0.1}, 0.5),
        (True, {}, 0.5),
        (True, {"certify": True}, 0.5),
        (True, {"certify": False}, None),
    ],
)
def test_files_have_certificates_if_trained_or_asked_for(folder, tmp_path, monkeypatch, is_certified, options, radius):
    edit_recipe(folder, threat={"norm": "l2", "eps": 0.5})
    calls = []

    def record(model, x, path, *, eps=None, metadata):
        calls.append((len(x), path, eps))
        return Exported(str(path), 1, (), len(x), 0.0)

    monkeypatch.setattr(Run, "is_certified", is_certified)
    monkeypatch.setattr(run_module, "certifier_for", lambda model, **_: model)
    monkeypatch.setattr(run_module, "export", record)
    monkeypatch.setattr(run_module, "export_model", record)
    exported = open_run(folder).export(tmp_path / "net.onnx", points=1, **options)
    assert calls == [(1, tmp_path / "net.onnx", radius)]
    assert exported.warning == ""


def test_wrong_exports_are_refused_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "subject", lambda *_: pytest.fail("this took hours"))
    for options, message in (
        ({"points": 0}, "points: expected at least 1, got 0"),
        ({"certify": False, "eps": "0.1"}, "certify: eps and eta need certificates"),
        ({"certify": False, "eta": 0.1}, "certify: eps and eta need certificates"),
    ):
        with pytest.raises(InputError, match=message):
            run.export(tmp_path / "net.onnx", **options)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not an ONNX file and would be lost"):
        run.export(tmp_path / "notes.txt")


@pytest.fixture
def proven(legacy, run):
    """A stored result with proofs for the checkpoint of this run."""
    folder = run.folder / "certificates"
    result = legacy[1]
    origin = Origin(step=8)
    files = {"certificates.safetensors": sha256(folder / "certificates.safetensors")}
    settings = replace(result.settings, points=4, precision="float64")
    return replace(
        result, folder=folder, files=files, settings=settings, subject=replace(result.subject, origin=origin)
    )


def test_only_stored_proofs_are_written_to_a_file(run, proven, tmp_path):
    path = tmp_path / "proof.safetensors"
    for wrong in (
        replace(proven, settings=replace(proven.settings, smooth=0.25)),
        replace(proven, folder=None),
        replace(proven, subject=replace(proven.subject, origin=Origin())),
    ):
        with pytest.raises(InputError, match="proof: expected a stored result with proofs"):
            run.write_proof(path, wrong)
    with pytest.raises(ResultError, match="has no certificates; measure them again with --restart"):
        run.write_proof(path, replace(proven, files={}))
    path.write_text("mine")
    with pytest.raises(InputError, match="is not a proof file and would be lost"):
        run.write_proof(path, proven)


@pytest.mark.parametrize("precision", ["float32", "float64", None])
def test_a_proof_has_the_points_and_the_precision_of_its_result(run, proven, tmp_path, monkeypatch, precision):
    calls = []
    monkeypatch.setattr(run_module, "write_proof", lambda *arguments: calls.append(arguments))
    result = replace(proven, settings=replace(proven.settings, precision=precision))
    run.write_proof(tmp_path / "proof.safetensors", result)
    ((path, certifier, x, certificate),) = calls
    assert path == tmp_path / "proof.safetensors"
    assert isinstance(certifier, GloRo)
    assert certifier.model.dtype == (torch.float32 if precision == "float32" else torch.float64)
    assert torch.equal(x, run.data.tensors("test", 4)[0])
    stored = load_file(run.folder / "certificates" / "certificates.safetensors")
    assert torch.equal(certificate.radius, stored["radius"])
    assert torch.equal(certificate.prediction, stored["prediction"])
