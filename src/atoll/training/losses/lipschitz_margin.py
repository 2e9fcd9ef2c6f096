"""Lipschitz-margin training (Tsuzuku et al., 2018)."""

from atoll.training.losses.base import Loss
from atoll.training.losses.lipschitz_terms import GlobalMargin


class LipschitzMargin(Loss):
    """Cross-entropy with sqrt(2) eps K added to every other logit, K the Lipschitz constant of all logits together.

    >>> list(LipschitzMargin().terms)
    ['ce']
    """

    uses_lipschitz = True

    def __init__(self) -> None:
        super().__init__(ce=(1.0, GlobalMargin()))
