"""Losses for standard and adversarial training."""

from __future__ import annotations

from atoll.errors import check_range
from atoll.losses.base import LOSSES, Loss
from atoll.losses.terms import KL, CrossEntropy, Margin, Pairing, WeightedKL


@LOSSES.register()
class Standard(Loss):
    """Standard training: cross-entropy at clean inputs, CE(g, y).

    >>> Standard().objective is None
    True
    """

    def __init__(self) -> None:
        super().__init__(ce=(1.0, CrossEntropy("clean")))


@LOSSES.register()
class AT(Loss):
    """Adversarial training (Madry et al., 2018): cross-entropy at adversarial inputs, CE(g', y).

    >>> AT().objective, AT().uses_clean
    ('ce', False)
    """

    objective = "ce"
    uses_clean = False

    def __init__(self) -> None:
        super().__init__(ce=(1.0, CrossEntropy("adversarial")))


@LOSSES.register()
class TRADES(Loss):
    """TRADES (Zhang et al., 2019): CE(g, y) + lambda_t KL(p, q) at inputs that maximize the KL term.

    Args:
        lambda_t: weight of the KL term (1/lambda in the original paper).
        stop_clean_gradient: treat p as a constant in the KL term.

    >>> list(TRADES(lambda_t=6).terms)
    ['ce', 'kl']
    """

    objective = "kl"

    def __init__(self, *, lambda_t: float = 6.0, stop_clean_gradient: bool = False) -> None:
        check_range("[0, inf)", lambda_t=lambda_t)
        pairing = KL(stop_clean_gradient=stop_clean_gradient)
        super().__init__(ce=(1.0, CrossEntropy("clean")), kl=(lambda_t, pairing))


@LOSSES.register()
class ALP(Loss):
    """Adversarial logit pairing (Kannan et al., 2018): CE(g', y) + lambda_a ||p - q||^2.

    Args:
        lambda_a: weight of the pairing term.
        stop_clean_gradient: treat p as a constant in the pairing term.

    >>> list(ALP().terms)
    ['ce', 'pairing']
    """

    objective = "ce"

    def __init__(self, *, lambda_a: float = 1.0, stop_clean_gradient: bool = False) -> None:
        check_range("[0, inf)", lambda_a=lambda_a)
        pairing = Pairing(stop_clean_gradient=stop_clean_gradient)
        super().__init__(ce=(1.0, CrossEntropy("adversarial")), pairing=(lambda_a, pairing))


@LOSSES.register()
class MART(Loss):
    """MART (Wang et al., 2020): CE(g', y) - log(1 - max_{k != y} q_k) + lambda_m (1 - p_y) KL(p, q).

    Args:
        lambda_m: weight of the KL term.
        stop_clean_gradient: treat p as a constant in the KL term.

    >>> list(MART(lambda_m=5).terms)
    ['ce', 'margin', 'wkl']
    """

    objective = "ce"

    def __init__(self, *, lambda_m: float = 6.0, stop_clean_gradient: bool = False) -> None:
        check_range("[0, inf)", lambda_m=lambda_m)
        pairing = WeightedKL(stop_clean_gradient=stop_clean_gradient)
        super().__init__(ce=(1.0, CrossEntropy("adversarial")), margin=(1.0, Margin()), wkl=(lambda_m, pairing))
