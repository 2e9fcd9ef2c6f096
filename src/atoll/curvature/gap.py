"""The robust generalization gap: robust error on test points minus robust error on training points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.curvature.risk import shared
from atoll.distributed import all_sum
from atoll.errors import InputError
from atoll.modules import evaluation_mode, preserve_buffers
from atoll.stats import Estimate


@dataclass(frozen=True)
class Gap:
    """Robust error and cross-entropy on training and test points; gaps are test minus training."""

    train_error: Estimate
    test_error: Estimate
    train_loss: Estimate
    test_loss: Estimate

    @property
    def error(self) -> Estimate:
        return _difference(self.test_error, self.train_error)

    @property
    def loss(self) -> Estimate:
        return _difference(self.test_loss, self.train_loss)

    def to_json(self) -> dict[str, Any]:
        parts = {**vars(self), "error": self.error, "loss": self.loss}
        return {name: part.to_json() for name, part in parts.items()}


def robust_gap(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    attack: Attack,
    *,
    seed: object = 0,
    batch_size: int = 128,
) -> Gap:
    """Measure the gap with the same attack on both sets; standard errors are due to the sampling of points.

    >>> from atoll.attacks import PGD
    >>> from atoll.threat import ThreatModel
    >>> x, y = torch.rand(8, 2), torch.arange(8) % 2
    >>> gap = robust_gap(nn.Linear(2, 2), (x, y), (x, y), PGD(ThreatModel("linf", 0.1)))
    >>> gap.error.value, gap.loss.value
    (0.0, 0.0)
    """
    (train_error, train_loss), (test_error, test_loss) = (
        _measure(model, x, y, attack, seed, batch_size) for x, y in (train, test)
    )
    return Gap(train_error, test_error, train_loss, test_loss)


def _measure(
    model: nn.Module, x: Tensor, y: Tensor, attack: Attack, seed: object, batch_size: int
) -> tuple[Estimate, Estimate]:
    if not len(x) or len(x) != len(y):
        raise InputError(f"labels: expected one per point and at least one point, got {len(y)} for {len(x)} points")
    like = next(model.parameters())
    results = torch.zeros(2, len(x), dtype=torch.float64, device=like.device)
    with preserve_buffers(model):
        for index in shared(len(x), batch_size):
            here, labels = index.to(like.device), y[index].to(like.device)
            x_adv = attack(model, x[index].to(like), labels, seed=seed, index=here)
            with torch.no_grad(), evaluation_mode(model):
                logits = model(x_adv)
            results[0, here] = (logits.argmax(1) != labels).double()
            results[1, here] = F.cross_entropy(logits, labels, reduction="none").double()
    wrong, loss = all_sum(results)
    return Estimate.mean_of(wrong), Estimate.mean_of(loss)


def _difference(a: Estimate, b: Estimate) -> Estimate:
    return Estimate(a.value - b.value, math.hypot(a.standard_error, b.standard_error))
