"""Lookahead on a weight whose values are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.training.methods import Lookahead, Step


def weight_after_steps(method: Lookahead, trainer: Any, numbers: range) -> list[float]:
    """The weight after each step; the optimizer always adds 1."""
    values = []
    for number in numbers:
        with torch.no_grad():
            trainer.model.weight.add_(1)
        method.after_step(trainer, Step(torch.empty(0), torch.empty(0), torch.empty(0), number, 0.0))
        values.append(trainer.model.weight.item())
    return values


def trainer_of(start: float) -> Any:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return SimpleNamespace(model=model)


def test_every_third_step_goes_a_quarter_of_the_way() -> None:
    """From 10 to 13, back to 10.75; then to 13.75, back to 11.5."""
    method, trainer = Lookahead(k=3, alpha=0.25), trainer_of(10.0)
    method.setup(trainer)
    assert weight_after_steps(method, trainer, range(7)) == [11.0, 12.0, 10.75, 11.75, 12.75, 11.5, 12.5]


def test_a_resumed_run_has_the_slow_weights() -> None:
    before, trainer = Lookahead(k=3, alpha=0.25), trainer_of(10.0)
    before.setup(trainer)
    weight_after_steps(before, trainer, range(4))
    after, resumed = Lookahead(k=3, alpha=0.25), trainer_of(11.75)
    after.setup(resumed)
    after.load_state_dict(before.state_dict())
    assert weight_after_steps(after, resumed, range(4, 7)) == [12.75, 11.5, 12.5]


@pytest.mark.parametrize("settings", [{"k": 0}, {"alpha": 0.0}, {"alpha": 1.1}])
def test_nonsense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))}: expected"):
        Lookahead(**settings)
