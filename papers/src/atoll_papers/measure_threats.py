"""The most threatening class of a prediction, and how often it changes during training (thesis, figure 5.4)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.certify import heuristic_certifier
from atoll.certify.gloro import GloRo, PairwiseLipschitz, radius_per_class, run_certified
from atoll.data.base import sample
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.training.methods.base import Method

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


class MeasureThreats(Method):
    """Records the share of points whose threatening class differs from the previous epoch, by two definitions.

    ``runner_up_switching`` uses the class with the second-highest logit (the thesis's definition).
    ``threat_switching`` uses the class that limits the certified radius, given the constants that the loss estimates;
    it is recorded only if the loss estimates constants.  Recording does not change training.

    Args:
        points: number of random training points, without augmentation; they are the same in all epochs.
    """

    def __init__(self, *, points: int = 1000) -> None:
        if points < 1:
            raise InputError(f"points: expected at least 1, got {points}")
        self.points = points
        self.before: dict[str, Tensor] = {}

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        x, _ = sample(trainer.data.train, self.points, trainer.seed, "threats")
        classes = {name: threatening(certifier, x).cpu() for name, certifier in self.certifiers(trainer).items()}
        for name in classes.keys() & self.before.keys():
            metrics[name] = share_changed(self.before[name], classes[name])
        self.before = classes

    def certifiers(self, trainer: Trainer) -> dict[str, GloRo]:
        """Certifiers by metric: one for the runner-up and, if available, one with estimated pairwise constants."""
        certifiers = {"runner_up_switching": runner_up(trainer.model, trainer.data.num_classes)}
        if trainer.lipschitz is not None:
            assert isinstance(trainer.model, Classifier)
            certifier = heuristic_certifier(trainer.model, trainer.lipschitz)
            if isinstance(certifier, GloRo):
                certifiers["threat_switching"] = certifier
        return certifiers

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = dict(state["before"])


@torch.no_grad()
def threatening(certifier: GloRo, x: Tensor) -> Tensor:
    """The class that limits the certified radius of each input: the i that minimizes :math:`(f_j - f_i) / K_{ji}`.

    >>> model = nn.Linear(1, 3)
    >>> _ = model.weight.data.zero_(), model.bias.data.copy_(torch.tensor([3.0, 2.0, 1.0]))
    >>> threatening(runner_up(model, 3), torch.zeros(1, 1))
    tensor([1])
    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]]))
    >>> threatening(GloRo(model, constants), torch.zeros(1, 1))  # its logit is lower, but changes faster
    tensor([2])
    """
    x, logits = run_certified(certifier.model, x)
    size = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return radius_per_class(logits, size, certifier.constants).argmin(1)


def runner_up(model: nn.Module, num_classes: int) -> GloRo:
    """A certifier with equal constants, so that the second-highest logit is the threat; its radii prove nothing."""
    return GloRo(model, PairwiseLipschitz.estimated(torch.ones(num_classes, num_classes)))


def share_changed(before: Tensor, after: Tensor) -> float:
    """The share of entries that differ.

    >>> share_changed(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]))
    0.25
    """
    return float((before != after).double().mean())
