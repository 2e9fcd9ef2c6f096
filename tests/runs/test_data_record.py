"""Somebody with photos of products: faults, a resumed run with other data, a run that is moved."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.cli import main
from atoll.data import ImageFolder
from atoll.errors import DataError, InputError, RecipeError
from atoll.runs.data_record import DataRecord, locate, relocate, without_locations
from atoll.runs.recipe import read_recipe
from atoll.runs.run import open_run
from atoll.runs.train import train
from support import change

RECIPE = {
    "data": {"class_path": "ImageFolder", "init_args": {"root": "photos", "resize": 8, "size": 8, "validation": 0.25}},
    "model": {"class_path": "SmallConvNet", "init_args": {"widths": [2, 2], "hidden": 4}},
    "trainer": {"epochs": 1, "batch_size": 4, "validation_steps": 0, "test_steps": 0},
}


def photos(root: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in ("cup", "fork"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(draw.integers(0, 256, (9, 12, 3), np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with photos and a run that was started there with a relative root."""
    project = tmp_path_factory.mktemp("project")
    photos(project / "photos")
    before = Path.cwd()
    os.chdir(project)
    try:
        train(RECIPE, out="runs/photos")
    finally:
        os.chdir(before)
    return project


@pytest.fixture
def project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with the current folder there."""
    copied = shutil.copytree(finished, tmp_path / "project")
    change(copied / "runs" / "photos" / "data.json", folder=str(copied))
    monkeypatch.chdir(copied)
    return copied


def test_a_corrupt_photo_stops_training_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    for name in ("cup/1.png", "fork/2.png"):
        (tmp_path / "photos" / name).write_bytes(b"broken")
    with pytest.raises(DataError, match=r"photos: 2 of 20 images cannot be read") as caught:
        train(RECIPE, out="run")
    assert "cup/1.png" in str(caught.value)
    assert "fork/2.png" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_resume_with_the_same_data(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the recipe says "photos": relative to where the run was started
    recipe = (project / "runs/photos/recipe.yaml").read_text()
    train(None, out=project / "runs/photos", resume=True)
    assert (project / "runs/photos/recipe.yaml").read_text() == recipe
    assert open_run(project / "runs/photos").data.root == project / "photos"


@pytest.mark.parametrize("change", ["deleted", "added", "edited"])
def test_resume_with_changed_data_is_refused(project: Path, change: str) -> None:
    file = project / "photos/cup/3.png"
    if change == "deleted":
        file.unlink()
    elif change == "added":
        file = shutil.copy(file, file.with_name("new.png"))
    else:
        Image.new("RGB", (12, 9)).save(file)
    expected = rf"the data has changed since this run was started \({change}: cup/{file.name}\); restore it or start"
    with pytest.raises(RecipeError, match=expected):
        train(None, out="runs/photos", resume=True)


def test_moved_data(project: Path, tmp_path: Path) -> None:
    (project / "photos").rename(tmp_path / "elsewhere")
    run = project / "runs/photos"
    with pytest.raises(DataError, match=r"photos: no such folder; .* --data\.root PATH"):
        open_run(run).attack("none")
    moved = open_run(run, data={"root": tmp_path / "elsewhere"})
    assert moved.attack("none").clean == moved.tests()[0].clean
    assert main(["attack", str(run), "--attacks", "none", "--data.root", str(tmp_path / "elsewhere"), "--json"]) == 0
    assert main(["train", "--resume", "--out", str(run), "--data.root", str(tmp_path / "elsewhere"), "--json"]) == 0
    assert open_run(run).data.root == tmp_path / "elsewhere"  # from now on
    (tmp_path / "elsewhere").rename(tmp_path / "third")
    assert train(None, f"root={tmp_path / 'third'}", out=run, resume=True).data.root == tmp_path / "third"


def test_moved_project(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project.rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    assert len(open_run("runs/photos").data.test) == 4


def test_few_validation_points(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run("runs/photos")
    assert "selected on only 4 validation points" in run.selection_warning()
    assert run.selection_warning("last") == ""
    assert main(["attack", "runs/photos", "--attacks", "none"]) == 0
    assert "only 4 validation points" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--resume", "--out", "runs/photos"]) == 0
    assert "only 4 validation points" in " ".join(capsys.readouterr().out.split())


def test_enough_validation_points(trained: Path) -> None:
    assert open_run(trained).selection_warning() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["data.root="],
        ["--data.root"],
        ["--data.root", "--json"],
        ["--data.root", "lr=0.1"],
        ["--data.root="],
        ['data.root=""'],
    ],
)
def test_a_forgotten_value_is_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits-at", "trainer.epochs=1", "--out", str(tmp_path / "run"), *words]) == 1
    assert "root: expected a" in "".join(capsys.readouterr())  # as JSON on standard output
    assert not (tmp_path / "run").exists()


def test_other_overrides_are_refused_on_resume(project: Path) -> None:
    for override in ("trainer.epochs=3", "epochs=3"):
        with pytest.raises(RecipeError, match=rf"keeps its recipe, except .* remove '{override}'"):
            train(None, override, out="runs/photos", resume=True)


def test_locations() -> None:
    inner = {"class_path": "ImageFolder", "init_args": {"root": "photos", "size": 8}}
    tree = {"class_path": "FewerClasses", "init_args": {"data": inner, "count": 2, "root": None}}
    moved = relocate(tree, {"root": "/data"})
    assert moved["init_args"]["data"]["init_args"] == {"root": "/data", "size": 8}
    assert moved["init_args"]["root"] is None
    assert relocate({"class_path": "MNIST"}, {"root": "x"}) == {"class_path": "MNIST", "init_args": {"root": "x"}}
    assert without_locations(moved) == without_locations(tree)
    assert locate(tree, Path("nowhere")) == tree
    other = {"class_path": "Npz", "init_args": {"path": "photos.npz", "augment": ["flip"], "digest": "photos.npz"}}
    assert relocate(other, {"path": "new.npz"})["init_args"] == other["init_args"] | {"path": "new.npz"}
    assert without_locations(other)["init_args"] == other["init_args"] | {"path": None}
    for name in ("MNIST", None, {"class_path": "MNIST"}, {"class_path": "MNIST", "init_args": None}):
        assert without_locations(name) == locate(name, Path("nowhere")) == name
    with pytest.raises(InputError, match=r"expected a location \(root, path, extra, boxes\), got 'size'"):
        relocate(tree, {"size": "9"})
    with pytest.raises(InputError, match=r"data\.root: expected a path, got an empty string"):
        relocate(tree, {"root": ""})


def test_only_locations_that_exist_are_located(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    inner = {"class_path": "ImageFolder", "init_args": {"root": "photos", "size": "photos", "extra": "more"}}
    tree = {"class_path": "FewerClasses", "init_args": {"data": inner}}
    arguments = locate(tree, tmp_path)["init_args"]["data"]["init_args"]
    assert arguments == {"root": str(tmp_path / "photos"), "size": "photos", "extra": "more"}


def test_record(tmp_path: Path) -> None:
    data = ImageFolder(root=photos(tmp_path / "photos"), resize=8, size=8, validation=0.25)
    record = DataRecord.of(data)
    record.save(tmp_path)
    assert DataRecord.load(tmp_path) == record
    assert (record.validation, record.folder) == (4, Path.cwd())
    assert DataRecord.load(tmp_path / "photos") is None


def test_null_is_a_value() -> None:
    assert read_recipe("digits-at", ["data.limit=null"])["data"]["init_args"]["limit"] is None
