r"""PAC-Bayes numbers of a trained net: Gaussian prior and posterior, bounds on the expected loss, in words.

Prior :math:`P = N(0, \sigma_0^2 I)`, posterior :math:`Q = N(\theta, \mathrm{diag}(\sigma^2))`.  To second order
:math:`E_Q R = R(\theta) + \tfrac12 \sum_i \sigma_i^2 H_{ii}`; the slope does not count, because Q is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import InputError


@dataclass(frozen=True)
class Posterior:
    """A Gaussian around the weights whose variance is constant on blocks of them.

    Args:
        variances: one for each block.
        traces: of the Hessian on each block.
        sizes: number of weights in each block.
        squared_norm: of all weights.
        sigma0: standard deviation of the prior.
    """

    variances: Tensor
    traces: Tensor
    sizes: Tensor
    squared_norm: float
    sigma0: float

    @property
    def kl(self) -> float:
        """KL(Q, P)."""
        ratio = self.variances / self.sigma0**2
        return float((self.sizes * (ratio - 1 - ratio.log())).sum() + self.squared_norm / self.sigma0**2) / 2

    @property
    def increase(self) -> float:
        """What the noise adds to the loss, to second order."""
        return float((self.variances * self.traces).sum()) / 2


def optimal_posterior(
    traces: Sequence[float] | Tensor,
    sizes: Sequence[int] | Tensor,
    squared_norm: float,
    *,
    sigma0: float,
    beta: float,
) -> Posterior:
    r"""The variances that minimise :math:`E_Q R + \mathrm{KL}(Q, P) / \beta` to second order.

    .. math:: \sigma_b^2 = \frac{\sigma_0^2}{1 + \sigma_0^2\, \beta\, T_b / d_b}

    for a block of d weights with trace T.  One block is the spherical posterior, a block for every weight the diagonal
    one.  Negative traces count as zero: far out the loss is not what they promise.

    >>> optimal_posterior([6.0], [2], 1.0, sigma0=1.0, beta=1.0).variances
    tensor([0.2500], dtype=torch.float64)
    """
    if not (0 < sigma0 < math.inf and 0 < beta < math.inf):
        raise InputError(f"sigma0, beta: expected finite numbers > 0, got {sigma0}, {beta}")
    size = torch.as_tensor(sizes, dtype=torch.float64)
    trace = torch.as_tensor(traces, dtype=torch.float64).clamp_min(0)
    return Posterior(sigma0**2 / (1 + sigma0**2 * beta * trace / size), trace, size, squared_norm, sigma0)


def linear_form(
    risk: float, squared_norm: float, trace: float, *, sigma0: float, beta: float, constant: float = 0.0
) -> float:
    r"""The bound of TrH, Theorem 3, up to :math:`O(\sigma_0^4)`: loss, norm and curvature.

    .. math:: R + \frac{\|\theta\|^2}{2 \beta \sigma_0^2} + \frac{\sigma_0^2}{2} \mathrm{Tr}(H) + C

    >>> linear_form(0.5, 4.0, 10.0, sigma0=0.1, beta=1000.0)  # 0.5 + 0.2 + 0.05
    0.75
    """
    return risk + squared_norm / (2 * beta * sigma0**2) + sigma0**2 / 2 * trace + constant


def catoni_constant(*, lambda_: float, n: int, clip: float, alpha: float) -> float:
    r"""The part of Catoni's bound that is the same for all posteriors.

    .. math:: \frac{\lambda C^2}{8 n} + \frac{\log(1/\alpha)}{\lambda}

    >>> round(catoni_constant(lambda_=10.0, n=100, clip=2.0, alpha=0.05), 4)
    0.3496
    """
    return lambda_ * clip**2 / (8 * n) + math.log(1 / alpha) / lambda_


def catoni(risk: float, kl: float, *, lambda_: float, n: int, clip: float, alpha: float) -> float:
    r"""Catoni's bound on the expected loss, for a loss in [0, C], with probability :math:`1 - \alpha`.

    .. math:: E_Q R + \frac{\lambda C^2}{8 n} + \frac{\mathrm{KL} + \log(1/\alpha)}{\lambda}

    ``lambda_`` must not depend on the data; to choose among m values, divide ``alpha`` by m.

    >>> round(catoni(0.5, 3.0, lambda_=10.0, n=100, clip=2.0, alpha=0.05), 4)
    1.1496
    """
    return risk + kl / lambda_ + catoni_constant(lambda_=lambda_, n=n, clip=clip, alpha=alpha)


def square_root(risk: float, kl: float, *, n: int, clip: float, alpha: float) -> float:
    r"""The square-root form, for a loss in [0, C]; the logarithm is divided by n as well (TrH, Theorem 1 forgets that).

    .. math:: E_Q R + 4 C \sqrt{\frac{\mathrm{KL} + \log(2n/\alpha)}{n}}

    >>> round(square_root(0.1, 2.0, n=10_000, clip=1.0, alpha=0.05), 4)
    0.2544
    """
    return risk + 4 * clip * math.sqrt((kl + math.log(2 * n / alpha)) / n)
