"""Early stopping on the validation set (Rice et al., 2020: the simplest cure for robust overfitting)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.errors import InputError
from atoll.training.methods.base import METHODS, Method

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class EarlyStopping(Method):
    """End the run when the selection metric has not improved for ``patience`` validations."""

    def __init__(self, *, patience: int = 10, min_gain: float = 0.0) -> None:
        if patience < 1:
            raise InputError(f"patience: expected at least 1, got {patience}")
        self.patience = patience
        self.min_gain = min_gain
        self.best = float("-inf")
        self.waited = 0

    def after_epoch(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.selection_metric not in metrics:
            return
        score = metrics[trainer.selection_metric]
        if score > self.best + self.min_gain:
            self.best, self.waited = score, 0
        else:
            self.waited += 1
            trainer.finished = trainer.finished or self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
