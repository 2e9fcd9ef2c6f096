"""Logit annealing in the trainer; values and curvature are in test_terms.py."""

import pytest

from atoll.errors import InputError
from atoll.losses import AT, EMMA, LogitAnnealing
from atoll.models import MLP
from atoll.threat import ThreatModel
from atoll.training.observers import Observer
from atoll.training.trainer import Trainer
from support import TinyData, first_batch, tiny_trainer


class Records(Observer):
    def __init__(self):
        self.epochs = []

    def record(self, record):
        if record["kind"] == "epoch":
            self.epochs.append(record)


def test_which_losses_train_certified_radii():
    flags = {loss: (loss.certifies, loss.uses_lipschitz) for loss in (AT, EMMA, LogitAnnealing)}
    assert flags == {AT: (False, False), EMMA: (True, True), LogitAnnealing: (True, False)}


def test_verified_accuracy_selects_the_best_epoch(tmp_path):
    trainer = tiny_trainer("logit-annealing", observers=[records := Records()], folder=tmp_path, validation_steps=0)
    trainer.fit()
    assert trainer.selection_metric == "validation_vra_estimate"
    scores = [record["validation_vra_estimate"] for record in records.epochs]
    assert trainer.best["raw"].epoch == 1 + scores.index(max(scores))


def test_a_step_computes_no_lipschitz_constants():
    trainer = tiny_trainer("logit-annealing")
    assert trainer.train_step(first_batch(trainer)).out.certified_margin is None


def test_certified_radii_are_in_l2():
    with pytest.raises(InputError, match=r"threat\.norm: expected l2 for LogitAnnealing, got linf"):
        Trainer(MLP((1, 8, 8), 3), TinyData(), LogitAnnealing(), ThreatModel("linf", 0.1))
