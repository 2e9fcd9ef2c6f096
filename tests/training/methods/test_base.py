"""What all methods have in common: settings, their defaults, identity, and the passes that they ask for."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.training.methods import (
    AWP,
    AWPT,
    RAT,
    S2O,
    SAM,
    SWA,
    CentroidsFromData,
    CutMix,
    EarlyStopping,
    EpsRamp,
    GaussianNoise,
    Lookahead,
    MeasureWCI,
    Method,
    Mixup,
    TrH,
    WCISchedule,
)
from support import first_batch, fork, tiny_trainer

WCI = {"interval": 1, "points": 512, "probes": 2, "gap": False}
DEFAULTS: dict[type[Method], dict[str, Any]] = {
    AWP: {"gamma": 0.005, "warmup": 0},
    AWPT: {"gamma": 0.005, "warmup": 0},
    CentroidsFromData: {},
    CutMix: {"alpha": 1.0},
    EarlyStopping: {"patience": 10, "min_gain": 0.0},
    EpsRamp: {"shape": "linear", "start": 0.1, "end": 2.0, "share": 0.5},
    GaussianNoise: {"sigma": 0.25},
    Lookahead: {"k": 5, "alpha": 0.5},
    MeasureWCI: {"start": 0.0, **WCI},
    Mixup: {"alpha": 1.0},
    RAT: {
        "order": 2, "eta": None, "second": 0.5, "sigma": None, "share": None, "terms": "surrogate", "reading": "code"
    },
    S2O: {"weight": 0.1, "reading": "code", "share": 0.2},
    SAM: {"rho": 0.05},
    SWA: {"alpha": 0.995, "start": 0.0},
    TrH: {
        "lambda_": 1e-3, "schedule": "constant", "layers": "top", "bias": False, "gamma": 0.0,
        "stop_clean_gradient": True,
    },
    WCISchedule: {"start": 0.5, **WCI, "threshold": 100.0, "smoothing": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_recipe_that_leaves_out_a_setting_always_means_the_same_run(kind: type[Method]) -> None:
    """Settings are given by name, and state is not a setting."""
    settings = inspect.signature(kind).parameters
    assert {name: setting.default for name, setting in settings.items()} == DEFAULTS[kind]
    assert all(setting.kind is setting.KEYWORD_ONLY for setting in settings.values())


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_setting_is_described(kind: type[Method]) -> None:
    described = set()
    for base in kind.__mro__:
        _, _, arguments = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")
        described |= set(re.findall(r"^    (\w+): ", arguments, re.MULTILINE))
    assert set(inspect.signature(kind).parameters) <= described


@pytest.mark.parametrize("kind", DEFAULTS)
def test_methods_with_the_same_settings_are_different_because_they_have_state(kind: type[Method]) -> None:
    assert len({kind(), kind()}) == 2


def test_a_method_asks_for_no_pass_unless_it_says_so() -> None:
    """In two parts, AT with PGD-3 makes four passes per part, and weight averaging makes none."""
    trainer = tiny_trainer("at", methods=["swa"], accumulate=2)
    trainer.methods[0].setup(trainer)
    passes: list[int] = []
    trainer.model.body.register_forward_hook(lambda *_: passes.append(1))
    trainer.train_step(first_batch(trainer))
    assert len(passes) == 2 * 4


def test_the_trainer_can_be_imported_before_the_methods(tmp_path: Path) -> None:
    """It imports them, so they must not import it."""

    def task() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "atoll"]:
            del sys.modules[name]
        importlib.import_module("atoll.training.trainer")

    process = fork(task, tmp_path / "errors")
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
