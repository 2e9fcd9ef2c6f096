"""Contrast stretching, which takes the force out of many small changes."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.errors import InputError


class Stretch(nn.Module):
    r"""Contrast stretching: :math:`\phi(x) = \mathrm{clip}((x - t) / (1 - 2t), 0, 1)`, for inputs in [0, 1].

    What is closer than t to black or white becomes black or white.  A perturbation that is small in l2 and spread over
    many pixels then changes only those that were grey: to move the others costs t each before it counts.

    Args:
        t: in [0, 1/2); for 0 only the clipping is left.

    >>> import torch
    >>> Stretch(0.1)(torch.tensor([0.05, 0.3, 0.5, 0.97]))
    tensor([0.0000, 0.2500, 0.5000, 1.0000])
    """

    def __init__(self, t: float) -> None:
        super().__init__()
        if not 0 <= t < 0.5:
            raise InputError(f"stretch: expected a number in [0, 1/2), got {t}")
        self.t = t

    @property
    def lipschitz(self) -> float:
        return 1 / (1 - 2 * self.t)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.t) * self.lipschitz).clamp(0, 1)

    def inverse(self, u: Tensor) -> Tensor:
        """The input in [t, 1 - t] that becomes u, or comes closest."""
        return u.clamp(0, 1) / self.lipschitz + self.t

    def slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The moves, from and to, that lead to where the output changes; 0 is outside of them at black and white."""
        return self.t - x, 1 - self.t - x

    def extra_repr(self) -> str:
        return f"t={self.t}"
