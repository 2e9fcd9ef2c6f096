"""Starting and resuming a run: what is refused, what is trusted, and what is written."""

import json
import shutil

import pytest
import torch
import yaml

from atoll.errors import AtollError, RecipeError
from atoll.runs import train as train_module
from atoll.runs.recipe import build_recipe
from atoll.runs.run import open_run
from atoll.runs.train import build_model, train
from support import change

TINY = {
    "data": {"class_path": "Digits", "init_args": {"limit": 32}},
    "model": {"class_path": "MLP", "init_args": {"hidden": [4]}},
    "trainer": {"epochs": 1, "batch_size": 16, "validation_steps": 0, "test_steps": 0},
}
MINE = """
from atoll.losses import Standard

class Mine(Standard):
    "A loss."
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "run"
    train(TINY, out=folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_is_continued_only_on_request(folder, tmp_path):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RecipeError, match="run already contains a run; resume it or choose another folder"):
        train(TINY, out=folder)
    for resume in (True, False):
        with pytest.raises(RecipeError, match="there is no run to resume in"):
            train(None, out=tmp_path / "nothing", resume=resume)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_resumes_with_its_recipe_and_no_other(folder):
    weights = open_run(folder).model("last").state_dict()
    run = train(TINY, out=folder, resume=True)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.model("last").state_dict().items())
    for overrides, different in ((["seed=1"], "seed"), (["loss=AT", "epochs=2"], "loss, trainer")):
        with pytest.raises(RecipeError, match=rf"was started with another recipe \({different} differ\); resume it"):
            train(TINY, *overrides, out=folder, resume=True)
    tree = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert tree["loss"]["class_path"] == "atoll.losses.robust.Standard"
    tree["loss"]["class_path"] = "atoll.losses.Standard"  # as if the class had moved since
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    train(build_recipe(TINY), out=folder, resume=True)


@pytest.mark.parametrize(
    "override",
    ["data.limit=16", "data.validation=0.5", "data=MNIST", "trainer.epochs=2", "seed=1", "loss=AT", "attack.path=x",
     "model.root=x"],
)  # fmt: skip
def test_a_resumed_run_may_only_change_where_its_data_is(folder, override):
    with pytest.raises(RecipeError, match=f"a resumed run keeps its recipe, except .*; remove '{override}'"):
        train(None, override, out=folder, resume=True)


def test_a_run_of_another_version_without_a_data_record_resumes(folder):
    (folder / "data.json").unlink()
    train(None, out=folder, resume=True)
    assert (folder / "data.json").exists()


def test_a_recipe_of_the_user_is_trusted_and_the_run_of_another_is_not(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    run = train({**TINY, "loss": f"{tmp_path}/mine.py:Mine"}, out=tmp_path / "run")
    assert [row.weights for row in run.tests()] == ["raw", "raw"]
    with pytest.raises(AtollError, match="runs code from outside Atoll; pass --trust"):
        train(None, out=tmp_path / "run", resume=True)
    train(None, out=tmp_path / "run", resume=True, trust=True)


def test_a_certified_training_ends_with_certificates(tmp_path):
    recipe = {**TINY, "loss": "GloRoCE", "threat": {"norm": "l2", "eps": 0.5}}
    trainers = []
    run = train(recipe, out=tmp_path / "run", on_trainer=trainers.append)
    assert [trainer.folder for trainer in trainers] == [run.folder]
    assert [(row.checkpoint, row.verified.total, row.robust) for row in run.tests()] == [
        ("best", 360, None),
        ("last", 360, None),
    ]
    assert not any(result.settings.attack for result in run.results("certify"))


def test_only_a_resumed_run_uses_the_recorded_number_of_threads(folder, tmp_path, monkeypatch):
    numbers = []
    monkeypatch.setattr(train_module, "settle_threads", lambda recorded, *_: numbers.append(recorded))
    change(folder / "environment.json", threads=3)
    train(None, out=folder, resume=True)
    (tmp_path / "new").mkdir()
    shutil.copy(folder / "environment.json", tmp_path / "new")
    train(TINY, out=tmp_path / "new")
    assert numbers == [3, None]


def test_progress_is_shown_only_if_asked_for(folder, monkeypatch):
    shown, reported = [], []

    def show(title):
        shown.append(title)
        return train_module.nullcontext(None)

    monkeypatch.setattr(train_module, "show_progress", show)
    monkeypatch.setattr(train_module, "TrainingProgress", lambda: train_module.JsonLines(folder / "progress.jsonl"))
    shutil.rmtree(folder / "results")
    train(None, out=folder, resume=True)
    shutil.rmtree(folder / "results")
    train(None, out=folder, resume=True, progress=True, on_progress=lambda *task: reported.append(task))
    assert (shown, bool(reported)) == ([], True)
    train(None, out=folder, resume=True, progress=True)
    assert shown == ["test"]


def test_a_batch_has_at_most_the_points_of_the_data(tmp_path):
    recipe = build_recipe(TINY)
    count = recipe.data.num_own
    message = rf"batch_size: expected at most the number of training points, {count}, got {count + 1}"
    with pytest.raises(RecipeError, match=message):
        train(TINY, f"batch_size={count + 1}", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(TINY, f"batch_size={count}", out=tmp_path / "run")


def test_a_run_records_where_it_was_computed(finished):
    record = json.loads((finished / "environment.json").read_text())
    assert record["torch"] == torch.__version__
    assert (record["processes"], record["gpus"]) == (1, [])
    assert record.keys() >= {"atoll", "python", "machine", "threads", "command"}


def test_building_a_model_leaves_the_global_generator():
    state = torch.get_rng_state()
    build_model(build_recipe(TINY))
    assert torch.equal(state, torch.get_rng_state())
