"""The threatening class against a loop over all classes, and its record in a training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.certify import GloRo, heuristic_certifier
from atoll.data.base import sample
from atoll.errors import InputError
from atoll.models import MLP
from atoll.training.observers import Observer
from atoll_papers.measure_threats import MeasureThreats
from atoll_papers.threats import runner_up, switching, threatening
from support import CERTIFIED, assert_identical, tiny_trainer, weights


def net(seed, classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP((3,), classes, hidden=(6,)).double()


@given(seed=st.integers(0, 1000), classes=st.integers(2, 6))
def test_the_threatening_class_ends_the_radius(seed, classes):
    model = net(seed, classes)
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    certifier = GloRo.proven(model)
    found, radius, k = threatening(certifier, x), certifier(x).radius, certifier.constants.lipschitz
    for row, f in enumerate(model(x).detach()):
        j = int(f.argmax())
        distances = {i: float((f[j] - f[i]) / k[j, i]) for i in range(classes) if i != j}
        nearest = min(distances, key=distances.get)
        assert int(found[row]) == nearest
        assert float(radius[row]) == pytest.approx(distances[nearest], rel=1e-6, abs=1e-9)


def test_without_constants_it_is_the_runner_up():
    model, x = net(0), torch.rand(20, 3, dtype=torch.float64)
    assert torch.equal(threatening(runner_up(model, 4), x), model(x).topk(2).indices[:, 1])


def test_switching_counts_points():
    x = 4 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = (runner_up(net(seed), 4) for seed in (0, 1))
    expected = sum(int(threatening(a, p[None])) != int(threatening(b, p[None])) for p in x) / 40
    assert 0 < expected < 1
    assert switching(a, b, x) == expected
    assert switching(a, a, x) == 0


class Epochs(Observer):
    """The weights after every epoch, and what was recorded."""

    def start(self, trainer):
        self.trainer, self.certifiers, self.records = trainer, [], []

    def record(self, record):
        if record["kind"] == "epoch":
            self.records.append(record)
            model = tiny_trainer().model
            model.load_state_dict(weights(self.trainer.model))
            estimate = self.trainer.lipschitz
            found = None if estimate is None else heuristic_certifier(self.trainer.model, estimate)
            self.certifiers.append(GloRo(model, found.constants) if found else runner_up(model, 3))


@pytest.mark.parametrize("loss", ["standard", *CERTIFIED])
def test_training_records_it_and_is_not_changed(loss):
    epochs = Epochs()
    trainer = tiny_trainer(loss, methods=["measure-threats"], observers=[epochs], validation_steps=0, test_steps=0)
    trainer.fit()
    assert "threat_switching" not in epochs.records[0]
    x, _ = sample(trainer.data.train, 20, trainer.seed, "threats")
    for number in (1, 2):
        before, after = epochs.certifiers[number - 1 : number + 1]
        assert epochs.records[number]["threat_switching"] == switching(before, after, x)
    plain = tiny_trainer(loss, validation_steps=0, test_steps=0)
    plain.fit()
    assert_identical(weights(trainer.model), weights(plain.model))


def test_nonsense_is_refused():
    with pytest.raises(InputError, match="points: expected at least 1"):
        MeasureThreats(points=0)
