"""``atoll predict`` as a user runs it."""

import json

import pytest
import torch
from PIL import Image

from atoll.cli import main
from atoll.data import Digits
from atoll.runs.predict import ClassProbability, Prediction
from atoll.runs.run import Run, open_run


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(Digits().test.fetch(torch.arange(6))):
        Image.fromarray(image[0].numpy()).save(folder / f"{number}.png")
    return folder


def predict(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["predict", *map(str, words)]) == code
    return capsys.readouterr()


def test_table(trained, images, capsys, monkeypatch):
    monkeypatch.chdir(images)  # short names fit into the table
    text = " ".join(predict(capsys, trained, "0.png", "--top", 2).out.split())
    (prediction,) = open_run(trained).predict(images / "0.png", top=2)
    first, second = prediction.classes
    assert f"{first.name} │ {100 * first.probability:.2f} │ {second.name} {100 * second.probability:.2f}" in text
    assert "radius" not in text
    assert "next classes" not in predict(capsys, trained, images, "--top", 1).out


CERTIFIED = [
    Prediction("a.png", (ClassProbability("cat", 0.75), ClassProbability("dog", 0.2)), radius=0.4321),
    Prediction("b.png", (ClassProbability("dog", 0.5), ClassProbability("cat", 0.4)), radius=0.1, abstains=True),
]


@pytest.fixture
def certified(monkeypatch):
    """A run that certifies; tests/runs/test_predict.py has a real one, which takes seconds to prove its norms."""
    monkeypatch.setattr(Run, "predict", lambda self, *images, **options: CERTIFIED)


def test_table_of_certified_predictions(trained, capsys, certified):
    text = " ".join(predict(capsys, trained, "a.png", "b.png").out.split())
    assert "certified radius" in text
    assert "│ a.png │ cat │ 75.00 │ 0.432 │ dog 20.00 │" in text
    assert "│ b.png │ dog │ 50.00 │ abstains (0.1) │ cat 40.00 │" in text


def test_json_of_certified_predictions(trained, capsys, certified):
    answer = json.loads(predict(capsys, trained, "a.png", "b.png", "--json").out)
    assert answer["predictions"][1] == {
        "image": "b.png",
        "classes": [{"name": "dog", "probability": 0.5}, {"name": "cat", "probability": 0.4}],
        "radius": 0.1,
        "abstains": True,
    }


def test_json_is_what_python_returns(trained, images, capsys):
    answer = json.loads(predict(capsys, trained, images, "--json").out)
    assert (answer["schema"], answer["command"], answer["run"]) == (1, "predict", str(trained))
    predictions = open_run(trained).predict(images)
    assert [entry["image"] for entry in answer["predictions"]] == [str(images / f"{n}.png") for n in range(6)]
    for entry, prediction in zip(answer["predictions"], predictions, strict=True):
        assert entry["classes"] == [vars(each) for each in prediction.classes]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["{run}"], 2, "missing IMAGE"),
        (["{run}", "none.png"], 1, "1 of 1 images cannot be read: none.png: no such file"),
        (["{run}", "{images}", "--checkpoint", "bset"], 1, "--checkpoint: expected best, last or a step, got 'bset'"),
        (["{run}", "{images}", "--top", "few"], 2, "--top: expected a whole number, got 'few'"),
        (["{run}x", "{images}"], 1, "{run}x is not a run; did you mean {run}?"),
    ],
)
def test_mistakes_are_one_sentence(trained, images, capsys, words, code, sentence):
    words = [word.format(run=trained, images=images) for word in words]
    error = " ".join(predict(capsys, *words, code=code).err.split())
    assert sentence.format(run=trained) in error
