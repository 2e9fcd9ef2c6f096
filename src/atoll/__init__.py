"""Atoll: train, attack, certify and explain adversarially robust image classifiers.

    from atoll import PGD, ThreatModel, train

Everything named here lives in the package of its kind (``atoll.data``, ``atoll.models``, ``atoll.attacks``,
``atoll.training``); names are imported when they are used, so ``import atoll`` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.attacks import FGSM, PGD, AutoAttack
    from atoll.attacks.evaluate import evaluate
    from atoll.certify import GloRo, certifier_for
    from atoll.errors import AtollError
    from atoll.plots import plot_adversarial, plot_curves
    from atoll.runs.collect import results
    from atoll.runs.recipe import build_recipe, recipes
    from atoll.runs.run import Run, open_run
    from atoll.runs.train import build_trainer, train
    from atoll.threat import ThreatModel
    from atoll.training.trainer import Trainer, TrainerSettings

_HOMES = {
    "AutoAttack": "atoll.attacks",
    "FGSM": "atoll.attacks",
    "PGD": "atoll.attacks",
    "evaluate": "atoll.attacks.evaluate",
    "GloRo": "atoll.certify",
    "certifier_for": "atoll.certify",
    "AtollError": "atoll.errors",
    "plot_adversarial": "atoll.plots",
    "plot_curves": "atoll.plots",
    "build_recipe": "atoll.runs.recipe",
    "recipes": "atoll.runs.recipe",
    "results": "atoll.runs.collect",
    "Run": "atoll.runs.run",
    "build_trainer": "atoll.runs.train",
    "open_run": "atoll.runs.run",
    "train": "atoll.runs.train",
    "ThreatModel": "atoll.threat",
    "TrainerSettings": "atoll.training.trainer",
    "Trainer": "atoll.training.trainer",
}

__all__ = [
    "FGSM",
    "PGD",
    "AtollError",
    "AutoAttack",
    "GloRo",
    "Run",
    "ThreatModel",
    "Trainer",
    "TrainerSettings",
    "build_recipe",
    "build_trainer",
    "certifier_for",
    "evaluate",
    "open_run",
    "plot_adversarial",
    "plot_curves",
    "recipes",
    "results",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
