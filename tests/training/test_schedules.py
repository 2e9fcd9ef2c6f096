"""Schedules against PyTorch's own and against their definitions."""

import pytest
import torch

from atoll.errors import InputError
from atoll.training.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    OneDrop,
    Piecewise,
    SuperConvergence,
)

ALL = [Constant(), Piecewise(), OneDrop(), Cosine(), Linear(), SuperConvergence(), Exponential()]


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: type(s).__name__)
def test_factors_stay_between_zero_and_one(schedule):
    factors = [schedule(epoch / 7, 10) for epoch in range(71)]
    assert all(0 <= f <= 1 for f in factors)
    assert max(factors) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Cosine(), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
        (Piecewise(), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15])),
        (Linear(), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 20)),
        (
            SuperConvergence(start=0.04, peak=0.4),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(
                o, 1.0, 21, pct_start=0.4, anneal_strategy="linear", div_factor=25, final_div_factor=1e9
            ),
        ),
    ],
)
def test_same_as_torch(mine, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = theirs(optimizer)
    for epoch in range(20):
        # OneCycleLR counts from 0 to total - 1 and peaks at pct_start * total - 1, one step before the share we name.
        tolerance = 0.08 if isinstance(mine, SuperConvergence) else 1e-7
        assert mine(epoch, 20) == pytest.approx(optimizer.param_groups[0]["lr"], abs=tolerance)
        optimizer.step()
        scheduler.step()


def test_warm_up_rises_linearly_and_then_leaves_the_schedule_alone():
    schedule = Piecewise(warmup=4)
    assert [schedule(e, 20) for e in (0, 1, 2, 4, 9, 10)] == [0, 0.25, 0.5, 1, 1, 0.1]
    cosine = Cosine(warmup=4)
    assert cosine(4, 20) == pytest.approx(1)
    assert cosine(12, 20) == pytest.approx(0.5)
    assert cosine(20, 20) == pytest.approx(0)


def test_exponential_is_the_gloro_recipe():
    """Adam 1e-3 constant for half the run, then exponentially to 1e-6."""
    schedule = Exponential(start=0.5, final=1e-3)
    assert schedule(149, 300) == 1
    assert 1e-3 * schedule(225, 300) == pytest.approx(10**-4.5)
    assert 1e-3 * schedule(300, 300) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Piecewise(milestones=[100]),
        lambda: Cosine(warmup=-1),
        lambda: SuperConvergence(peak=1.0),
        lambda: Exponential(final=0),
    ],
)
def test_nonsense_is_refused(build):
    with pytest.raises(InputError, match="expected"):
        build()
