"""The start of weight averaging, and what it averages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.training.methods import SWA, Step


def averages(method: SWA, epochs: list[float]) -> list[float]:
    """The average of a weight that is 0 at first and 1 after every step, in a run of ten epochs."""
    model = nn.BatchNorm1d(1)
    nn.init.zeros_(model.weight)
    trainer = SimpleNamespace(model=model, settings=SimpleNamespace(epochs=10))
    method.setup(trainer)
    values = []
    for number, epoch in enumerate(epochs):
        nn.init.ones_(model.weight)
        model.num_batches_tracked.fill_(number + 1)
        method.after_step(trainer, Step(torch.empty(0), torch.empty(0), torch.empty(0), number, epoch))
        average = method.averages()["swa"]
        values.append(float(average["weight"]))
        assert average["num_batches_tracked"] == number + 1  # a counter has no average
        nn.init.zeros_(model.weight)
    return values


def test_the_average_moves_from_the_first_step() -> None:
    assert averages(SWA(alpha=0.75), [0.0, 0.1, 0.2]) == pytest.approx([1 / 4, 7 / 16, 37 / 64])


def test_until_its_start_the_average_equals_the_weights() -> None:
    """The average starts at epoch 5 of 10; the weight is 1, 2, 4 and 8 after the four steps."""
    model = nn.Linear(1, 1, bias=False)
    trainer = SimpleNamespace(model=model, settings=SimpleNamespace(epochs=10))
    method = SWA(alpha=0.75, start=0.5)
    method.setup(trainer)
    values = []
    for number, epoch in enumerate([0.0, 4.9, 5.0, 5.1]):
        nn.init.constant_(model.weight, 2.0**number)
        method.after_step(trainer, Step(torch.empty(0), torch.empty(0), torch.empty(0), number, epoch))
        values.append(float(method.averages()["swa"]["weight"]))
    assert values == pytest.approx([1.0, 2.0, 2.5, 2.5 + 5.5 / 4])
