"""Early stopping on the validation set, a simple remedy for robust overfitting (Rice et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.errors import check_count, check_range
from atoll.training.methods.base import METHODS, Method

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class EarlyStopping(Method):
    """Stops the run when the selection metric has not improved for ``patience`` validations.

    Args:
        patience: number of validations without improvement.
        min_gain: smallest increase of the metric that counts as an improvement.
    """

    patience: int = 10
    min_gain: float = 0.0
    best: float = field(default=-math.inf, init=False)
    waited: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_count(1, patience=self.patience)
        check_range("[0, inf)", min_gain=self.min_gain)

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
