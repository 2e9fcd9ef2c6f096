r"""PAC-Bayes numbers of a trained net: Gaussian prior and posterior, bounds on the expected loss.

Prior :math:`P = N(0, \sigma_0^2 I)`, posterior :math:`Q = N(\theta, \mathrm{diag}(\sigma^2))`.  To second order
:math:`E_Q R = R(\theta) + \tfrac12 \sum_i \sigma_i^2 H_{ii}`; the slope does not count, because Q is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from atoll.curvature.risk import EmpiricalRisk, Vector, flatten
from atoll.errors import InputError, check_range
from atoll.rng import generator
from atoll.stats import Estimate

# Priors and temperatures to choose from; the bounds hold for all of them at once.
SIGMAS = tuple(2.0**-k for k in range(13))
TEMPERATURES = tuple(2.0**k for k in range(-6, 7))  # of lambda, in units of the number of points


@dataclass(frozen=True)
class Posterior:
    """A Gaussian around the weights whose variance is constant on blocks of them."""

    variances: Tensor
    traces: Tensor  # of the Hessian on each block
    sizes: Tensor  # number of weights in each block
    squared_norm: float  # of all weights
    sigma0: float  # standard deviation of the prior

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
    r"""The variances that minimize :math:`E_Q R + \mathrm{KL}(Q, P) / \beta` to second order.

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


@dataclass(frozen=True)
class PACBayesBounds:
    """Bounds on the expected loss of a Gaussian posterior.

    Args:
        posterior: ``spherical`` or ``diagonal``.
        sigma0: standard deviation of the prior.
        lambda_: the temperature.
        n: points.
        clip: the loss is cut off at this value for the bounds.
        alpha: all bounds hold together with probability 1 - alpha.
        risk: mean loss without noise.
        expansion: mean loss with noise, to second order.
        noisy: the same by Monte Carlo, with its standard error.
        clipped: the same of the clipped loss.
        kl: from the prior to the posterior.
        linear: loss, norm and trace (TrH, Theorem 3).
        catoni: Catoni's bound.
        square_root: the square-root form.
        message: what the numbers mean.
    """

    posterior: str
    sigma0: float
    lambda_: float
    n: int
    clip: float
    alpha: float
    risk: float
    expansion: float
    noisy: Estimate
    clipped: Estimate
    kl: float
    linear: float
    catoni: float
    square_root: float
    message: str


def gibbs_risk(
    risk: EmpiricalRisk, deviations: Sequence[Tensor], *, pairs: int = 10, clip: float = math.inf, seed: object = 0
) -> tuple[Estimate, Estimate]:
    """Mean loss, and mean clipped loss, of the net with noise of these standard deviations on its weights.

    Draws come in pairs with opposite signs, so that the slope of the loss adds no error.  The adversarial inputs stay
    those of the net without noise.  The kinks of a ReLU net count here, but not in its Hessian: with noise that reaches
    them the second-order expansion is too small.

    >>> from atoll.losses import Standard
    >>> risk = EmpiricalRisk(torch.nn.Linear(2, 2).eval(), Standard(), torch.rand(4, 2), torch.arange(4) % 2)
    >>> still, _ = gibbs_risk(risk, [torch.zeros_like(p) for p in risk.parameters], pairs=2)
    >>> abs(still.value - risk.value()) < 1e-9, still.standard_error
    (True, 0.0)
    """
    check_range("[2, inf)", pairs=pairs)
    means = torch.zeros(pairs, 2, dtype=torch.float64)
    for number in range(pairs):
        draw = generator(seed, "posterior", number, device=risk.device)
        both = zip(risk.parameters, deviations, strict=True)
        noise = [torch.empty_like(p).normal_(generator=draw) * d for p, d in both]
        for sign in (1, -1):
            values = risk.values_at((sign, noise))
            means[number] += torch.stack([values.mean(), values.clamp_max(clip).mean()]) / 2
    errors = means.std(0) / math.sqrt(pairs)
    return Estimate(float(means[:, 0].mean()), float(errors[0])), Estimate(float(means[:, 1].mean()), float(errors[1]))


def pac_bayes(
    risk: EmpiricalRisk,
    trace: float,
    diagonal: Vector | None = None,
    *,
    clip: float | None = None,
    alpha: float = 0.05,
    pairs: int = 10,
    seed: object = 0,
) -> list[PACBayesBounds]:
    """Bounds for the optimal spherical posterior and, given the Hessian's diagonal, for the optimal diagonal one.

    Prior and temperature are chosen among ``SIGMAS`` and ``TEMPERATURES`` for the smallest bound to second order; a
    union bound pays for the choice.  Each bound's ``message`` states what it does not prove.

    Args:
        risk: the loss at training points.
        trace: of the whole Hessian.
        diagonal: of the Hessian.
        clip: where the loss is cut off; twice that of guessing, 2 log K, if None.
        alpha: probability with which a bound may fail.
        pairs: Monte Carlo draws, in pairs.
        seed: of the draws.
    """
    if not 0 < alpha < 1 or (clip is not None and not 0 < clip < math.inf):
        raise InputError(f"alpha, clip: expected a probability and a finite number > 0, got {alpha}, {clip}")
    guessing, n = math.log(_classes(risk)), len(risk)
    clip = 2 * guessing if clip is None else clip
    each = alpha / (len(SIGMAS) * len(TEMPERATURES))
    values = risk.values()
    mean_loss, clipped_loss = float(values.mean()), float(values.clamp_max(clip).mean())
    weights = flatten([p.detach() for p in risk.parameters]).double()
    squared_norm = float(weights.square().sum())
    spherical = partial(optimal_posterior, [trace], [risk.size], squared_norm)

    def approximate(choice: tuple[float, float]) -> float:
        sigma0, lambda_ = choice
        q = spherical(sigma0=sigma0, beta=lambda_)
        return catoni(clipped_loss + q.increase, q.kl, lambda_=lambda_, n=n, clip=clip, alpha=each)

    sigma0, lambda_ = min(((s, t * n) for s in SIGMAS for t in TEMPERATURES), key=approximate)
    posteriors = {"spherical": spherical(sigma0=sigma0, beta=lambda_)}
    if diagonal is not None:
        traces = flatten(diagonal).cpu()
        sizes = torch.ones_like(traces)
        posteriors["diagonal"] = optimal_posterior(traces, sizes, squared_norm, sigma0=sigma0, beta=lambda_)
    bounds = []
    for name, q in posteriors.items():
        deviations = risk.split(q.variances.sqrt().expand(risk.size).to(risk.parameters[0]))
        noisy, clipped = gibbs_risk(risk, deviations, pairs=pairs, clip=clip, seed=seed)
        constant = catoni_constant(lambda_=lambda_, n=n, clip=clip, alpha=each)
        bound = catoni(clipped.value, q.kl, lambda_=lambda_, n=n, clip=clip, alpha=each)
        root = square_root(clipped.value, q.kl, n=n, clip=clip, alpha=each)
        bounds.append(
            PACBayesBounds(
                posterior=name,
                sigma0=sigma0,
                lambda_=lambda_,
                n=n,
                clip=clip,
                alpha=alpha,
                risk=mean_loss,
                expansion=mean_loss + q.increase,
                noisy=noisy,
                clipped=clipped,
                kl=q.kl,
                linear=linear_form(mean_loss, squared_norm, trace, sigma0=sigma0, beta=lambda_, constant=constant),
                catoni=bound,
                square_root=root,
                message=verdict(min(bound, root), clip=clip, guessing=guessing),
            )
        )
    return bounds


def verdict(bound: float, *, clip: float, guessing: float) -> str:
    """What a bound on a loss in [0, clip] means, and that it is not a proof.

    >>> text, _, caveat = verdict(5.0, clip=4.6, guessing=2.3).partition(" (")
    >>> text
    'vacuous: 5 is more than 4.6, which the clipped loss cannot exceed anyway'
    >>> caveat
    'an estimate, no proof: perturbations are held fixed, the Monte Carlo mean is taken for exact)'
    >>> verdict(0.5, clip=4.6, guessing=2.3).partition(" (")[0]
    'not vacuous: the expected loss is at most 0.5, guessing costs 2.3'
    """
    if bound >= clip:
        text = f"vacuous: {bound:.3g} is more than {clip:.3g}, which the clipped loss cannot exceed anyway"
    elif bound >= guessing:
        text = f"next to vacuous: {bound:.3g} is more than {guessing:.3g}, the loss of guessing"
    else:
        text = f"not vacuous: the expected loss is at most {bound:.3g}, guessing costs {guessing:.3g}"
    # A reader must not take for a guarantee what holds for these perturbations only.
    return f"{text} (an estimate, no proof: perturbations are held fixed, the Monte Carlo mean is taken for exact)"


def _classes(risk: EmpiricalRisk) -> int:
    with torch.no_grad():
        out, _ = risk.outputs(torch.tensor([0]))
    return (out.g if out.logits is not None else out.g_adv).shape[1]
