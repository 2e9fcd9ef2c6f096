"""EMMA, efficient margin maximisation (Hu et al., 2023; thesis, Definition 21)."""

from atoll.training.losses.base import Loss
from atoll.training.losses.lipschitz_terms import DynamicMargin


class EMMA(Loss):
    """-log exp(f_y) / sum_i exp(f_i + e_i K_yi), e_i = clip((f_y - f_i) / K_yi, 0, eps) without gradient, e_y = 0.

    Every class that threatens is kept away, not only the one that threatens most, and none further than it already is.

    >>> list(EMMA().terms)
    ['ce']
    """

    uses_lipschitz = True

    def __init__(self) -> None:
        super().__init__(ce=(1.0, DynamicMargin()))
