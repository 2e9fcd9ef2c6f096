"""The threatening class compared with a loop over all classes, and its record during training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import support
from atoll.certify import GloRo, heuristic_certifier
from atoll.data.base import sample
from atoll.errors import InputError
from atoll.models import MLP
from atoll.training.observers import Observer
from atoll_papers.measure_threats import MeasureThreats, runner_up, share_changed, threatening
from support import CERTIFIED, assert_identical, tiny_trainer, weights


def net(seed, classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP((3,), classes, hidden=(6,)).double()


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seed=st.integers(0, 1000), classes=st.integers(2, 6))
def test_the_threatening_class_limits_the_radius(seed, classes):
    model = net(seed, classes)
    x = rand(5, 3, seed=seed)
    certifier = GloRo.proven(model)
    nearest_class, radius, k = threatening(certifier, x), certifier(x).radius, certifier.constants.lipschitz
    for row, f in enumerate(model(x).detach()):
        j = int(f.argmax())
        distances = {i: float((f[j] - f[i]) / k[j, i]) for i in range(classes) if i != j}
        nearest = min(distances, key=distances.get)
        assert int(nearest_class[row]) == nearest
        assert float(radius[row]) == pytest.approx(distances[nearest], rel=1e-6, abs=1e-9)


def test_without_constants_it_is_the_runner_up():
    model, x = net(0), rand(20, 3)
    assert torch.equal(threatening(runner_up(model, 4), x), model(x).topk(2).indices[:, 1])


class Epochs(Observer):
    """Weights and records of every epoch."""

    def start(self, trainer):
        self.trainer, self.certifiers, self.records = trainer, [], []

    def record(self, record):
        if record["kind"] == "epoch":
            self.records.append(record)
            model = tiny_trainer().model
            model.load_state_dict(weights(self.trainer.model))
            estimate = self.trainer.lipschitz
            certifier = None if estimate is None else heuristic_certifier(self.trainer.model, estimate)
            radius = {"threat_switching": GloRo(model, certifier.constants)} if certifier else {}
            self.certifiers.append({"runner_up_switching": runner_up(model, 3), **radius})


QUICK = ("standard", "gloro-trades")  # without a certifier and with one


@pytest.mark.parametrize(
    "loss", [loss if loss in QUICK else pytest.param(loss, marks=pytest.mark.slow) for loss in ("standard", *CERTIFIED)]
)
def test_training_records_it_without_changing(loss, monkeypatch):
    monkeypatch.setitem(support.METHODS, "measure-threats", lambda: MeasureThreats(points=20))
    epochs = Epochs()
    trainer = tiny_trainer(loss, methods=["measure-threats"], observers=[epochs], validation_steps=0, test_steps=0)
    trainer.fit()
    assert not [name for name in epochs.records[0] if name.endswith("switching")]
    x, _ = sample(trainer.data.train, 20, trainer.seed, "threats")
    for number in (1, 2):
        before, after = epochs.certifiers[number - 1 : number + 1]
        recorded = {name: value for name, value in epochs.records[number].items() if name.endswith("switching")}
        assert recorded == {
            name: share_changed(threatening(before[name], x), threatening(after[name], x)) for name in before
        }
        for certifiers in (before, after):  # the second-highest logit, without a certifier
            second = certifiers["runner_up_switching"].model.eval()(x).topk(2).indices[:, 1]
            assert (threatening(certifiers["runner_up_switching"], x) == second).all()
    plain = tiny_trainer(loss, validation_steps=0, test_steps=0)
    plain.fit()
    assert_identical(weights(trainer.model), weights(plain.model))


def test_invalid_points():
    with pytest.raises(InputError, match="points: expected at least 1"):
        MeasureThreats(points=0)
