"""Certificates, and the interface of certifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.certify.propagation import LayerBound
from atoll.graph import CapturedModel

VANISHING = 2.0**-500  # numbers whose squares may underflow in float64


@dataclass(frozen=True)
class Certificate:
    """A prediction for each input, and an l2 radius within which it provably cannot change.

    Args:
        prediction: class of each input, int64; -1 if randomized smoothing abstains.
        radius: radius of each input, float64; 0 if nothing is proven.
        function: digest of the captured graph that the proof is about, "" if there is no proof.

    >>> certificate = Certificate(torch.tensor([3, 7]), torch.tensor([0.5, 0.1], dtype=torch.float64))
    >>> certificate.answer(0.2)
    tensor([ 3, -1])
    """

    prediction: Tensor
    radius: Tensor
    function: str = ""

    def holds(self, eps: float | Tensor) -> Tensor:
        """Whether the prediction is proven within eps."""
        return (self.radius > 0) & (self.radius >= eps)

    def answer(self, eps: float | Tensor) -> Tensor:
        """Return the prediction, or -1 (abstain) if it is not proven within eps."""
        return self.prediction.where(self.holds(eps), -1)


def input_size(x: Tensor) -> Tensor:
    """Return upper bounds of the l2 norms of inputs, up to rounding, also if squares of small entries underflow."""
    flat = x.flatten(1)
    size: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return size + math.sqrt(flat.shape[1]) * VANISHING


def rounded_inputs(radius: Tensor, size: Tensor, given: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Correct a radius for inputs that are first rounded to the precision of the network.

    Args:
        radius: certified radius for rounded inputs.
        size: l2 norm of each input.
        given: precision of the inputs.
        dtype: precision of the network.
    """
    if torch.finfo(given).eps >= torch.finfo(dtype).eps:
        return radius
    unit = torch.finfo(dtype).eps / 2
    return ((radius - 2.01 * unit * size) / (1 + 2 * unit)).clamp_min(0) * (1 - 1e-12)


Certifier = Callable[[Tensor], Certificate]


class Proof(Protocol):
    """A certifier with the captured graph that its certificates are about, and the Lipschitz bounds it uses."""

    @property
    def layers(self) -> tuple[LayerBound, ...]: ...

    @property
    def lipschitz(self) -> float: ...

    @property
    def model(self) -> CapturedModel: ...

    def __call__(self, x: Tensor) -> Certificate: ...
