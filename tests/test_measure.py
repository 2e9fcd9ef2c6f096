"""A result answers exactly one question: that of its subject, inputs and settings."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from atoll.errors import InputError, ResultError
from atoll.measure import (
    MEASUREMENTS,
    Context,
    Measurement,
    Result,
    Settings,
    execution,
    load_result,
    measure,
    save_result,
    select,
    split_digest,
)
from atoll.subject import Origin, Subject
from atoll.threat import ThreatModel
from support import TinyData, tiny_model


@dataclass(frozen=True, kw_only=True)
class CountSettings(Settings):
    """Args:
    factor: what the count is multiplied with.
    batch_size: points per batch.
    """

    kind: ClassVar[str] = "count"
    factor: float = 1.0
    batch_size: int = execution(8)


@dataclass(frozen=True, kw_only=True)
class CountResult(Result):
    kind: ClassVar[str] = "count"
    settings: CountSettings
    correct: int
    note: str = "none"


class Count(Measurement):
    """Correct predictions."""

    settings = CountSettings
    result = CountResult
    calls = 0

    def measure(self, subject: Subject, settings: CountSettings, context: Context) -> dict[str, Any]:
        type(self).calls += 1
        split = select(subject.data, settings.split, settings.points)
        x = split.fetch(torch.arange(len(split))).float() / 255
        correct = int((subject.model(x).argmax(1) == split.labels).sum() * settings.factor)
        context.on_progress("counting", 1, 1)
        if context.folder is not None:
            context.folder.mkdir(parents=True, exist_ok=True)
            (context.folder / "extra.txt").write_text("x")
        return {"correct": correct}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(Count, "calls", 0)
    monkeypatch.setitem(MEASUREMENTS._loaded, "count", dataclasses.replace(MEASUREMENTS.resolve("attack"), cls=Count))


@pytest.fixture(scope="module")
def subject():
    return make_subject()


def make_subject(change=None, step=3):
    model = tiny_model().eval()
    if change is not None:
        with torch.no_grad():
            change(model)
    return Subject(model, TinyData(), ThreatModel("linf", 0.1), origin=Origin("run", step, 1))


def test_a_result_is_measured_once_and_then_loaded(subject, tmp_path):
    first = measure(subject, CountSettings(), tmp_path)
    assert measure(subject, CountSettings(), tmp_path) == first
    assert Count.calls == 1
    assert load_result(first.folder) == first
    assert first.folder.parent == tmp_path / "count"
    assert (first.subject, first.points) == (subject.record, 32)
    assert measure(subject, CountSettings(batch_size=3), tmp_path) == first  # how, not what
    assert Count.calls == 1


@pytest.mark.parametrize(
    "settings",
    [CountSettings(factor=2.0), CountSettings(points=3), CountSettings(split="train"), CountSettings(seed=1)],
)
def test_other_settings_are_another_question(subject, tmp_path, settings):
    first, other = (measure(subject, each, tmp_path) for each in (CountSettings(), settings))
    assert first.folder != other.folder
    assert Count.calls == 2


def test_other_weights_are_another_subject_even_at_the_same_step(subject, tmp_path):
    first = measure(subject, CountSettings(), tmp_path)

    def change(model):
        weight = next(model.parameters())
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(10.0))

    other = measure(make_subject(change), CountSettings(), tmp_path)
    assert other.folder != first.folder
    same = measure(make_subject(step=7), CountSettings(), tmp_path)
    assert same.folder == first.folder  # the same function, wherever it was saved


def test_other_inputs_are_another_question(subject, tmp_path):
    first = measure(subject, CountSettings(), tmp_path)
    other = make_subject()
    other.data.test.images[0, 0, 0, 0] ^= 1
    assert split_digest(other.data.test) != split_digest(subject.data.test)
    assert measure(other, CountSettings(), tmp_path).folder != first.folder


def test_nothing_is_stored_without_a_folder(subject):
    result = measure(subject, CountSettings())
    assert result.folder is None
    assert result.subject.digest == ""


def test_restart_measures_again(subject, tmp_path):
    measure(subject, CountSettings(), tmp_path)
    measure(subject, CountSettings(), tmp_path, restart=True)
    assert Count.calls == 2


def test_a_damaged_result_is_measured_again_and_refused_when_read(subject, tmp_path):
    first = measure(subject, CountSettings(), tmp_path)
    path = first.folder / "result.json"
    path.write_text(path.read_text().replace(f'"correct": {first.correct}', '"correct": 31'))
    with pytest.raises(ResultError, match="checksum"):
        load_result(first.folder)
    assert measure(subject, CountSettings(), tmp_path).correct == first.correct
    assert Count.calls == 2


def test_a_result_in_the_place_of_another_is_measured_again(subject, tmp_path):
    one, two = (measure(subject, CountSettings(factor=factor), tmp_path) for factor in (1.0, 2.0))
    (two.folder / "result.json").write_bytes((one.folder / "result.json").read_bytes())
    with pytest.raises(ResultError, match="the result of another measurement"):
        load_result(two.folder)
    assert measure(subject, CountSettings(factor=2.0), tmp_path).correct == two.correct != one.correct


def test_files_of_a_result_are_verified(subject, tmp_path):
    result = measure(subject, CountSettings(), tmp_path)
    assert result.file("extra.txt") is None  # only tensors and arrays have digests
    np.savez(result.folder / "extra.npz", x=np.zeros(3))
    result = save_result(result, result.folder)
    assert load_result(result.folder).file("extra.npz") == result.folder / "extra.npz"
    np.savez(result.folder / "extra.npz", x=np.ones(3))
    with pytest.raises(ResultError, match=r"extra\.npz cannot be read: damaged"):
        result.file("extra.npz")
    (result.folder / "extra.npz").unlink()
    with pytest.raises(ResultError, match=r"extra\.npz cannot be read: the file is missing"):
        result.file("extra.npz")
    assert result.file("other.npz") is None
    assert measure(subject, CountSettings()).file("extra.npz") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "nothing"}', '{"kind": 3}', "[" * 100_000])
def test_what_is_not_a_result_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ResultError):
        load_result(tmp_path)


def test_older_results_load_and_newer_ones_are_refused(subject, tmp_path):
    tree = measure(subject, CountSettings(), tmp_path).to_json()
    del tree["note"], tree["environment"], tree["settings"]["factor"]
    assert CountResult.from_json(tree).settings == CountSettings()
    with pytest.raises(ResultError, match="newer version"):
        CountResult.from_json(tree | {"version": 99})


def test_results_are_json(subject, tmp_path):
    result = measure(subject, CountSettings(), tmp_path)
    tree = json.loads((result.folder / "result.json").read_text())
    assert {"kind", "version", "subject", "inputs", "settings", "environment", "correct", "checksum"} <= tree.keys()
    assert "batch_size" not in tree["settings"]


def test_settings_are_checked():
    with pytest.raises(InputError, match="points: expected at least 1, got 0"):
        CountSettings(points=0)
    with pytest.raises(InputError, match="has no validation points"):
        select(TinyData(validation=0), "validation", None)
