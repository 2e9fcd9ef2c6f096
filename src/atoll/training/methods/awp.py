"""Adversarial weight perturbation (Wu et al., 2020) of the whole network or only the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atoll.distributed import all_sum, world_size
from atoll.errors import InputError, check_count, check_range
from atoll.losses.base import Outputs
from atoll.models.base import Classifier
from atoll.modules import move_parameters, preserve_buffers, weight_matrices
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class AWP(Method):
    r"""Adversarial weight perturbation (Wu et al., 2020): computes gradients at weights that increase the loss.

    These are :math:`\theta + \gamma\,\xi` with :math:`\xi_l = \|W_l\| d_l / \|d_l\|` and d the gradient: each weight
    matrix moves by ``gamma`` times its norm in the direction in which the loss at the adversarial inputs increases.
    The gradient at the perturbed weights updates the original weights.  Biases and normalization layers are not
    perturbed.  Costs one additional forward and backward pass and one copy of the weight matrices.

    Args:
        gamma: size of the perturbation relative to the norm of each matrix.
        warmup: number of epochs without perturbation at the beginning.
    """

    gamma: float = 0.005
    warmup: int = 0

    def __post_init__(self) -> None:
        check_range("[0, inf)", gamma=self.gamma)
        check_count(0, warmup=self.warmup)

    @contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        if trainer.epoch < self.warmup or not self.gamma:
            yield
            return
        weights = self.parameters(trainer.model)
        # A generator that holds the only reference to the directions, so that two sets of gradients never take memory
        # at the same time.
        moves = (self.move(w, d) for w, d in zip(weights, self.directions(trainer, step, weights), strict=True))
        with move_parameters(weights, moves):
            trainer.optimizer.zero_grad()
            yield

    def move(self, weight: Tensor, direction: Tensor) -> Tensor:
        """Return the perturbation of a matrix; zero if the gradient is zero."""
        length = torch.linalg.vector_norm(direction)
        return direction * torch.where(length > 0, self.gamma * torch.linalg.vector_norm(weight) / length, 0.0)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters to perturb."""
        return weight_matrices(model)

    def directions(self, trainer: Trainer, step: Step, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return the gradient of the loss, computed as in the step itself, so that it is the same on all processes."""
        with preserve_buffers(trainer.model):
            trainer.forward_backward(step, plain=True)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


@METHODS.register()
class AWPT(AWP):
    """AWP of the top layer only (TrH, section 5); costs one additional forward pass, but no full backward pass."""

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        if not isinstance(model, Classifier):
            raise InputError(f"AWPT: expected a Classifier with a head, got {type(model).__name__}")
        return weight_matrices(model.head)

    def directions(self, trainer: Trainer, step: Step, parameters: list[nn.Parameter]) -> list[Tensor]:
        model = trainer.model
        assert isinstance(model, Classifier)
        sums = [torch.zeros_like(p) for p in parameters]
        with preserve_buffers(model):
            for part in trainer.parts(step):
                with torch.no_grad():
                    z = model.features(part.x) if trainer.loss.uses_clean else None
                    z_adv = model.features(part.x_adv) if part.x_adv is not None else None
                logits = None if z is None else model.head(z)
                out = Outputs(logits, z, None if z_adv is None else model.head(z_adv), z_adv)
                loss = torch.stack([value.mean() for value in trainer.loss.values(out, part.y).values()]).sum()
                for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                    total.add_(gradient)
        return [all_sum(total) / world_size() for total in sums]
