"""Adversarial training (Madry et al., 2018)."""

from atoll.training.losses.base import Loss
from atoll.training.losses.terms import CrossEntropy


class AT(Loss):
    """CE(g', y) at inputs that maximise it; needs no clean pass.

    >>> AT().objective, AT().uses_clean
    ('ce', False)
    """

    objective = "ce"
    uses_clean = False

    def __init__(self) -> None:
        super().__init__(ce=(1.0, CrossEntropy("adversarial")))
