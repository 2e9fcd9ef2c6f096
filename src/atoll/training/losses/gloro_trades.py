"""GloRo-TRADES (Leino et al., 2021; thesis, Definition 20)."""

from atoll.training.losses.base import Loss, nonnegative
from atoll.training.losses.lipschitz_terms import Abstention
from atoll.training.losses.terms import CrossEntropy


class GloRoTRADES(Loss):
    """CE(f, y) - lambda_t log(1 - q_abstain), the KL between the softmax without and with the abstain logit.

    Args:
        lambda_t: weight of the second term.

    >>> list(GloRoTRADES(lambda_t=1.5).terms)
    ['ce', 'abstain']
    """

    uses_lipschitz = True

    def __init__(self, *, lambda_t: float = 1.0) -> None:
        super().__init__(
            ce=(1.0, CrossEntropy("clean")),
            abstain=(nonnegative(lambda_t, "lambda_t"), Abstention()),
        )
