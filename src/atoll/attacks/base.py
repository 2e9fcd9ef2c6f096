"""The public call of every attack: check, switch to evaluation mode, search, restore."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.describe import constructor_call
from atoll.errors import InputError
from atoll.streams import Streams
from atoll.threat import ThreatModel


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and afterwards every module in the mode it was in, even if some were mixed."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


class Attack(ABC):
    """Base of all attacks; a subclass implements only ``search``.

    The model may be any ``nn.Module`` from inputs in the threat model's bounds to logits.  It is attacked in
    evaluation mode; modes, buffers and gradients are left as they were.
    """

    needs_gradients = True  # blind attacks say no
    eot = 1  # passes a prediction is averaged over, for randomised models

    def __init__(self, threat: ThreatModel) -> None:
        self.threat = threat

    def __repr__(self) -> str:
        return constructor_call(self)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, seed: object = 0, index: Tensor | None = None
    ) -> Tensor:
        """Adversarial inputs for ``x``, inside the ball and the bounds.

        Args:
            model: maps inputs to logits.
            x: clean inputs.
            y: labels, as class indices or (where the objective allows) probabilities.
            seed: seed of the random streams.
            index: which points these are, ``0 .. batch-1`` if not given; a point's randomness depends only on
                ``seed`` and its index.
        """
        if len(x) != len(y):
            raise InputError(f"expected one label per input, got {len(x)} inputs and {len(y)} labels")
        self.threat.check(x)
        if not len(x):
            return x.clone()
        index = torch.arange(len(x), device=x.device) if index is None else index
        with evaluation_mode(model):
            return self.search(model, x.detach(), y, self.streams(seed, index)).detach()

    def streams(self, seed: object, index: Tensor) -> Streams:
        """The random streams of some points."""
        return Streams(seed, type(self).__name__, index=index)

    @abstractmethod
    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: Streams) -> Tensor:
        """The attack itself, on a model in evaluation mode and valid inputs."""


def check_labels(logits: Tensor, y: Tensor) -> None:
    """Refuse labels that are not classes of the model, with a sentence instead of an index error."""
    if logits.dim() != 2:
        raise InputError(f"model: expected logits of shape (batch, classes), got {tuple(logits.shape)}")
    if y.dim() == 1 and (y.min() < 0 or y.max() >= logits.shape[1]):
        raise InputError(
            f"labels: expected classes in [0, {logits.shape[1] - 1}], got [{int(y.min())}, {int(y.max())}]"
        )
