"""GloRo-CE (Leino et al., 2021; thesis, Definition 19)."""

from atoll.training.losses.base import Loss
from atoll.training.losses.lipschitz_terms import AbstainCrossEntropy


class GloRoCE(Loss):
    """CE([f, f_abstain], y): an input that cannot be certified counts as one of a class of its own.

    >>> list(GloRoCE().terms)
    ['ce']
    """

    uses_lipschitz = True

    def __init__(self) -> None:
        super().__init__(ce=(1.0, AbstainCrossEntropy()))
