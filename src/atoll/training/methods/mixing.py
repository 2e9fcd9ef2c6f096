"""Mixup and CutMix: training on mixtures of two points with mixed labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.data.mix import cutmix, cutmix_boxes, mixup
from atoll.errors import InputError, check_range
from atoll.rng import key
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@dataclass(eq=False, kw_only=True)
class _Mixing(Method):
    """Mixes neighboring points of the (randomly ordered) batch before the attack.

    Partners are neighbors because the processes of a distributed run have contiguous shares of the batch; with any
    other pairing, results would depend on the number of processes.

    Args:
        alpha: the weight of the point itself is drawn from Beta(alpha, alpha), once per batch as in the papers.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", alpha=self.alpha)

    def before_attack(self, trainer: Trainer, step: Step) -> None:
        draw = np.random.default_rng(key(trainer.seed, type(self).__name__, step.number))
        number = torch.arange(len(step.y), device=step.y.device)
        partner = (number ^ 1).clamp_max(len(step.y) - 1)  # the last point of an odd batch is not mixed
        labels = F.one_hot(step.y, trainer.data.num_classes).to(step.x.dtype) if step.y.dim() == 1 else step.y
        step.x, step.y = self.mix(step.x, labels, partner, draw)

    def mix(self, x: Tensor, y: Tensor, partner: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@METHODS.register()
class Mixup(_Mixing):
    """Mixup: convex combinations of two images and their labels (Zhang et al., 2018)."""

    def mix(self, x: Tensor, y: Tensor, partner: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        return mixup(x, y, partner, float(draw.beta(self.alpha, self.alpha)))


@METHODS.register()
class CutMix(_Mixing):
    """CutMix: pastes a box of one image into another and mixes the labels by area (Yun et al., 2019)."""

    def mix(self, x: Tensor, y: Tensor, partner: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        if x.dim() != 4:
            raise InputError(f"CutMix: expected images, got inputs of shape {tuple(x.shape[1:])}")
        weight = torch.tensor([draw.beta(self.alpha, self.alpha)], device=x.device)
        center = torch.tensor(draw.random((1, 2)), device=x.device)
        boxes = cutmix_boxes(weight, center, *x.shape[2:])
        return cutmix(x, y, partner, boxes.expand(len(x), 4))
