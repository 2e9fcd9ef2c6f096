"""The index during training, and the learning rate that follows it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.curvature import EmpiricalRisk, Traces
from atoll.curvature.wci import wci_from
from atoll.data import batches, in_order
from atoll.errors import InputError
from atoll.modules import evaluation_mode
from atoll.training.methods import MeasureWCI, WCISchedule
from atoll.training.observers import JsonLines, read_metrics
from curvature.cases import block_traces, dense
from support import assert_identical, tiny_trainer, weights


def after_one_step(loss="at", **options):
    """A trainer whose model has batch-norm statistics, gradients, and modules in both modes."""
    trainer = tiny_trainer(loss, **options)
    trainer.train_step(next(batches(trainer.data.train, in_order(16, 16))))
    return trainer


@pytest.mark.parametrize("loss", ["standard", "at", "trades"])
def test_it_is_the_index_of_the_dense_hessian_at_the_runs_own_adversarial_inputs(loss):
    trainer = after_one_step(loss, double=True)
    method = MeasureWCI(points=10, probes=60)
    index = method.measure(trainer).index
    x, y = method.sample(trainer, "train")
    x_adv = trainer.attack(trainer.model, x, y, seed=(trainer.seed, "wci")) if trainer.attack else None
    with evaluation_mode(trainer.model):
        p = EmpiricalRisk(trainer.model, trainer.loss, x, y, x_adv)
        traces = dict(zip(p.names, block_traces(p, dense(p)).tolist(), strict=True))
    exact = sum(
        float(w.detach().norm()) * math.sqrt(max(traces[name], 0))
        for name, w in trainer.model.named_parameters()
        if w.dim() > 1
    )
    assert index.standard_error < 0.1 * exact
    assert abs(index.value - exact) < 4 * index.standard_error


def test_measuring_changes_nothing():
    trainer = after_one_step(batch_norm=True)
    frozen = next(m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d))
    frozen.eval()
    before, modes = weights(trainer.model), [m.training for m in trainer.model.modules()]
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    generator = torch.get_rng_state()
    method = MeasureWCI(points=10, gap=True)
    method.setup(trainer)
    first, second = {}, {}
    trainer.epoch = 1
    method.after_epoch(trainer, first)
    method.after_epoch(trainer, second)
    assert first == second
    assert_identical(weights(trainer.model), before)
    assert_identical({name: p.grad for name, p in trainer.model.named_parameters()}, gradients)
    assert [m.training for m in trainer.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)


def test_only_the_index_is_measured_by_default():
    trainer, metrics = after_one_step(), {}
    trainer.epoch = 1
    MeasureWCI(points=8).after_epoch(trainer, metrics)
    assert sorted(metrics) == ["wci", "wci_negative", "wci_root_trace", "wci_standard_error", "wci_weight_norm"]


def test_the_gap_is_that_of_the_errors_on_both_sides():
    trainer, metrics = after_one_step(), {}
    trainer.epoch = 1
    MeasureWCI(points=96, gap=True).after_epoch(trainer, metrics)
    wrong = {}
    for split in ("train", "test"):  # all of them
        x, y = trainer.data.tensors(split)
        x_adv = trainer.attack(trainer.model, x, y, seed=(trainer.seed, "wci"))
        with torch.no_grad(), evaluation_mode(trainer.model):
            wrong[split] = float((trainer.model(x_adv).argmax(1) != y).double().mean())
    assert metrics["gap_error"] == pytest.approx(wrong["test"] - wrong["train"])
    assert metrics["gap_test_error"] == pytest.approx(wrong["test"])


def test_it_is_recorded_at_its_epochs(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trainer = tiny_trainer(epochs=5, observers=[JsonLines(path)])
    trainer.methods = (MeasureWCI(start=0.3, interval=2, points=8),)
    trainer.fit()
    records = [r for r in read_metrics(path)[0] if r["kind"] == "epoch"]
    assert [r["epoch"] for r in records if "wci" in r] == [2, 4]
    assert all(r["wci"] > 0 and r["wci_standard_error"] > 0 and r["wci_negative"] == 0 for r in records if "wci" in r)
    assert all(r["wci"] <= r["wci_weight_norm"] * r["wci_root_trace"] for r in records if "wci" in r)
    norm = math.sqrt(sum(float(w.detach().square().sum()) for w in trainer.model.parameters() if w.dim() > 1))
    at_4 = next(r["wci_weight_norm"] for r in records if r["epoch"] == 4)
    assert at_4 == pytest.approx(norm, rel=0.5)  # of the weights, one epoch later


def test_the_rule_by_hand(monkeypatch, tmp_path):
    """Threshold 100, half of the average stays: 80; (80 + 320) / 2 = 200; (200 + 600) / 2 = 400."""
    given = iter([80.0, 320.0, 600.0, 1.0])

    def measure(self, trainer):
        return wci_from({"w": 1.0}, Traces(("w",), torch.tensor([[[next(given) ** 2]]]), "exact", exact=True))

    monkeypatch.setattr(MeasureWCI, "measure", measure)
    path = tmp_path / "metrics.jsonl"
    trainer = tiny_trainer(epochs=8, observers=[JsonLines(path)])
    trainer.methods = (WCISchedule(threshold=100.0, smoothing=0.5, start=0.25, interval=2),)  # after 2, 4, 6, 8
    trainer.fit()
    rates = [r["learning_rate"] for r in read_metrics(path)[0] if r["kind"] == "epoch"]
    schedule = [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]  # Piecewise, at 1/2 and 3/4
    factors = [1, 1, 1, 1, 100 / 200, 100 / 200, 100 / 400, 100 / 400]
    assert rates == pytest.approx([0.05 * a * b for a, b in zip(schedule, factors, strict=True)])


def test_without_a_threshold_training_is_the_same_to_the_bit():
    plain, measured = tiny_trainer(batch_norm=True), tiny_trainer(batch_norm=True)
    measured.methods = (WCISchedule(threshold=1e9, start=0.0, points=8, gap=True),)
    plain.fit(), measured.fit()
    assert_identical(weights(plain.model), weights(measured.model))


def test_a_low_threshold_changes_training():
    plain, slowed = tiny_trainer(), tiny_trainer()
    slowed.methods = (WCISchedule(threshold=1e-6, start=0.0, points=8),)
    plain.fit(), slowed.fit()
    assert any(not torch.equal(a, b) for a, b in zip(plain.model.parameters(), slowed.model.parameters(), strict=True))


def test_epochs_of_measurements():
    """From half of nine epochs on, every second one."""
    method = MeasureWCI(start=0.5, interval=2)
    trainers = [SimpleNamespace(settings=SimpleNamespace(epochs=9), epoch=epoch) for epoch in range(1, 10)]
    due = [trainer.epoch for trainer in trainers if method.due(trainer)]
    assert due == [6, 8]
    assert all(MeasureWCI().due(trainer) for trainer in trainers)


def test_the_learning_rate_is_multiplied_in_every_group():
    method = WCISchedule(threshold=10.0)
    trainer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 2.0}]))
    method.before_step(trainer, None)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5, 2.0]  # nothing is measured yet
    assert method.follow(10.0) == 1.0  # the threshold itself is not too much
    assert method.follow(70.0) == 0.25
    again = WCISchedule(threshold=10.0)
    again.load_state_dict(method.state_dict())
    again.before_step(trainer, None)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.125, 0.5]


def test_two_of_them_keep_to_their_own_epochs():
    trainer = tiny_trainer(epochs=2)
    trainer.methods = (MeasureWCI(points=8), late := WCISchedule(start=0.9, interval=2, points=8))
    trainer.epoch = 1
    metrics = {}
    for method in trainer.methods:
        method.after_epoch(trainer, metrics)
    assert "wci" in metrics
    assert late.average is None


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: MeasureWCI(start=1.0), "start: expected"),
        (lambda: MeasureWCI(interval=0), "interval: expected"),
        (lambda: MeasureWCI(points=0), "points: expected"),
        (lambda: MeasureWCI(probes=1), "probes: expected"),
        (lambda: WCISchedule(threshold=0.0), "threshold: expected"),
        (lambda: WCISchedule(smoothing=1.0), "smoothing: expected"),
    ],
)
def test_nonsense_is_refused(build, sentence):
    with pytest.raises(InputError, match=sentence):
        build()


def test_what_cannot_be_measured_is_refused_before_training():
    with pytest.raises(InputError, match="gap: expected a loss with an attack, got Standard"):
        MeasureWCI(gap=True).setup(tiny_trainer("standard"))
    trainer = tiny_trainer()
    trainer.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(InputError, match="depends on the rest of the batch"):
        MeasureWCI().setup(trainer)
