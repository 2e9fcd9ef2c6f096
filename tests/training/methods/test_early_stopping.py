"""Early stopping on given scores."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from atoll.errors import InputError
from atoll.training.methods import EarlyStopping


def validations(method: EarlyStopping, scores: list[float | None]) -> int | None:
    """Return after how many validations the run ends; None stands for an epoch without validation."""
    trainer = SimpleNamespace(selection_metric="robust", finished=False)
    for number, score in enumerate(scores, 1):
        method.after_epoch(trainer, {} if score is None else {"robust": score})
        if trainer.finished:
            return number
    return None


def test_by_default_ten_validations_without_any_improvement_end_the_run() -> None:
    assert validations(EarlyStopping(), [0.0, 1e-9, *[1e-9] * 20]) == 2 + 10


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        ([0.5, 0.4, 0.6, 0.5, 0.55], 5),  # an improvement starts the count again
        ([0.5, 0.5, 0.5], 3),
        ([0.5, None, 0.4, None, 0.4], 5),  # only validations count
        ([0.5, 0.4, 0.6, 0.5, 0.7], None),
    ],
)
def test_patience_of_two(scores: list[float | None], end: int | None) -> None:
    assert validations(EarlyStopping(patience=2), scores) == end


def test_a_gain_must_exceed_the_smallest_gain() -> None:
    """Gains of 0.25 do not count one by one, and count once they exceed 0.25 together."""
    assert validations(EarlyStopping(patience=2, min_gain=0.25), [0.0, 0.25, 0.375, 0.5, 0.625]) == 5
    assert validations(EarlyStopping(patience=2, min_gain=0.25), [0.0, 0.25, 0.25]) == 3


def test_a_resumed_run_goes_on_counting() -> None:
    before, after = EarlyStopping(patience=3), EarlyStopping(patience=3)
    validations(before, [0.5, 0.4])
    after.load_state_dict(before.state_dict())
    assert validations(after, [0.5, 0.5]) == 2


def test_another_method_may_have_ended_the_run() -> None:
    trainer = SimpleNamespace(selection_metric="robust", finished=True)
    method = EarlyStopping()
    for score in (0.1, 0.0):
        method.after_epoch(trainer, {"robust": score})
    assert trainer.finished


@pytest.mark.parametrize("settings", [{"patience": 0}, {"min_gain": -0.1}, {"min_gain": math.nan}])
def test_nonsense_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))}: expected"):
        EarlyStopping(**settings)
