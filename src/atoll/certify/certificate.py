"""Certificates and certifiers, whatever they rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.certify.propagation import LayerBound
from atoll.graph import CapturedModel


@dataclass(frozen=True)
class Certificate:
    """For each input a prediction and an l2 radius within which it provably cannot change.

    Args:
        prediction: class of each input, int64; -1 if a certifier that samples abstains.
        radius: float64; 0 if nothing is proven.
        function: digest of the captured graph that this is proven of, "" if it is not a proof.

    >>> import torch
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
        """The prediction, or -1 if the classifier abstains because nothing is proven within eps."""
        return self.prediction.where(self.holds(eps), -1)


Certifier = Callable[[Tensor], Certificate]


class Proof(Protocol):
    """A certifier, the captured graph that its certificates are about, and the Lipschitz bounds they rest on."""

    @property
    def layers(self) -> tuple[LayerBound, ...]: ...

    @property
    def lipschitz(self) -> float: ...

    @property
    def model(self) -> CapturedModel: ...

    def __call__(self, x: Tensor) -> Certificate: ...
