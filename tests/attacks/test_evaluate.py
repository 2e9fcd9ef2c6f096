"""The evaluation engine: worst case, kills, processes, memory, and claims that do not hold."""

import importlib
import itertools
import json
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.attacks import APGD, FAB, PGD, Square
from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.evaluate import (
    MISCLASSIFIED,
    ROBUST,
    AttackSummary,
    Evaluation,
    automatic_batch_size,
    evaluate,
)
from atoll.attacks.iterative import IterativeAttack
from atoll.data import MemorySplit
from atoll.distributed import is_main, process_group
from atoll.errors import CheckpointError, InputError
from atoll.models import SmallConvNet
from atoll.stats import Accuracy, SampledAccuracy, percent_interval
from atoll.threat import ThreatModel
from attack_cases import THREAT, images, quick
from support import on_two_processes

MODULE = importlib.import_module("atoll.attacks.evaluate")  # the package exports the function of this name


def same(a, b):
    assert torch.equal(a.broken_by, b.broken_by)
    assert torch.equal(a.adversarial, b.adversarial)
    assert [vars(x) | {"seconds": 0} for x in a.attacks] == [vars(x) | {"seconds": 0} for x in b.attacks]


def test_cascade_is_the_pointwise_worst_case_and_its_inputs_prove_it():
    model, split = images()
    result = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)
    x, y, adv = split.images, split.labels, result.adversarial
    right = model(x).argmax(1) == y
    assert result.clean.correct == int(right.sum()) == 36
    assert torch.equal(result.broken_by == MISCLASSIFIED, ~right)
    broken = result.broken_by >= 0
    assert 0 < int(broken.sum()) < 36
    assert (model(adv)[broken].argmax(1) != y[broken]).all()
    assert torch.equal(adv[~broken], x[~broken])
    assert torch.equal(result.distance[~right], torch.zeros(4, 5))
    assert torch.equal(result.distance.isinf().all(1), right & ~broken)
    assert (adv - x).abs().max() <= 0.03 * (1 + 1e-5)
    assert adv.min() >= 0
    assert adv.max() <= 1
    assert result.robust.correct == int((result.broken_by == ROBUST).sum()) == result.attacks[-1].accuracy.correct
    # Each attack takes what the ones before it left.
    left = [result.clean.correct, *(a.accuracy.correct for a in result.attacks)]
    assert [a.attacked for a in result.attacks] == left[:-1]
    assert [a.broken for a in result.attacks] == [a - b for a, b in itertools.pairwise(left)]


def test_individual_attacks_see_all_points_and_agree_with_the_attack_itself():
    model, split = images()
    result = evaluate(model, split, quick(), batch_size=8, seed=3)
    assert {a.attacked for a in result.attacks} == {36}
    right = (model(split.images).argmax(1) == split.labels).nonzero().squeeze(1)
    for name, attack in quick().items():
        x_adv = attack(model, split.images[right], split.labels[right], seed=(3, name), index=right)
        outside = THREAT.distance(x_adv, split.images[right]) > 0.0301  # FAB shows its closest point
        stands = (model(x_adv).argmax(1) == split.labels[right]) | outside
        assert result.accuracy[name].correct == int(stands.sum()), name
    assert result.robust.correct <= min(a.accuracy.correct for a in result.attacks)
    assert list(result.accuracy) == ["clean", *quick(), "worst"]


def test_batches_of_any_size_give_the_same():
    model, split = images(12)
    first = evaluate(model, split, quick(), cascade=True, batch_size=16, keep=True)
    for batch_size in (1, 7, None):
        other = evaluate(model, split, quick(), cascade=True, batch_size=batch_size, keep=True)
        assert torch.equal(first.broken_by, other.broken_by)
        torch.testing.assert_close(first.adversarial, other.adversarial, rtol=1e-9, atol=1e-9)


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_resumes_bit_identically_after_kills_at_random_moments(tmp_path, seed):
    """Every pass of the model may be the last one; when the progress is saved does not matter."""
    model, split = images(24)
    model, split = model.float(), MemorySplit(split.images.float(), split.labels)
    whole = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)
    draw = random.Random(seed)
    left = [0]

    def fuse(module, inputs, output):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    handle = model.register_forward_hook(fuse)
    kills = 0
    while True:
        left[0] = draw.randrange(10, 300)
        try:
            result = evaluate(
                model, split, quick(), cascade=True, batch_size=8, folder=tmp_path, save_every=draw.choice([0.0, 0.002])
            )
            break
        except Killed:
            kills += 1
            assert kills < 300
    handle.remove()
    assert kills  # there are more passes than the longest fuse
    same(result, whole)
    again = evaluate(model, split, quick(), cascade=True, batch_size=8, folder=tmp_path)  # finished: nothing to do
    same(again, whole)
    stored = load_file(tmp_path / "adversarial.safetensors")  # the library's own reader
    assert torch.equal(stored["adversarial"], whole.adversarial)
    assert torch.equal(stored["broken_by"], whole.broken_by)
    assert torch.equal(stored["label"], split.labels)
    torch.testing.assert_close(stored["logits"], model(split.images).detach())


def test_two_processes_give_the_same_as_one(tmp_path):
    model, split = images()
    one = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)

    def share():
        with process_group():
            result = evaluate(model, split, quick(), cascade=True, batch_size=8, folder=tmp_path / "evaluation")
            in_memory = evaluate(model, split, quick(), cascade=True, batch_size=8, keep=True)
        if is_main():
            counts = torch.tensor([[a.attacked, a.broken, a.forward, a.backward] for a in result.attacks])
            tensors = {"broken_by": result.broken_by, "adversarial": result.adversarial, "counts": counts}
            tensors["distance"] = result.distance
            save_file({**tensors, "in_memory": in_memory.adversarial}, tmp_path / "evaluation.safetensors")

    on_two_processes(share, tmp_path)
    two = load_file(tmp_path / "evaluation.safetensors")
    assert torch.equal(two["broken_by"], one.broken_by)
    torch.testing.assert_close(two["adversarial"], one.adversarial, rtol=1e-9, atol=1e-9)
    assert torch.equal(two["in_memory"], two["adversarial"])
    torch.testing.assert_close(two["distance"], one.distance)
    first = one.distance.amin(1).where(one.broken_by >= 0, 0.0).float()
    torch.testing.assert_close(first, THREAT.distance(one.adversarial, split.images).float())
    counts = torch.tensor([[a.attacked, a.broken, a.forward, a.backward] for a in one.attacks])
    assert torch.equal(two["counts"], counts)
    with pytest.raises(CheckpointError, match="a different number of processes"):
        evaluate(model, split, quick(), cascade=True, batch_size=8, folder=tmp_path / "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["progress-0-of-2", "progress-1-of-2", "adversarial"])
def test_two_processes_recover_from_a_damaged_file(tmp_path, name):
    """The other process, which has finished, does not wait for ever."""
    model, split = images()
    folder = tmp_path / "evaluation"

    def share():
        with process_group():
            evaluate(model, split, quick(), cascade=True, batch_size=8, folder=folder)

    on_two_processes(share, tmp_path)
    whole = load_file(folder / "adversarial.safetensors")
    path = folder / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    on_two_processes(share, tmp_path)
    again = load_file(folder / "adversarial.safetensors")
    assert all(torch.equal(again[part], values) for part, values in whole.items())


def test_passes_are_counted_as_they_happen():
    model, split = images()
    seen = []
    handle = model.register_forward_hook(lambda _, inputs, output: seen.append((len(output), output.requires_grad)))
    result = evaluate(model, split, quick(), cascade=True, batch_size=8, check=False)
    handle.remove()
    assert sum(a.forward for a in result.attacks) + len(split) == sum(n for n, _ in seen)  # and the clean pass
    assert sum(a.backward for a in result.attacks) == sum(n for n, graded in seen if graded)
    assert result.attacks[-1].backward == 0  # Square is blind
    assert all(a.seconds >= 0 for a in result.attacks)


def test_memory_that_runs_out_halves_the_batch_and_changes_nothing_else():
    model, split = images(20)
    whole = evaluate(model, split, quick(), cascade=True, batch_size=16, keep=True)

    def small(module, inputs):
        if inputs[0].requires_grad and len(inputs[0]) > 5:
            raise torch.OutOfMemoryError("out of memory")

    handle = model.register_forward_pre_hook(small)
    result = evaluate(model, split, quick(), cascade=True, batch_size=16, keep=True, check=False)
    handle.remove()
    assert result.batch_size <= 5
    assert torch.equal(result.broken_by, whole.broken_by)
    torch.testing.assert_close(result.adversarial, whole.adversarial, rtol=1e-9, atol=1e-9)


def test_a_point_that_does_not_fit_into_memory_alone_is_an_error():
    model, split = images(3)

    def too_small(module, inputs):
        if inputs[0].requires_grad:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(too_small)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, split, quick(), batch_size=4, check=False)


def test_automatic_batch_size_follows_what_the_model_keeps():
    small, large = SmallConvNet((1, 28, 28), 10), SmallConvNet((1, 28, 28), 10, widths=(512, 1024))
    x = torch.rand(1, 1, 28, 28)
    assert 1 <= automatic_batch_size(large, x) <= automatic_batch_size(small, x) <= 512
    assert automatic_batch_size(small, x, largest=64) == 64
    assert not any(p.grad is not None for p in small.parameters())


@pytest.mark.parametrize(
    ("free", "size"),
    [(64 * 7200, 64), (64 * 7200 - 1, 32), (7200, 1), (10, 1), (511 * 7200, 256), (512 * 7200, 512), (10**9, 512)],
)
def test_the_automatic_batch_size_is_a_power_of_two_that_fits_an_eighth_of_the_free_memory(monkeypatch, free, size):
    """A row of 100 numbers needs 16 times its own 400 bytes, and twice what the backward pass reads.

    These are the values of the exponential here, which both operations read; weights are there anyway.
    """

    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100))

        def forward(self, x):
            return (x.exp() * self.weight)[:, :3]

    memory = {"SC_AVPHYS_PAGES": 2 * free, "SC_PAGE_SIZE": 4}
    monkeypatch.setattr(MODULE.os, "sysconf", memory.__getitem__)
    assert automatic_batch_size(Exponential(), torch.rand(3, 100)[:1].clone()) == size


class Liar(IterativeAttack):
    """Claims every point, with inputs far outside the ball or not adversarial at all."""

    def __init__(self, threat, shift):
        super().__init__(threat)
        self.shift, self.attempts = shift, 0

    def num_steps(self, classes):
        return 1

    def init(self, points, streams):
        return points.x, {}

    def step(self, model, rows):
        self.attempts += len(rows)
        rows.x_adv = rows.x + self.shift
        rows.success |= True
        rows.iteration += 1


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_claims_that_do_not_hold_are_not_counted_and_reported(shift):
    model, split = images()
    liar = Liar(THREAT, shift)
    result = evaluate(model, split, {"liar": liar}, keep=True)
    assert liar.attempts == result.attacks[0].attacked == 36  # the model has no faster form that could be wrong
    assert result.robust.correct == result.clean.correct
    assert torch.equal(result.adversarial, split.images)
    assert [warning.kind for warning in result.warnings] == ["unconfirmed"]


def test_nothing_falls_at_eps_zero():
    model, split = images()
    zero = ThreatModel("linf", 0.0)
    attacks = {"APGD": APGD(zero, steps=3), "FAB": FAB(zero, steps=3, targets=9), "Square": Square(zero, queries=9)}
    result = evaluate(model, split, attacks, cascade=True)
    assert result.robust == result.clean


def test_progress_of_another_evaluation_is_refused(tmp_path):
    model, split = images()
    attacks = {"PGD": PGD(THREAT, steps=2)}
    evaluate(model, split, attacks, folder=tmp_path, batch_size=8)
    other, _ = images()
    other[1].weight.data += 1
    shifted = MemorySplit(split.images.clone(), split.labels)
    shifted.images[-1, 0, 0, 0] += 1e-3
    gelu = nn.Sequential(*(nn.GELU() if isinstance(layer, nn.ReLU) else layer for layer in model))
    for changed in (
        {"model": other},
        {"model": gelu},  # the same weights
        {"split": shifted},
        {"attacks": {"PGD": PGD(THREAT, steps=3)}},
        {"attacks": {"PGD": PGD(ThreatModel("linf", 0.031), steps=2)}},
        {"seed": 1},
        {"cascade": True},
    ):
        options = {"model": model, "split": split, "attacks": attacks} | changed
        with pytest.raises(CheckpointError, match="contains the progress of another evaluation"):
            evaluate(**options, folder=tmp_path)
    assert evaluate(model, split, attacks, folder=tmp_path, batch_size=9).batch_size == 8  # that of the progress


def test_progress_in_an_older_format_is_refused(tmp_path, monkeypatch):
    model, split = images(4)
    with monkeypatch.context() as older:
        older.setattr(MODULE, "FORMAT", 5)
        evaluate(model, split, {}, folder=tmp_path)
    with pytest.raises(CheckpointError, match="or Atoll version"):
        evaluate(model, split, {}, folder=tmp_path)


def flip(path, place):
    """Flip a bit of a file; a place below 0 counts from its end."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def clean_input(path):
    """Replace an adversarial input by other valid ones."""
    tensors = load_file(path)
    changed = (tensors["adversarial"] != images()[1].images).flatten(1).any(1).nonzero()[0]
    tensors["adversarial"][changed] = 0.5
    save_file(tensors, path)


PROGRESS, INPUTS = "progress-0-of-1.safetensors", "adversarial.safetensors"
# What happens to a file while an evaluation is interrupted.
DAMAGE = {
    "flipped accuracy": (PROGRESS, lambda path: flip(path, -1)),
    "flipped header": (PROGRESS, lambda path: flip(path, 30)),
    "truncated": (PROGRESS, lambda path: path.write_bytes(path.read_bytes()[:50])),
    "empty": (PROGRESS, lambda path: path.write_bytes(b"")),
    "older version": (PROGRESS, lambda path: save_file({"x": torch.zeros(1)}, path, {"config": "0", "about": "{}"})),
    "pipe": (PROGRESS, pipe),
    "link": (PROGRESS, link),
    "flipped input": (INPUTS, lambda path: flip(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 2000)),
    "flipped logits": (INPUTS, lambda path: flip(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 3)),
    "flipped header of inputs": (INPUTS, lambda path: flip(path, 12)),
    "other inputs": (INPUTS, clean_input),
    "truncated inputs": (INPUTS, lambda path: path.write_bytes(path.read_bytes()[:-4])),
    "empty inputs": (INPUTS, lambda path: path.write_bytes(b"")),
    "no inputs": (INPUTS, lambda path: path.unlink()),
    "pipe of inputs": (INPUTS, pipe),
    "link of inputs": (INPUTS, link),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """An evaluation that was interrupted in its last attack, and the same one without interruption."""
    (model, split), attacks, folder = images(), quick(), tmp_path_factory.mktemp("evaluations")
    options = {"batch_size": 8, "cascade": True}

    def interrupt(stage, done, total):
        if stage == list(attacks)[-1] and done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate(model, split, attacks, folder=folder / "run", save_every=0.0, on_progress=interrupt, **options)
    return folder, evaluate(model, split, attacks, folder=folder / "whole", **options), options


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_progress_is_measured_again(interrupted, tmp_path, name):
    (model, split), attacks = images(), quick()
    folder, whole, options = interrupted
    shutil.copytree(folder / "run", tmp_path / "run")
    file, damage = DAMAGE[name]
    damage(tmp_path / "run" / file)
    again = evaluate(model, split, attacks, folder=tmp_path / "run", **options)
    assert again.accuracy == whole.accuracy
    assert torch.equal(again.broken_by, whole.broken_by)
    mine, other = (load_file(path / INPUTS) for path in (tmp_path / "run", folder / "whole"))
    assert all(torch.equal(mine[key], other[key]) for key in other)


def test_leaves_mode_buffers_and_gradients_alone():
    model = SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=8, batch_norm=True).train()
    model.body[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    split = MemorySplit(torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.long))
    evaluate(model, split, quick())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks


def test_reports_as_json_and_says_how_far_it_is():
    model, split = images()
    calls = []
    result = evaluate(model, split, quick(), cascade=True, keep=True, on_progress=lambda *what: calls.append(what))
    assert json.loads(json.dumps(result.to_json()))["robust"]["correct"] == result.robust.correct
    assert {name for name, _, _ in calls} == {"clean", *quick()}
    assert all(0 <= done <= total for _, done, total in calls)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_progress_is_the_share_of_iterations_and_reported_a_few_times_a_second(monkeypatch, seconds):
    """Four targets with four iterations each, none of which breaks a point; every look at the clock moves it on."""
    (model, split), calls, looks = images(12), [], itertools.count()
    monkeypatch.setattr(MODULE, "time", SimpleNamespace(monotonic=lambda: 1000 + seconds * next(looks)))
    attack = APGD(ThreatModel("linf", 0.0), steps=3, targets=9)
    evaluate(model, split, {"APGD": attack}, check=False, on_progress=lambda *call: calls.append(call))
    iterations = [("APGD", 10 * number / 16, 10) for number in range(1, 16)] if seconds else []
    assert calls == [("clean", 12, 12), *iterations, ("APGD", 10, 10)]


def test_the_table_of_an_evaluation():
    half, most = Accuracy(5, 10), Accuracy(9, 10)
    attacks = (AttackSummary("A", most, 9, 1, 1500, 700, 1.34), AttackSummary("B", half, 8, 4, 40, 0, 0.02))
    warnings = (EvaluationWarning("masked", "the gradient is 0"),)
    table = Evaluation(most, half, attacks, warnings, torch.zeros(10), 8).table()
    rows = [
        ["clean", *percent_interval(most), "-", "-", "-"],
        ["A", *percent_interval(most), "1 of 9", "2,200", "1.3"],
        ["B", *percent_interval(half), "4 of 8", "40", "0.0"],
        ["worst case", *percent_interval(half), "-", "-", "-"],
    ]
    assert (table.title, table.rows, table.notes) == ("10 points", rows, ["masked: the gradient is 0"])
    sample = SampledAccuracy(10_000, 5500, 1200, 4)
    table = Evaluation(most, half, attacks, (), torch.zeros(10), 8, estimate=sample).table()
    bound, estimate = table.rows[3:]
    assert bound == ["at most", *percent_interval(half), "-", "-", "-"]
    assert estimate == ["estimate", *percent_interval(sample), "4 of 1,200 sampled", "-", "-"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attacks": {"clean": PGD(THREAT)}}, "names clean and worst are reserved"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"split": MemorySplit(torch.zeros(0, 1, 6, 6), torch.zeros(0).long())}, "at least one point"),
        ({"split": MemorySplit(torch.rand(3, 1, 6, 6).double() * 255, torch.zeros(3).long())}, "expected values in"),
        ({"split": MemorySplit(torch.rand(3, 1, 6, 6).double(), torch.full((3,), 7))}, "labels: expected classes"),
        ({"model": nn.Identity()}, "expected logits of shape"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(options, sentence):
    model, split = images()
    given = {"model": model, "split": split, "attacks": {"PGD": PGD(THREAT)}} | options
    with pytest.raises(InputError, match=sentence):
        evaluate(given.pop("model"), given.pop("split"), given.pop("attacks"), **given)


def test_inputs_outside_the_bounds_are_refused_in_every_batch():
    """Only the first batch was checked, and later points outside the bounds counted as robust."""
    threat = ThreatModel("linf", 0.1, (0, 1))
    x, y = torch.rand(64, 4), torch.zeros(64, dtype=torch.long)
    x[60:] += 3
    with pytest.raises(InputError, match="expected values in"):
        evaluate(nn.Linear(4, 2).eval(), MemorySplit(x, y), {"PGD": PGD(threat)}, batch_size=32)
