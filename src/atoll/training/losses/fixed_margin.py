"""The fixed-margin variant of EMMA, for comparison (thesis, section 5.1.3)."""

from atoll.training.losses.base import Loss
from atoll.training.losses.lipschitz_terms import FixedMargin


class FixedMarginCE(Loss):
    """-log exp(f_y) / sum_i exp(f_i + eps K_yi), with K_yy = 0.

    >>> list(FixedMarginCE().terms)
    ['ce']
    """

    uses_lipschitz = True

    def __init__(self) -> None:
        super().__init__(ce=(1.0, FixedMargin()))
