"""The base class of attacks, whose call checks the inputs and runs the search in evaluation mode."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.losses.objectives import Objective
from atoll.modules import evaluation_mode
from atoll.registry import Registry, constructor_call
from atoll.rng import PointRNG
from atoll.threat import AttackNorm, Norm, ThreatModel

ATTACKS = Registry("attack", "attacks", "atoll.attacks.base.Attack", "atoll.attacks")


class Attack(ABC):
    """Base class of all attacks; subclasses implement only ``search``.

    Works with any ``nn.Module`` that maps inputs in the bounds of the threat model to logits.  The attack switches the
    model to evaluation mode and restores its modes afterwards; buffers and gradients do not change.
    """

    registry: ClassVar[Registry] = ATTACKS

    needs_gradients = True  # False for black-box attacks
    eot = 1  # number of passes to average a prediction over, for randomized models
    norms: ClassVar[Sequence[AttackNorm]] = get_args(Norm)  # for which the attack works

    # The number of classes if the caller has checked inputs and labels.  A check in every call waits for the device.
    known_classes: int | None = None

    def __init__(self, threat: ThreatModel) -> None:
        if threat.norm not in self.norms:
            raise InputError(f"{type(self).__name__}: expected {' or '.join(self.norms)}, got {threat.norm}")
        self.threat = threat

    def __repr__(self) -> str:
        return constructor_call(self)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, seed: object = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return adversarial inputs for ``x``, inside the ball and the bounds.

        Args:
            model: maps inputs to logits.
            x: clean inputs.
            y: labels, as class indices or (if the objective allows) probabilities.
            seed: seed of the random streams.
            index: indices of the points, ``0 .. batch-1`` by default; the random numbers of a point depend only on
                ``seed`` and its index.
        """
        if len(x) != len(y):
            raise InputError(f"labels: expected one per input, got {len(x)} inputs and {len(y)} labels")
        if self.known_classes is None:
            self.threat.check(x)
        if not len(x):
            return x.clone()
        index = torch.arange(len(x), device=x.device) if index is None else index
        with evaluation_mode(model):
            return self.search(model, x.detach(), y, self.streams(seed, index)).detach()

    def streams(self, seed: object, index: Tensor) -> PointRNG:
        """Return one random stream per point."""
        return PointRNG(seed, type(self).__name__, index=index)

    @abstractmethod
    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        """Run the attack on valid inputs, with the model in evaluation mode."""


AttackFactory = Callable[[ThreatModel], Attack]


def training_attack(factory: AttackFactory, threat: ThreatModel, objective: Objective) -> Attack:
    """Build the attack of a training step.

    The attack maximizes the objective of the loss if its constructor has an ``objective`` that the recipe does not set.
    Attacks with a fixed objective, such as FAB or Square, keep theirs.
    """
    fixed = factory.keywords if isinstance(factory, functools.partial) else {}
    if "objective" in inspect.signature(factory).parameters and "objective" not in fixed:
        return factory(threat, objective=objective)  # type: ignore[call-arg]
    return factory(threat)


def check_labels(logits: Tensor, y: Tensor, known_classes: int | None = None) -> None:
    """Raise an InputError, instead of an index error later, for labels that are not classes of the model.

    Args:
        logits: the output of the model.
        y: class indices or probabilities.
        known_classes: the number of classes of the labels; None to read them.
    """
    check_logits(logits)
    classes = logits.shape[1]
    if not (y.dtype == torch.int64 and y.dim() == 1) and not (y.is_floating_point() and y.shape[1:] == (classes,)):
        raise InputError(
            f"labels: expected one int64 class per point or {classes} probabilities, got {_kind(y)} of shape"
            f" {tuple(y.shape)}"
        )
    if y.dim() == 1:
        if known_classes is None:
            low, high = torch.stack(torch.aminmax(y)).tolist()  # waits for the device once
        else:
            low, high = 0, known_classes - 1
        if low < 0 or high >= classes:
            raise InputError(f"labels: expected classes in [0, {classes - 1}], got [{low}, {high}]")


def check_logits(logits: object) -> None:
    """Raise an InputError if the output of a model is not a tensor of logits, such as a tuple of several outputs."""
    if not isinstance(logits, Tensor):
        raise InputError(f"model: expected logits of shape (batch, classes), got {type(logits).__name__}")
    if logits.dim() != 2:
        raise InputError(f"model: expected logits of shape (batch, classes), got {tuple(logits.shape)}")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
