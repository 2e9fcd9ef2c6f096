"""Atoll: train, attack, certify and explain adversarially robust image classifiers.

    from atoll import PGD, ThreatModel, train

The names below are imported from their subpackages on first use, so ``import atoll`` is fast.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # that of typing, which a file of this name in the current folder would replace (`python -m`)
if TYPE_CHECKING:
    from typing import Any

    __version__: str
    from atoll.attacks import FGSM, PGD, AutoAttack
    from atoll.attacks.evaluate import evaluate
    from atoll.certify import GloRo, certifier_for
    from atoll.distributed import use_device
    from atoll.errors import AtollError
    from atoll.export import export_model
    from atoll.plots import plot_adversarial, plot_curves
    from atoll.runs.collect import results
    from atoll.runs.recipe import build_recipe, recipes
    from atoll.runs.run import Run, open_run
    from atoll.runs.train import build_trainer, train
    from atoll.threat import ThreatModel
    from atoll.training.trainer import Trainer, TrainerSettings

_HOMES = {
    "atoll.attacks": ("FGSM", "PGD", "AutoAttack"),
    "atoll.attacks.evaluate": ("evaluate",),
    "atoll.certify": ("GloRo", "certifier_for"),
    "atoll.distributed": ("use_device",),
    "atoll.errors": ("AtollError",),
    "atoll.export": ("export_model",),
    "atoll.plots": ("plot_adversarial", "plot_curves"),
    "atoll.runs.collect": ("results",),
    "atoll.runs.recipe": ("build_recipe", "recipes"),
    "atoll.runs.run": ("Run", "open_run"),
    "atoll.runs.train": ("build_trainer", "train"),
    "atoll.threat": ("ThreatModel",),
    "atoll.training.trainer": ("Trainer", "TrainerSettings"),
}

__all__ = [
    "FGSM", "PGD", "AtollError", "AutoAttack", "GloRo", "Run", "ThreatModel", "Trainer", "TrainerSettings",
    "build_recipe", "build_trainer", "certifier_for", "evaluate", "export_model", "open_run", "plot_adversarial",
    "plot_curves", "recipes", "results", "train", "use_device",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("atoll")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
