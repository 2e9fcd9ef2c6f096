"""For certified training: centroids that start at training points, and a radius that grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from atoll.data.base import to_float
from atoll.errors import InputError, check_range
from atoll.models.centroid import CentroidNet
from atoll.modules import evaluation_mode
from atoll.rng import generator
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class CentroidsFromData(Method):
    """The centroids of each class begin as the features of random training points of that class.

    A method, because a model does not see data.  It belongs before methods that copy weights, such as SWA.
    """

    @torch.no_grad()
    def setup(self, trainer: Trainer) -> None:
        model, split = trainer.model, trainer.data.train
        if not isinstance(model, CentroidNet):
            raise InputError(f"CentroidsFromData: expected a CentroidNet, got {type(model).__name__}")
        centroids = model.head.centroids
        for label, own in enumerate(centroids):
            rows = (split.labels == label).nonzero().squeeze(1)
            if len(rows) < len(own):
                raise InputError(
                    f"per_class: expected at most the {len(rows)} training points of class {label}, got {len(own)}"
                )
            draw = generator(trainer.seed, "centroids", label)
            rows = rows[torch.randperm(len(rows), generator=draw)[: len(own)]]
            x = to_float(split.fetch(rows)).to(centroids.device, centroids.dtype)
            with evaluation_mode(model):
                own.copy_(model.head.stretched(model.features(x)))


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class EpsRamp(Method):
    r"""Losses with Lipschitz constants train for ``start * eps`` first, ``end * eps`` after a ``share`` of the run.

    The defaults are :math:`\epsilon_t = (\min(2t/T, 1) \cdot 1.9 + 0.1)\, \epsilon` (thesis, C.1.1); the published
    recipe for MNIST is logarithmic from 0.01 to 1.1.  eps is the threat model's, and validation stays with that.

    Args:
        shape: ``linear``, or ``logarithmic``, which multiplies by the same factor in every epoch.
        start: factor at the beginning.
        end: factor at the end of the ramp.
        share: of the run that the ramp takes.

    >>> ramp = EpsRamp()
    >>> [round(ramp.factor(epoch, 100), 3) for epoch in (0, 25, 50, 75)]
    [0.1, 1.05, 2.0, 2.0]
    >>> ramp = EpsRamp(shape="logarithmic", start=0.01, end=1.0)
    >>> [round(ramp.factor(epoch, 100), 3) for epoch in (0, 25, 50, 75)]
    [0.01, 0.1, 1.0, 1.0]
    """

    shape: Literal["linear", "logarithmic"] = "linear"
    start: float = 0.1
    end: float = 2.0
    share: float = 0.5

    def __post_init__(self) -> None:
        check_range("(0, inf)", start=self.start, end=self.end)
        check_range("(0, 1]", share=self.share)

    def setup(self, trainer: Trainer) -> None:
        if not trainer.loss.uses_lipschitz:
            name = type(trainer.loss).__name__
            raise InputError(f"EpsRamp: expected a loss that uses Lipschitz constants, got {name}")

    def before_attack(self, trainer: Trainer, step: Step) -> None:
        # Every step afresh from its place in the run: a resumed run needs nothing.
        step.eps = trainer.threat.radius * self.factor(step.epoch, trainer.settings.epochs)

    def factor(self, epoch: float, epochs: int) -> float:
        """What eps is multiplied by."""
        progress = min(1.0, epoch / (self.share * epochs))
        if self.shape == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)
