"""Accuracy under corruptions: against a plain loop, and independent of kills, damage, batches and processes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.attacks import corruptions as module
from atoll.attacks.corruptions import NAMES, Corruptions, evaluate_corruptions
from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.config import from_plain
from atoll.corruptions import SEVERITIES, corrupt
from atoll.data import TwoMoons, to_float
from atoll.errors import InputError
from atoll.files import read_tensors, write_tensors
from atoll.measure import load_result, measure
from atoll.subject import Subject
from atoll.threat import ThreatModel
from attack_cases import template_model
from support import TinyData


class Killed(Exception):
    pass


def weak_model():
    """Right about most points, but not sure of them."""
    model = template_model()
    model[1].weight.data += 0.3 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def split():
    return TinyData(validation=1 / 6).split("test")


@pytest.fixture(scope="module")
def whole(split):
    return evaluate_corruptions(weak_model(), split, batch_size=32, seed=2)


def test_against_a_plain_loop(split, whole):
    model, x = weak_model(), to_float(split.fetch(torch.arange(len(split))))
    correct = torch.stack([
        torch.stack([model(corrupt(x, name, severity, seed=2)).argmax(1) == split.labels for severity in SEVERITIES])
        for name in NAMES
    ]).double()  # fmt: skip
    counts = [[accuracy.correct for accuracy in each.severities] for each in whole.accuracies]
    assert counts == correct.sum(2).tolist()
    assert [each.name for each in whole.accuracies] == list(NAMES)
    assert whole.mean.value == pytest.approx(correct.mean().item())
    # The points are independent, the corruptions of a point are not.
    assert whole.mean.standard_error == pytest.approx(correct.mean((0, 1)).std().item() / math.sqrt(len(split)))
    for place, estimate in enumerate(whole.severities):
        assert estimate.value == pytest.approx(correct[:, place].mean().item())
        error = correct[:, place].mean(0).std().item() / math.sqrt(len(split))
        assert estimate.standard_error == pytest.approx(error)
    assert 0.4 < whole.mean.value < 0.9  # else this shows nothing


def test_batches_do_not_matter(split, whole):
    assert evaluate_corruptions(weak_model(), split, batch_size=5, seed=2) == whole


def test_another_seed_is_another_result(split, whole):
    assert evaluate_corruptions(weak_model(), split, batch_size=32, seed=3) != whole


def test_processes_share_the_points(split, whole, monkeypatch):
    parts = []
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "all_sum", lambda values: parts.append(values.clone()) or values)
    for number in range(2):
        monkeypatch.setattr(module, "rank", lambda number=number: number)
        evaluate_corruptions(weak_model(), split, batch_size=8, seed=2)
    assert not (parts[0].bool() & parts[1].bool()).any()
    assert parts[0].sum() > 0 < parts[1].sum()
    assert Corruptions.from_correct(sum(parts).bool()) == whole


def interrupted(folder, split, after):
    """An evaluation that dies after some batches of all points."""
    calls = []

    def on_progress(name, done, total):
        calls.append(name)
        if len(calls) == after:
            raise Killed

    with pytest.raises(Killed):
        evaluate_corruptions(weak_model(), split, batch_size=32, seed=2, folder=folder, on_progress=on_progress)


def resumed(folder, split):
    calls = []
    result = evaluate_corruptions(
        weak_model(), split, batch_size=32, seed=2, folder=folder, on_progress=lambda *call: calls.append(call)
    )
    return result, calls


def test_a_killed_evaluation_resumes_after_the_last_severity(tmp_path, split, whole):
    interrupted(tmp_path, split, 31)  # the last batch is not saved
    result, calls = resumed(tmp_path, split)
    assert result == whole
    assert len(calls) == 75 - 30
    assert calls[0] == (NAMES[6], 31 * len(split), 75 * len(split))
    assert calls[-1][1:] == (75 * len(split), 75 * len(split))
    again, calls = resumed(tmp_path, split)
    assert (again, calls) == (whole, [])


@pytest.mark.parametrize("damage", ["empty", "truncated", "bit", "shape", "question", "metadata", "name"])
def test_damaged_progress_is_computed_again(tmp_path, split, whole, damage):
    interrupted(tmp_path, split, 31)
    (path,) = tmp_path.iterdir()
    content, tensors = path.read_bytes(), load_file(path)
    _, about = read_tensors(path, "corruptions")
    if damage == "shape":
        tensors["correct"] = tensors["correct"][..., 1:].contiguous()
        write_tensors(path, "corruptions", tensors, about)
    elif damage == "question":
        write_tensors(path, "corruptions", tensors, {"config": "0"})
    elif damage == "metadata":
        save_file(tensors, path)
    elif damage == "name":
        write_tensors(path, "corruptions", {"correct": tensors["correct"]}, about)
    else:
        flipped = content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]
        path.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "bit": flipped}[damage])
    result, calls = resumed(tmp_path, split)
    assert result == whole
    assert len(calls) == 75


def test_it_is_a_part_of_the_attack_measurement(tmp_path):
    subject = Subject(weak_model(), TinyData(validation=1 / 6), ThreatModel("linf", "0.18"))
    settings = AttackSettings(attacks="none", corruptions=True, points=9, seed=2)
    result = measure(subject, settings, tmp_path)
    assert result.attacks == ()
    assert result.corruptions.accuracies[0].severities[0].total == 9
    assert load_result(result.folder) == result
    assert AttackResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert from_plain(Corruptions, json.loads(json.dumps(result.corruptions.to_json()))) == result.corruptions
    strip = load_file(result.folder / "corrupted.safetensors")["x"]
    x = to_float(subject.data.split("test").fetch(torch.arange(1)))
    assert torch.equal(strip[:1], x)
    assert torch.equal(strip[10:11], corrupt(x, NAMES[9], 3, seed=2))
    assert "mean accuracy under common corruptions" in str(result)
    without = measure(subject, AttackSettings(attacks="none", points=9, seed=2), tmp_path)
    assert without.corruptions is None
    assert without.folder != result.folder


def test_the_table_has_a_row_for_each_corruption_and_says_what_frost_is(whole):
    table = whole.table()
    assert [row[0] for row in table.rows] == [*NAMES[:8], "frost (generated)", *NAMES[9:], "mean"]
    accuracies = whole.accuracies[2].severities
    assert table.rows[2][1:6] == [f"{100 * each.value:.2f}" for each in accuracies]
    assert table.rows[2][6] == f"{sum(100 * each.value for each in accuracies) / 5:.2f}"
    assert table.rows[-1][-1] == f"{100 * whole.mean.value:.2f}"
    assert any("not the photographs of ImageNet-C" in note for note in table.notes)
    low, high = (f"{100 * end:.1f}" for end in whole.mean.interval)
    assert whole.note.endswith(f": {100 * whole.mean.value:.2f} % (95 %: {low}-{high})")


def test_points_that_are_not_images_are_refused_before_any_work(tmp_path, monkeypatch):
    subject = Subject(torch.nn.Linear(2, 2), TwoMoons(), ThreatModel("linf", "0.1"))
    monkeypatch.setattr("atoll.attacks.measure.evaluate", None)  # must not be called
    with pytest.raises(InputError, match=r"corruptions: expected images .* got inputs of shape \(2,\)"):
        measure(subject, AttackSettings(attacks="none", corruptions=True), tmp_path)
