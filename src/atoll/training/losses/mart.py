"""MART, misclassification-aware adversarial training (Wang et al., 2020)."""

from atoll.training.losses.base import Loss, nonnegative
from atoll.training.losses.terms import CrossEntropy, Margin, WeightedKL


class MART(Loss):
    """CE(g', y) - log(1 - max_{k != y} q_k) + lambda_m (1 - p_y) KL(p, q).

    >>> list(MART(lambda_m=5).terms)
    ['ce', 'margin', 'wkl']
    """

    objective = "ce"

    def __init__(self, *, lambda_m: float = 6.0, stop_clean_gradient: bool = False) -> None:
        super().__init__(
            ce=(1.0, CrossEntropy("adversarial")),
            margin=(1.0, Margin()),
            wkl=(nonnegative(lambda_m, "lambda_m"), WeightedKL(stop_clean_gradient=stop_clean_gradient)),
        )
