"""How often the most threatening class changes during training."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atoll.certify import heuristic_certifier
from atoll.certify.gloro import GloRo
from atoll.data.base import sample
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.training.methods.base import Method
from atoll_papers.threats import runner_up, share_changed, threatening

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


class MeasureThreats(Method):
    """Records ``threat_switching``, the share of points with another threatening class than an epoch before.

    Thesis, figure 5.4.  The threatening class is the one that ends the certified radius, with the constants that the
    loss estimates; for losses without, it is the one with the second-highest logit.  Training itself is not changed.

    Args:
        points: random training points, without augmentation, the same in all epochs.
    """

    def __init__(self, *, points: int = 1000) -> None:
        if points < 1:
            raise InputError(f"points: expected at least 1, got {points}")
        self.points = points
        self.before: Tensor | None = None

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        x, _ = sample(trainer.data.train, self.points, trainer.seed, "threats")
        found = threatening(self.certifier(trainer), x).cpu()
        if self.before is not None:
            metrics["threat_switching"] = share_changed(self.before, found)
        self.before = found

    def certifier(self, trainer: Trainer) -> GloRo:
        """With estimated constants, if there are any for pairs of classes."""
        if trainer.lipschitz is not None:
            assert isinstance(trainer.model, Classifier)
            found = heuristic_certifier(trainer.model, trainer.lipschitz)
            if isinstance(found, GloRo):
                return found
        return runner_up(trainer.model, trainer.data.num_classes)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = state["before"]
