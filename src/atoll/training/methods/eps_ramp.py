"""A certified radius that grows during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atoll.errors import InputError, check_range
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


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
