"""The health of a run is measured once, stored, and measured again if any image changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.adopt.adopt import adopt
from atoll.errors import CheckpointError, InputError
from atoll.health import Finding, HealthResult, HealthSettings
from atoll.health import measure as health_measure
from atoll.measure import load_result, measure
from atoll.models.adapted import Conventions
from atoll.runs.run import open_run
from atoll.subject import Subject
from atoll.threat import ThreatModel
from health.health_cases import Stored, Wrapped, gray, gray_net
from subject_cases import OtherPixels, digest_of, read_back, tiny_subject


def test_a_result_is_stored_and_read_back(tmp_path: Path) -> None:
    subject = Subject(gray_net(), gray(), ThreatModel("linf", 0.1))
    seen: list[tuple[str, float, int]] = []
    result = measure(subject, HealthSettings(points=300), tmp_path, on_progress=lambda *task: seen.append(task))
    assert result.findings == ()
    assert result.points == result.clean.total == 300
    assert result.compared == {"test": 360, "training": 1437}
    assert load_result(result.folder) == result == read_back(result)
    assert ("reading images", 1797, 1797) in seen
    assert measure(subject, HealthSettings(points=300), tmp_path) == result
    assert "clean accuracy, %" in str(result)


def test_points_are_drawn_at_random() -> None:
    order = gray().parts[1][1].argsort()  # a test set that is sorted by class
    data = Stored(gray().parts[0], tuple(each[order] for each in gray().parts[1]))  # type: ignore[arg-type]
    subject = Subject(gray_net(), data, ThreatModel("linf", 0.1))
    points = health_measure.MeasureHealth().inputs(subject, HealthSettings(points=60))
    assert len(set(points.labels.tolist())) == 10
    whole = health_measure.MeasureHealth().inputs(subject, HealthSettings(points=None))
    assert torch.equal(whole.labels, data.test.labels)


def test_the_digest_covers_all_images() -> None:
    """Also those that are only compared with the points."""
    digests = {digest_of(tiny_subject(data=data), HealthSettings(points=4)) for data in (None, OtherPixels("train"))}
    assert len(digests) == 2
    settings = HealthSettings(points=4, split="train")
    assert digest_of(tiny_subject(), settings) != digest_of(tiny_subject(data=OtherPixels("test")), settings)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digits in a file, with some test images in the training set."""
    (x, y), (x_test, y_test) = gray().parts
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    x, y = torch.cat([x, x_test[:20]]), torch.cat([y, y_test[:20]])
    images = {"x_train": x.squeeze(1).numpy(), "x_test": x_test.squeeze(1).numpy()}
    np.savez(path, **images, y_train=y.numpy(), y_test=y_test.numpy())  # type: ignore[arg-type]
    return str(path)


def test_an_adopted_run_gets_the_same_advice(arrays: str, tmp_path: Path) -> None:
    net = Wrapped(gray_net(), lambda x: x / 255, lambda z: z.softmax(1))
    shuffled = Wrapped(net, after=lambda z: z.roll(1, 1))
    now = Conventions(outputs="probabilities")
    options = {}
    for name, model, conventions in (
        ("range", net, now), ("labels", shuffled, dataclasses.replace(now, range=(0.0, 255.0))),
    ):  # fmt: skip
        adoption = adopt(model, arrays, out=tmp_path / name, conventions=conventions)
        run = open_run(tmp_path / name)
        assert run.conventions == conventions
        findings = {finding.kind: finding.option for finding in run.health().findings}
        assert findings == {finding.kind: finding.option for finding in adoption.findings}
        assert any("overlap: test images that are also training images: 20 of 360" in str(f) for f in adoption.findings)
        options[name] = findings[name]
    assert options == {"range": "--range 0,255", "labels": "--labels 1,2,3,4,5,6,7,8,9,0"}


def test_a_run_of_atoll_has_no_conventions_to_change(trained: Path) -> None:
    run = open_run(trained)
    assert run.conventions is None
    result = run.health(points=100)
    assert isinstance(result, HealthResult)
    assert all(finding.option == "" for finding in result.findings)
    assert result in run.results("health")


def test_damaged_origin(arrays: str, tmp_path: Path) -> None:
    adopt(gray_net(), arrays, out=tmp_path / "run")
    for content in ("{", '{"conventions": {"mean": "x"}}', "[]", '{"conventions": {"range": [1, 0]}}'):
        (tmp_path / "run" / "adopted.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"adopted\.json is damaged; adopt the model again"):
            _ = open_run(tmp_path / "run").conventions


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="points: expected at least 1"):
        HealthSettings(points=0)
    subject = Subject(nn.Sequential(nn.Flatten(), nn.Linear(7, 10)), gray(), ThreatModel("linf", 0.1))
    with pytest.raises(InputError, match=r"the model fails on images of shape \(1, 8, 8\)"):
        measure(subject, HealthSettings())
    with pytest.raises(InputError, match="the run has no validation points"):
        measure(subject, HealthSettings(split="validation"))


def test_findings_are_sentences() -> None:
    assert str(Finding("softmax", "the outputs are probabilities", "--outputs probabilities")) == (
        "softmax: the outputs are probabilities; use --outputs probabilities"
    )
    assert str(Finding("NaN", "the logits are NaN")) == "NaN: the logits are NaN"
