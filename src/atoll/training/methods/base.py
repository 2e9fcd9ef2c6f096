"""The base class of training methods, which hook into the training loop.

The loop is in ``atoll.training.trainer``.  The hooks, in order::

    for batch in epoch:
        before_attack     change the batch (mixup, cutmix)
        around_attack     context of the attack (noise on the weights)
        around_step       context of the forward and backward passes (perturbed weights)
            on_loss       add, remove or reweight terms of the loss
        before_step       after the gradients are computed and the weights restored (decay)
        after_step        after the optimizer step (averaging, Lookahead)
    after_epoch           after validation (early stopping, schedules based on measurements)

Methods are called in the order in which they are listed.  A method with state saves it with ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from atoll.errors import InputError
from atoll.losses.base import Outputs
from atoll.registry import Registry

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@dataclass
class Step:
    """The data of one training step, which methods read and change."""

    x: Tensor
    y: Tensor
    index: Tensor
    number: int  # number of this step in the run, starting at 0
    epoch: float  # fractional
    x_adv: Tensor | None = None
    eps: float = 0.0  # certified radius in this step, for losses with Lipschitz constants
    out: Outputs = field(default_factory=Outputs)
    terms: dict[str, Tensor] = field(default_factory=dict)  # weighted, per example or already averaged
    whole: Step | None = None  # with accumulated gradients, the complete step of which this is a part


METHODS = Registry("method", "methods", "atoll.training.methods.base.Method", "atoll.training.methods")


class Method:
    """Base class of methods; every hook does nothing by default."""

    registry: ClassVar[Registry] = METHODS

    uses_clean: ClassVar[bool] = False  # whether the method needs a clean pass even if the loss does not

    # Whether ``on_loss`` needs the outputs of the whole batch.  With accumulated gradients, they are computed by an
    # additional pass without gradients and stored in ``step.whole.out``.
    uses_batch: bool = False

    def setup(self, trainer: Trainer) -> None:
        """Called once before the first step, when model and optimizer exist."""

    def before_attack(self, trainer: Trainer, step: Step) -> None: ...

    def around_attack(self, trainer: Trainer, step: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def around_step(self, trainer: Trainer, step: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def on_loss(self, trainer: Trainer, step: Step) -> None: ...

    def before_step(self, trainer: Trainer, step: Step) -> None: ...

    def after_step(self, trainer: Trainer, step: Step) -> None: ...

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        """Called on all processes after validation; metrics that are added here are recorded."""

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Return other weights for the model as state dicts by name, to evaluate and save with the trained ones."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts and lists of tensors, numbers and strings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def check_methods(methods: Sequence[Method]) -> None:
    """Raise an InputError if a method is listed twice."""
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"methods: expected each method once, got {name} {names.count(name)} times")
