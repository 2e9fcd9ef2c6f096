"""Predictions for image files."""

import json
import shutil

import pytest
import torch
from PIL import Image

from atoll.certify import certifier_for
from atoll.data import Digits
from atoll.errors import CheckpointError, DataError, InputError
from atoll.runs import predict as predict_module
from atoll.runs.run import open_run
from support import change, rewrite


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with twenty test points."""
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(Digits().test.fetch(torch.arange(20))):
        Image.fromarray(image[0].numpy()).save(folder / f"{number:02d}.png")
    return folder


@pytest.fixture
def x():
    return Digits().tensors("test", 20)[0]


@pytest.mark.parametrize("batch_size", [64, 7])
def test_probabilities_are_those_of_the_model(trained, images, x, monkeypatch, batch_size):
    monkeypatch.setattr(predict_module, "BATCH_SIZE", batch_size)
    run = open_run(trained)
    predictions = run.predict(images, top=10, checkpoint="last")
    with torch.no_grad():
        probabilities = run.model("last")(x).softmax(1)
    assert [prediction.image for prediction in predictions] == [f"{images}/{number:02d}.png" for number in range(20)]
    for prediction, row in zip(predictions, probabilities, strict=True):
        values = [each.probability for each in prediction.classes]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([float(row[int(each.name)]) for each in prediction.classes], rel=1e-5)
        assert (prediction.radius, prediction.abstains) == (None, False)


def test_certified_radii_are_those_of_the_certifier(gloro_run, images, x):
    predictions = gloro_run.predict(images, eps="0.3", top=1)
    certificate = certifier_for(gloro_run.model().double())(x)
    assert [int(prediction.classes[0].name) for prediction in predictions] == certificate.prediction.tolist()
    assert [prediction.radius for prediction in predictions] == pytest.approx(certificate.radius.tolist(), rel=1e-9)
    abstains = [prediction.abstains for prediction in predictions]
    assert abstains == (certificate.radius < 0.3).tolist()
    assert {True, False} == set(abstains)


def test_files_that_cannot_be_read_are_listed_at_once(trained, images, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_module, "BATCH_SIZE", 2)  # they are in different batches
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("no image")
    Image.new("L", (9, 8)).save(tmp_path / "c.png")
    with pytest.raises(DataError) as error:
        open_run(trained).predict(tmp_path / "a.png", images, tmp_path, tmp_path / "none.png")
    message = str(error.value)
    assert message.startswith("5 of 25 images cannot be read:")
    invalid = "not a valid image file"
    for part in (f"a.png: {invalid}", f"b.png: {invalid}", "expected 8 x 8 pixels, got 9 x 8", "none.png: no such"):
        assert part in message


def test_the_data_need_not_be_there(trained, images, monkeypatch):
    def load(self):
        raise DataError("the data are gone")

    monkeypatch.setattr(Digits, "load", load)
    monkeypatch.setattr(Digits, "classes", property(load))
    assert len(open_run(trained).predict(images)) == 20


def test_names_of_classes(trained, images, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    record = json.loads((folder / "data.json").read_text())
    names = [f"digit {number}" for number in range(10)]
    change(folder / "data.json", classes=names)
    assert open_run(folder).predict(images)[0].classes[0].name.startswith("digit ")
    change(folder / "data.json", classes=names[:9])
    with pytest.raises(CheckpointError, match="expected the names of 10 classes, got 9"):
        open_run(folder).predict(images)
    del record["classes"]  # a run of an older version
    rewrite(folder / "data.json", record)
    assert open_run(folder).classes == Digits.classes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top": 0}, "top: expected at least 1, got 0"),
        ({"eps": "0.1"}, "eps: this run was not trained for certification"),
        ({"checkpoint": "lsat"}, "checkpoint: expected best, last or a step, got 'lsat'; did you mean last?"),
        ({"weights": "swa"}, "weights: expected raw, got 'swa'"),
    ],
)
def test_wrong_arguments_are_one_sentence(trained, images, options, sentence):
    with pytest.raises((InputError, CheckpointError)) as error:
        open_run(trained).predict(images, **options)
    assert sentence in str(error.value)
