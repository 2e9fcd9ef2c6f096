"""TRADES (Zhang et al., 2019)."""

from atoll.training.losses.base import Loss, nonnegative
from atoll.training.losses.terms import KL, CrossEntropy


class TRADES(Loss):
    """CE(g, y) + lambda_t KL(p, q) at inputs that maximise the KL.

    Args:
        lambda_t: weight of the KL (1/lambda in the original paper).
        stop_clean_gradient: treat p as a constant in the KL.

    >>> list(TRADES(lambda_t=6).terms)
    ['ce', 'kl']
    """

    objective = "kl"

    def __init__(self, *, lambda_t: float = 6.0, stop_clean_gradient: bool = False) -> None:
        super().__init__(
            ce=(1.0, CrossEntropy("clean")),
            kl=(nonnegative(lambda_t, "lambda_t"), KL(stop_clean_gradient=stop_clean_gradient)),
        )
