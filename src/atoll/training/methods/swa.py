"""Weight averaging: an exponential moving average, evaluated in addition to the trained weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.errors import check_range
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class SWA(Method):
    r"""Weight averaging: an exponential moving average of the weights, which does not change the training.

    After every step, :math:`\bar\theta \leftarrow \alpha\,\bar\theta + (1 - \alpha)\,\theta` (TrH, section 5).
    Batch-norm statistics are averaged in the same way.  The average is evaluated, saved and exported under the name
    ``swa``.  Costs one copy of the weights.

    Args:
        alpha: decay rate of the average.
        start: share of the run before averaging starts; until then the average equals the weights.
    """

    alpha: float = 0.995
    start: float = 0.0
    average: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_range("[0, 1)", alpha=self.alpha, start=self.start)

    def setup(self, trainer: Trainer) -> None:
        self.average = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    @torch.no_grad()
    def after_step(self, trainer: Trainer, step: Step) -> None:
        rate = 1 - self.alpha if step.epoch >= self.start * trainer.settings.epochs else 1.0
        current = trainer.model.state_dict()
        floats = [name for name, value in current.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.average[n] for n in floats], [current[n] for n in floats], rate)
        for name in current.keys() - set(floats):  # counters of batch norm
            self.average[name].copy_(current[name])

    def averages(self) -> dict[str, dict[str, Tensor]]:
        return {"swa": self.average}
