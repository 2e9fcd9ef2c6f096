"""What a certifier says of an input, whatever it rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """For each input the prediction, and a radius in l2 within which it provably cannot change.

    Args:
        prediction: class of each input, int64; -1 where a certifier that samples abstains.
        radius: float64; 0 where nothing is proven.

    >>> import torch
    >>> found = Certificate(torch.tensor([3, 7]), torch.tensor([0.5, 0.1], dtype=torch.float64))
    >>> found.answer(0.2)
    tensor([ 3, -1])
    """

    prediction: Tensor
    radius: Tensor

    def holds(self, eps: float | Tensor) -> Tensor:
        """Whether the prediction is proven within eps."""
        return (self.radius > 0) & (self.radius >= eps)

    def answer(self, eps: float | Tensor) -> Tensor:
        """The prediction, or -1 where the classifier abstains because it cannot promise it within eps."""
        return self.prediction.where(self.holds(eps), -1)


Certifier = Callable[[Tensor], Certificate]
