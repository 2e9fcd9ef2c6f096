"""Sharpness-aware minimization (Foret et al., 2021), a baseline for AWP."""

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
    r"""Sharpness-aware minimization (Foret et al., 2021): computes gradients at perturbed weights.

    These are :math:`\theta + \rho\, g / \|g\|`, where g is the gradient of the loss with respect to all parameters.
    Costs one additional forward and backward pass and one copy of the weights.

    Args:
        rho: norm of the perturbation.
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
        del gradients  # so that two sets of gradients never take memory at the same time
        with move_parameters(weights, moves):
            trainer.optimizer.zero_grad()
            yield
