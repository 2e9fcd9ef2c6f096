"""The radius that the loss sees in a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atoll.errors import InputError
from atoll.threat import ThreatModel
from atoll.training.methods import EpsRamp, Step

TRAINER = SimpleNamespace(threat=ThreatModel("l2", 0.5), settings=SimpleNamespace(epochs=20))


def radius(ramp: EpsRamp, epoch: float) -> float:
    step = Step(torch.empty(0), torch.empty(0), torch.empty(0), 0, epoch)
    ramp.before_attack(TRAINER, step)
    return step.eps


def test_the_radius_is_that_of_the_threat_model_times_the_factor() -> None:
    """A quarter of 20 epochs from 1 to 3 times 0.5."""
    ramp = EpsRamp(start=1.0, end=3.0, share=0.25)
    assert [radius(ramp, epoch) for epoch in (0, 2.5, 5, 20)] == pytest.approx([0.5, 1.0, 1.5, 1.5])
    ramp = EpsRamp(shape="logarithmic", start=0.25, end=4.0, share=1.0)
    assert [radius(ramp, epoch) for epoch in (0, 5, 10, 20)] == pytest.approx([0.125, 0.25, 0.5, 2.0])


@pytest.mark.parametrize("settings", [{"start": 0.0}, {"end": 0.0}, {"share": 0.0}, {"share": 1.1}])
def test_nonsense_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))}: expected a number"):
        EpsRamp(**settings)
