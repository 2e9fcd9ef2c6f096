"""Sharpness-aware minimization (Foret et al., 2021), the reference point for AWP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.errors import check_range
from atoll.modules import move_parameters, preserve_buffers
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class SAM(Method):
    r"""Trains at :math:`\theta + \rho\, g / \|g\|`, with g the gradient of the loss over all parameters.

    Costs one more forward and backward pass and one copy of the weights.

    Args:
        rho: length of the perturbation.
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_range("[0, inf)", rho=self.rho)

    @contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        with preserve_buffers(trainer.model):
            trainer.forward_backward(step, plain=True)
        weights = [p for p in trainer.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in weights if p.grad is not None]
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        scale = torch.where(length > 0, self.rho / length, 0.0)
        moves = map(scale.mul, gradients)
        del gradients  # the step makes gradients of its own, and two sets are one too many
        with move_parameters(weights, moves):
            trainer.optimizer.zero_grad()
            yield
