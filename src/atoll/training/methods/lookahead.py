"""Lookahead optimizer (Zhang et al., 2019): k steps forward, 1 step back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.errors import check_count, check_range
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class Lookahead(Method):
    r"""Lookahead optimizer, which averages slow and fast weights every ``k`` steps.

    The update is :math:`\phi \leftarrow \phi + \alpha (\theta - \phi)`, then :math:`\theta \leftarrow \phi`.  Works
    with any optimizer, whose state does not change.  Costs one copy of the weights.

    Args:
        k: number of steps between synchronizations.
        alpha: step size of the slow weights :math:`\phi`.
    """

    k: int = 5
    alpha: float = 0.5
    slow: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_count(1, k=self.k)
        check_range("(0, 1]", alpha=self.alpha)

    def setup(self, trainer: Trainer) -> None:
        self.slow = [p.detach().clone() for p in trainer.model.parameters()]

    @torch.no_grad()
    def after_step(self, trainer: Trainer, step: Step) -> None:
        if (step.number + 1) % self.k == 0:
            for slow, fast in zip(self.slow, trainer.model.parameters(), strict=True):
                slow.lerp_(fast, self.alpha)
                fast.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)
