"""The base of training methods: small objects that act at named places of the training loop.

The loop is in ``atoll.training.trainer``; these are its places, in order::

    for batch in epoch:
        before_attack     change the batch (mixup, cutmix)
        around_attack     while adversarial inputs are made (noise on the weights)
        around_step       while gradients are computed (perturbed weights)
            on_loss       add, remove or reweigh terms of the loss
        before_step       gradients are there, weights are their own again (decay)
        after_step        after the optimizer has moved the weights (averaging, Lookahead)
    after_epoch           after validation (early stopping, schedules that measure)

Methods are called in the order in which they are listed; a method that keeps state saves it through ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from atoll.losses.base import Outputs
from atoll.registry import Registry

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@dataclass
class Step:
    """One step on its way through the trainer; methods read it and change it."""

    x: Tensor
    y: Tensor
    index: Tensor
    number: int  # of this step in the whole run, from 0
    epoch: float  # fractional
    x_adv: Tensor | None = None
    eps: float = 0.0  # radius that a loss with Lipschitz constants certifies in this step
    out: Outputs = field(default_factory=Outputs)
    terms: dict[str, Tensor] = field(default_factory=dict)  # weighted, per example or already a mean
    whole: Step | None = None  # with accumulated gradients: the step that this is a part of


METHODS = Registry("method", "methods", "atoll.training.methods.base.Method", "atoll.training.methods")


class Method:
    """Base of all methods: does nothing, anywhere."""

    registry: ClassVar[Registry] = METHODS

    uses_clean: ClassVar[bool] = False  # whether a clean pass is needed even if the loss does without

    # Whether ``on_loss`` needs the outputs of the whole batch.  With accumulated gradients, they come from one more
    # pass without gradients, in ``step.whole.out``.
    uses_batch: bool = False

    def setup(self, trainer: Trainer) -> None:
        """Once, before the first step; model and optimizer are there."""

    def before_attack(self, trainer: Trainer, step: Step) -> None: ...

    def around_attack(self, trainer: Trainer, step: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def around_step(self, trainer: Trainer, step: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def on_loss(self, trainer: Trainer, step: Step) -> None: ...

    def before_step(self, trainer: Trainer, step: Step) -> None: ...

    def after_step(self, trainer: Trainer, step: Step) -> None: ...

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        """On all processes; what is added to the metrics is recorded with them."""

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Other weights for the model, by name, as state dicts; evaluated and saved beside the trained ones."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of tensors, numbers and strings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
