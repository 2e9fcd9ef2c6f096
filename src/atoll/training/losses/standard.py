"""Standard training."""

from atoll.training.losses.base import Loss
from atoll.training.losses.terms import CrossEntropy


class Standard(Loss):
    """CE(g, y), no attack.

    >>> Standard().objective is None
    True
    """

    def __init__(self) -> None:
        super().__init__(ce=(1.0, CrossEntropy("clean")))
