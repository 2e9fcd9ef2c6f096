"""A point, a small network in PyTorch and NumPy, and projections: what versions of attacks for one point need."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor, nn

from atoll.attacks import PGD
from atoll.attacks.base import Attack

Array = NDArray[Any]
Look = Callable[[Array], tuple[Array, Array]]  # logits, and their derivatives: classes times features

SHAPE = (3, 2, 2)
CLASSES = 6
SEEDS = range(4)


class Point:
    """A point, a network that classifies it correctly by some margin, and what an attack evaluates."""

    def __init__(self, seed: int, *, scale: float = 3.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        features = math.prod(SHAPE)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
        for parameter in self.model.parameters():
            parameter.data = scale * torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 4
        self.weights = [parameter.detach().numpy() for parameter in self.model.parameters()]
        self.x = torch.rand(1, *SHAPE, generator=draw, dtype=torch.float64)
        self.y = self.model(self.x).argmax(1)

    def candidates(self, attack: Attack) -> tuple[list[Array], Array]:
        """Inputs that the attack evaluates after the clean one, and its result."""
        asked: list[Array] = []
        hook = self.model.register_forward_pre_hook(lambda _, inputs: asked.append(flat(inputs[0])))
        result = attack(self.model, self.x, self.y)
        hook.remove()
        return asked[1:] if attack.__class__ is not PGD else asked, flat(result)

    def look(self, point: Array) -> tuple[Array, Array]:
        first, shift, second, bias = self.weights
        hidden = np.tanh(first @ point + shift)
        return second @ hidden + bias, (second * (1 - hidden**2)) @ first

    @property
    def clean(self) -> Array:
        return flat(self.x)

    @property
    def label(self) -> int:
        return int(self.y)

    def wrong(self, point: Array) -> bool:
        return int(self.look(point)[0].argmax()) != self.label


def flat(x: Tensor) -> Array:
    return x.detach().reshape(-1).numpy().copy()


def size(delta: Array, norm: str) -> float:
    return float(np.linalg.norm(delta, {"linf": np.inf, "l2": 2, "l1": 1, "l0": 0}[norm]))


def project(point: Array, x: Array, norm: str, eps: float, low: float = 0, high: float = 1) -> Array:
    """For l2, ball first and bounds second, as in AutoAttack; Atoll's l2 and l1 balls are smaller by 1e-6."""
    if norm == "linf":
        return np.clip(np.clip(point, x - eps, x + eps), low, high)
    eps *= 1 - 1e-6
    if norm == "l2":
        return np.clip(x + (point - x) * min(1, eps / max(size(point - x, "l2"), 1e-30)), low, high)

    def moved(threshold: float) -> Array:
        shrunk = np.sign(point - x) * np.maximum(np.abs(point - x) - threshold, 0)
        return np.clip(x + shrunk, low, high) - x

    if size(moved(0), "l1") <= eps:
        return x + moved(0)
    return x + moved(brentq(lambda t: size(moved(t), "l1") - eps, 0, np.abs(point - x).max(), xtol=1e-15))
