"""A schedule for the certified radius during training."""

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
    r"""Increases the certified radius of the loss from ``start * eps`` to ``end * eps`` over a ``share`` of the run.

    The defaults are :math:`\epsilon_t = (\min(2t/T, 1) \cdot 1.9 + 0.1)\, \epsilon` (thesis, C.1.1).  The published
    recipe for MNIST is logarithmic from 0.01 to 1.1.  Validation uses the eps of the threat model.  Requires a loss
    that uses Lipschitz constants.

    Args:
        shape: ``linear``, or ``logarithmic`` for a constant factor per epoch.
        start: factor at the beginning.
        end: factor at the end of the ramp.
        share: length of the ramp as a share of the run.

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
        # Computed from the position in the run, so that resuming needs no state.
        step.eps = trainer.threat.radius * self.factor(step.epoch, trainer.settings.epochs)

    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor on eps."""
        progress = min(1.0, epoch / (self.share * epochs))
        if self.shape == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)
