"""Accuracy against eps: exact distances, consistency with other attacks, batches, and resuming."""

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from atoll.attacks import FMN, curve, evaluate
from atoll.attacks.curve import Curve, measure_curve
from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.attacks.suites import parse_attacks
from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.losses.objectives import margin
from atoll.measure import load_result, measure
from atoll.stats import Accuracy, percent_interval
from atoll.subject import Subject
from atoll.threat import ThreatModel
from attack_cases import images, template_model
from support import TinyData

THREAT = ThreatModel("linf", "0.18")


class Killed(Exception):
    pass


@pytest.fixture
def short(monkeypatch):
    """A curve of FMN alone, with few steps."""

    def minimal(threat):
        return {"FMN": FMN(threat, steps=30, minimum_norm=True)}

    monkeypatch.setattr(curve, "minimal", minimal)


@functools.cache
def subject():
    return Subject(template_model(), TinyData(validation=1 / 6), THREAT)


def both(model, split, attacks="none", threat=THREAT, **options):
    evaluation = evaluate(model, split, parse_attacks(attacks, threat), batch_size=options.pop("batch_size", 16))
    return evaluation, measure_curve(model, split, threat, evaluation, **options)[0]


def test_counts_points_beyond_eps():
    distance = torch.tensor([0.0, 0.25, 0.5, 0.5, math.inf], dtype=torch.float64)
    result = Curve.from_distances(distance, torch.arange(5) > 0, "l2", marks=(0.3,))
    assert result.eps == (0.0, 0.25, 0.3, 0.5)
    assert [each.correct for each in result.accuracy] == [4, 3, 3, 1]
    assert result.median == 0.5
    assert [result.at(eps).correct for eps in (0.2, 0.25, 0.4, 9.0)] == [4, 3, 3, 1]  # unbroken at every eps


@pytest.mark.parametrize("robust", [True, False])
def test_without_distances(robust):
    """All points are misclassified, or none can be broken."""
    correct = torch.full((3,), robust)
    result = Curve.from_distances(torch.full((3,), math.inf).where(correct, 0.0), correct, "l1")
    assert (result.eps, result.median) == ((0.0,), None)
    assert result.at(1.0).correct == 3 * robust


def test_many_distances_are_a_hundred_quantiles_of_which_the_table_shows_a_tenth():
    distance = torch.arange(1, 1002, dtype=torch.float64).flip(0) / 8
    result = Curve.from_distances(distance, distance > 0, "l2")
    assert result.eps == (0.0, *((1 + 10 * number) / 8 for number in range(101)))
    assert [each.correct for each in result.accuracy] == [1001, *(1000 - 10 * number for number in range(101))]
    eps, accuracy = zip(*((n / 4, Accuracy(100 - n, 100)) for n in range(101)), strict=True)
    short = Curve("l2", eps, accuracy, None)
    table = short.table()
    assert table.rows == [[f"{2.5 * n:.4g}", *percent_interval(Accuracy(100 - 10 * n, 100))] for n in range(11)]
    assert table.columns == ["eps (l2)", "accuracy %", "95 %"]
    assert table.notes[0].endswith("(l2): at most none (less than half of the points are broken)")
    (axis,) = short.plot().axes
    (line,) = axis.lines
    assert list(line.get_xdata()) == list(short.eps)
    assert list(line.get_ydata()) == pytest.approx([100.0 - n for n in range(101)])
    (band,) = axis.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == pytest.approx((0, 100))
    middle = [100 * end for end in Accuracy(50, 100).interval]
    assert all(abs(ends - end).min() < 1e-9 for end in middle)
    assert axis.get_ylim() == (0, 100)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_is_the_exact_curve_of_a_linear_model(norm):
    model = template_model().double()
    test = TinyData().split("test")
    x, y = test.fetch(torch.arange(12)).double() / 255, test.labels[:12]
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    logits = x.flatten(1) @ weight.T + bias
    dual = torch.linalg.vector_norm(weight[y][:, None] - weight, {"linf": 1, "l2": 2, "l1": math.inf}[norm], dim=2)
    truth = ((logits.gather(1, y[:, None]) - logits) / dual).scatter(1, y[:, None], math.inf).amin(1).clamp_min(0)
    assert (margin(logits, y) > 0).equal(truth == 0)
    # Bounds that no perturbation of this size reaches.
    _, result = both(model, MemorySplit(x, y), threat=ThreatModel(norm, 0.1, (-4.0, 5.0)))
    for eps, accuracy in zip(result.eps, result.accuracy, strict=True):
        assert accuracy.correct >= int((truth > eps).sum())  # an upper bound
        assert accuracy.correct <= int((1.06 * truth > eps).sum()) + (eps == 0)
    assert result.median == pytest.approx(float(truth[truth > 0].median()), rel=0.05)


def test_is_never_above_what_other_attacks_know(monkeypatch):
    model, split = images()
    weak = {"FMN": FMN(ThreatModel("linf", 1e30), steps=2, minimum_norm=True)}
    monkeypatch.setattr(curve, "minimal", lambda threat: weak)
    threat = ThreatModel("linf", 0.05)
    evaluation, result = both(model, split, "APGD-CE", threat)
    assert evaluation.robust.correct < evaluation.clean.correct
    assert result.at(0.05) == evaluation.accuracy["APGD-CE"]
    assert 0.05 in result.eps


def test_does_not_depend_on_the_batch_size(short):
    model, split = images(16)
    first, second = (both(model, split, batch_size=size)[1] for size in (16, 5))
    assert [each.correct for each in first.accuracy] == [each.correct for each in second.accuracy]
    torch.testing.assert_close(torch.tensor(first.eps), torch.tensor(second.eps), rtol=1e-6, atol=1e-9)


def test_is_stored_with_the_distance_of_every_point(tmp_path, short):
    result = measure(subject(), AttackSettings(attacks="PGD-3", points=12, curve=True), tmp_path)
    assert load_result(result.folder) == result
    assert AttackResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    distance = load_file(result.folder / "distances.safetensors")["distance"]
    assert len(distance) == 12
    assert int((distance > 0).sum()) == result.clean.correct
    assert int((distance > 0.18).sum()) == result.at_eps.correct <= result.robust.correct
    assert "linf 0.18 on the curve: at most" in str(result)
    assert len(result.curve.plot().axes) == 1
    assert "eps (linf)" in str(result.curve)
    alone = measure(subject(), AttackSettings(attacks="none", points=12, curve=True), tmp_path)
    assert alone.attacks == ()
    assert alone.at_eps is None
    assert alone.curve.median == pytest.approx(result.curve.median, rel=0.01)


def test_an_interrupted_curve_resumes_bit_identically(tmp_path, short, monkeypatch):
    asked = AttackSettings(attacks="none", points=12, curve=True, batch_size=4)
    whole = measure(subject(), asked, tmp_path / "whole")
    run, step, fuse = curve.evaluate, FMN.step, [35]
    monkeypatch.setattr(curve, "evaluate", lambda *a, **k: run(*a, **k, save_every=0.0))

    def fused(self, model, rows):
        fuse[0] -= 1
        if fuse[0] == 0:
            raise Killed
        step(self, model, rows)

    monkeypatch.setattr(FMN, "step", fused)
    with pytest.raises(Killed):
        measure(subject(), asked, tmp_path / "killed")
    fuse[0] = -1
    again = measure(subject(), asked, tmp_path / "killed")
    assert -fuse[0] < 90  # it did not start over: 30 steps for each of three batches
    assert (again.curve.eps, again.curve.accuracy) == (whole.curve.eps, whole.curve.accuracy)
    files = [load_file(result.folder / "distances.safetensors") for result in (whole, again)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_surrogate_is_refused():
    with pytest.raises(InputError, match="curve: expected no surrogate"):
        AttackSettings(curve=True, surrogate="run")
