"""Adversarial logit pairing (Kannan et al., 2018), in the form of the TrH paper: paired probabilities."""

from atoll.training.losses.base import Loss, nonnegative
from atoll.training.losses.terms import CrossEntropy, Pairing


class ALP(Loss):
    """CE(g', y) + lambda_a ||p - q||^2.

    >>> list(ALP().terms)
    ['ce', 'pairing']
    """

    objective = "ce"

    def __init__(self, *, lambda_a: float = 1.0, stop_clean_gradient: bool = False) -> None:
        super().__init__(
            ce=(1.0, CrossEntropy("adversarial")),
            pairing=(nonnegative(lambda_a, "lambda_a"), Pairing(stop_clean_gradient=stop_clean_gradient)),
        )
