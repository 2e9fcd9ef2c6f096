r"""PAC-Bayes bounds on the expected loss of a trained network, with Gaussian prior and posterior.

The prior is :math:`P = N(0, \sigma_0^2 I)`, the posterior :math:`Q = N(\theta, \mathrm{diag}(\sigma^2))`.  To second
order, :math:`E_Q R = R(\theta) + \tfrac12 \sum_i \sigma_i^2 H_{ii}`; the gradient does not contribute, because Q is
symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.curvature.risk import EmpiricalRisk, Vector, flatten
from atoll.errors import InputError, check_count
from atoll.losses.base import Loss
from atoll.models.base import Normalize
from atoll.modules import preserve_buffers
from atoll.rng import generator
from atoll.stats import Estimate

# Priors and temperatures to choose from; the bounds hold for all of them simultaneously.
SIGMAS = tuple(2.0**-k for k in range(13))
TEMPERATURES = tuple(2.0**k for k in range(-6, 7))  # values of lambda, in units of the number of points


@dataclass(frozen=True)
class Posterior:
    """A Gaussian around the weights with a constant variance on each block of weights."""

    variances: Tensor
    traces: Tensor  # trace of the Hessian on each block
    sizes: Tensor  # number of weights in each block
    squared_norm: float  # squared norm of all weights
    sigma0: float  # standard deviation of the prior

    @property
    def kl(self) -> float:
        """KL(Q, P)."""
        ratio = self.variances / self.sigma0**2
        return float((self.sizes * (ratio - 1 - ratio.log())).sum() + self.squared_norm / self.sigma0**2) / 2

    @property
    def increase(self) -> float:
        """Increase of the loss due to the noise, to second order."""
        return float((self.variances * self.traces).sum()) / 2


def optimal_posterior(
    traces: Sequence[float] | Tensor,
    sizes: Sequence[int] | Tensor,
    squared_norm: float,
    *,
    sigma0: float,
    beta: float,
) -> Posterior:
    r"""Return the posterior that minimizes :math:`E_Q R + \mathrm{KL}(Q, P) / \beta` to second order.

    .. math:: \sigma_b^2 = \frac{\sigma_0^2}{1 + \sigma_0^2\, \beta\, T_b / d_b}

    for a block of d weights with trace T.  One block gives the spherical posterior, one block per weight the diagonal
    posterior.  Negative traces count as zero, because the loss does not decrease as much as they predict.

    >>> optimal_posterior([6.0], [2], 1.0, sigma0=1.0, beta=1.0).variances
    tensor([0.2500], dtype=torch.float64)
    """
    if not torch.as_tensor(traces).isfinite().all():
        raise InputError("traces: expected finite numbers")
    if not (0 < sigma0 < math.inf and 0 < beta < math.inf):
        raise InputError(f"sigma0, beta: expected finite numbers > 0, got {sigma0}, {beta}")
    size = torch.as_tensor(sizes, dtype=torch.float64)
    trace = torch.as_tensor(traces, dtype=torch.float64).clamp_min(0)
    return Posterior(sigma0**2 / (1 + sigma0**2 * beta * trace / size), trace, size, squared_norm, sigma0)


def linear_form(
    risk: float, squared_norm: float, trace: float, *, sigma0: float, beta: float, constant: float = 0.0
) -> float:
    r"""Return the bound of TrH, Theorem 3, up to :math:`O(\sigma_0^4)`: loss, norm and curvature.

    .. math:: R + \frac{\|\theta\|^2}{2 \beta \sigma_0^2} + \frac{\sigma_0^2}{2} \mathrm{Tr}(H) + C

    >>> linear_form(0.5, 4.0, 10.0, sigma0=0.1, beta=1000.0)  # 0.5 + 0.2 + 0.05
    0.75
    """
    return risk + squared_norm / (2 * beta * sigma0**2) + sigma0**2 / 2 * trace + constant


def catoni_constant(*, lambda_: float, n: int, clip: float, alpha: float) -> float:
    r"""Return the part of Catoni's bound that is the same for all posteriors.

    .. math:: \frac{\lambda C^2}{8 n} + \frac{\log(1/\alpha)}{\lambda}

    >>> round(catoni_constant(lambda_=10.0, n=100, clip=2.0, alpha=0.05), 4)
    0.3496
    """
    return lambda_ * clip**2 / (8 * n) + math.log(1 / alpha) / lambda_


def catoni(risk: float, kl: float, *, lambda_: float, n: int, clip: float, alpha: float) -> float:
    r"""Return Catoni's bound on the expected loss, for a loss in [0, C], with probability :math:`1 - \alpha`.

    .. math:: E_Q R + \frac{\lambda C^2}{8 n} + \frac{\mathrm{KL} + \log(1/\alpha)}{\lambda}

    ``lambda_`` must not depend on the data; to choose among m values, divide ``alpha`` by m.

    >>> round(catoni(0.5, 3.0, lambda_=10.0, n=100, clip=2.0, alpha=0.05), 4)
    1.1496
    """
    return risk + kl / lambda_ + catoni_constant(lambda_=lambda_, n=n, clip=clip, alpha=alpha)


def square_root(risk: float, kl: float, *, n: int, clip: float, alpha: float) -> float:
    r"""Return the square-root bound, for a loss in [0, C].

    .. math:: E_Q R + 4 C \sqrt{\frac{\mathrm{KL} + \log(2n/\alpha)}{n}}

    The logarithm is also divided by n, which is missing in TrH, Theorem 1.

    >>> round(square_root(0.1, 2.0, n=10_000, clip=1.0, alpha=0.05), 4)
    0.2544
    """
    return risk + 4 * clip * math.sqrt((kl + math.log(2 * n / alpha)) / n)


def kl_inverse(mean: float, limit: float) -> float:
    r"""Return the largest p in [0, 1] whose divergence from q is at most c.

    .. math:: \mathrm{kl}(q, p) = q \log\frac{q}{p} + (1 - q) \log\frac{1 - q}{1 - p}

    Args:
        mean: q, in [0, 1].
        limit: c.

    >>> round(kl_inverse(0.0, 0.1), 6), round(1 - math.exp(-0.1), 6)
    (0.095163, 0.095163)
    """
    low, high = mean, 1.0
    if not (0 <= mean <= 1 and limit >= 0):
        raise InputError(f"mean, limit: expected a number in [0, 1] and a number >= 0, got {mean}, {limit}")
    for _ in range(100):  # bisect to the last bit
        middle = (low + high) / 2
        if middle in (low, high):
            break
        distance = mean * math.log(mean / middle) if mean else 0.0
        distance += (1 - mean) * math.log((1 - mean) / (1 - middle)) if mean < 1 else 0.0
        low, high = (middle, high) if distance <= limit else (low, middle)
    # The rounding error of the divergence is a few 1e-16, and it grows at least like 2 (p - q)^2, so the error of p is
    # smaller than this.
    return min(1.0, high + 4e-8)


def kl_bound(risk: float, kl: float, *, n: int, clip: float, alpha: float) -> float:
    r"""Return the kl-inverse bound for a loss in [0, C] (Seeger, 2002; Maurer, 2004).

    .. math:: C\, \mathrm{kl}^{-1}\Big(\frac{E_Q R}{C},\; \frac{\mathrm{KL} + \log(2 \sqrt n / \alpha)}{n}\Big)

    It is never above the square-root bound and holds for all posteriors simultaneously; to choose among m priors,
    divide ``alpha`` by m.

    >>> round(kl_bound(0.02, 2.0, n=1000, clip=1.0, alpha=0.05), 4)
    0.0451
    """
    return clip * kl_inverse(min(risk / clip, 1.0), (kl + math.log(2 * math.sqrt(n) / alpha)) / n)


@dataclass(frozen=True)
class PACBayesBounds:
    """Estimates of bounds on the expected loss of a Gaussian posterior, which are not proofs (see ``PACBayesProof``).

    Args:
        posterior: ``spherical`` or ``diagonal``.
        sigma0: standard deviation of the prior.
        lambda_: temperature.
        n: number of points.
        clip: value at which the loss is clipped for the bounds.
        alpha: all bounds hold simultaneously with probability 1 - alpha, if Monte Carlo means are taken as exact.
        risk: mean loss without noise.
        expansion: mean loss with noise, to second order.
        noisy: mean loss with noise by Monte Carlo, with its standard error.
        clipped: mean clipped loss with noise by Monte Carlo.
        kl: divergence of the posterior from the prior.
        linear: loss, norm and trace (TrH, Theorem 3).
        catoni: Catoni's bound.
        square_root: the square-root bound.
        message: interpretation of the numbers.
        kl_inverse: the kl-inverse bound.
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
    kl_inverse: float = math.nan


@dataclass(frozen=True)
class PACBayesProof:
    """A proven bound on the expected loss of random weights, with probability 1 - alpha over points and weights.

    Args:
        posterior: ``spherical`` or ``diagonal``.
        sigma0: standard deviation of the prior.
        n: number of points.
        draws: number of random weights.
        clip: value at which the loss is clipped.
        alpha: failure probability of the proof.
        kl: divergence of the posterior from the prior.
        empirical: upper confidence limit of the mean clipped loss at the points.
        bound: bound on the expected clipped loss.
        message: interpretation of the number.
    """

    posterior: str
    sigma0: float
    n: int
    draws: int
    clip: float
    alpha: float
    kl: float
    empirical: float
    bound: float
    message: str


def gibbs_risk(
    risk: EmpiricalRisk, deviations: Sequence[Tensor], *, pairs: int = 10, clip: float = math.inf, seed: object = 0
) -> tuple[Estimate, Estimate]:
    """Estimate the mean loss and mean clipped loss of the network with Gaussian noise on its weights.

    Noise is drawn in pairs with opposite signs, so that the gradient of the loss adds no error.  The adversarial inputs
    are crafted on the network without noise.  The kinks of a ReLU network count here, but not in its Hessian: with
    noise that reaches them, the second-order expansion is too small.

    >>> from atoll.losses import Standard
    >>> risk = EmpiricalRisk(torch.nn.Linear(2, 2).eval(), Standard(), torch.rand(4, 2), torch.arange(4) % 2)
    >>> still, _ = gibbs_risk(risk, [torch.zeros_like(p) for p in risk.parameters], pairs=2)
    >>> abs(still.value - risk.value()) < 1e-9, still.standard_error
    (True, 0.0)
    """
    check_count(2, pairs=pairs)
    _check_shapes(risk, deviations=deviations)
    means = torch.zeros(pairs, 2, dtype=torch.float64)
    for number in range(pairs):
        draw = generator(seed, "posterior", number, device=risk.device)
        both = zip(risk.parameters, deviations, strict=True)
        noise = [torch.empty_like(p).normal_(generator=draw) * d for p, d in both]
        for sign in (1, -1):
            values = risk.values_at((sign, noise))
            means[number] += torch.stack([values.mean(), values.clamp(0, clip).mean()]) / 2
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
    """Compute bounds for the optimal spherical posterior and, given the diagonal of the Hessian, the diagonal one.

    Each posterior has its own prior and temperature, chosen from ``SIGMAS`` and ``TEMPERATURES`` for the smallest
    Catoni bound to second order.  Each of the three kinds of bounds uses a third of ``alpha``, and a union bound
    accounts for the choice.

    Args:
        risk: the loss at training points.
        trace: trace of the whole Hessian.
        diagonal: diagonal of the Hessian.
        clip: value at which the loss is clipped; 2 log K, twice the loss of guessing, if None.
        alpha: failure probability of the bounds.
        pairs: number of Monte Carlo pairs.
        seed: seed of Monte Carlo.
    """
    guessing, clip = _scale(risk, clip, alpha)
    n, values, squared_norm = len(risk), _values(risk, clip), _squared_norm(risk)
    mean_loss, clipped_loss = float(values.mean()), float(values.clamp_max(clip).mean())
    one_prior = alpha / 3 / len(SIGMAS)
    one_pair = one_prior / len(TEMPERATURES)
    bounds = []
    for name, optimal in _posteriors(risk, trace, diagonal, squared_norm).items():

        def approximate(choice: tuple[float, float], optimal: Callable[..., Posterior] = optimal) -> float:
            q = optimal(sigma0=choice[0], beta=choice[1])
            return catoni(clipped_loss + q.increase, q.kl, lambda_=choice[1], n=n, clip=clip, alpha=one_pair)

        sigma0, lambda_ = min(((s, t * n) for s in SIGMAS for t in TEMPERATURES), key=approximate)
        q = optimal(sigma0=sigma0, beta=lambda_)
        noisy, clipped = gibbs_risk(risk, _deviations(risk, q), pairs=pairs, clip=clip, seed=seed)
        constant = catoni_constant(lambda_=lambda_, n=n, clip=clip, alpha=one_pair)
        bound = catoni(clipped.value, q.kl, lambda_=lambda_, n=n, clip=clip, alpha=one_pair)
        inverse = kl_bound(clipped.value, q.kl, n=n, clip=clip, alpha=one_prior)
        root = square_root(clipped.value, q.kl, n=n, clip=clip, alpha=one_prior)
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
                kl_inverse=inverse,
                # Readers must not mistake this for a guarantee, because it holds for these perturbations only.
                message=f"{verdict(min(bound, inverse, root), clip=clip, guessing=guessing)} (an estimate, not a proof:"
                " perturbations are fixed, and the Monte Carlo mean is taken as exact)",
            )
        )
    return bounds


def pac_bayes_proof(
    risk: EmpiricalRisk,
    trace: float,
    diagonal: Vector | None = None,
    *,
    draws: int = 200,
    clip: float | None = None,
    alpha: float = 0.05,
    seed: object = 0,
) -> list[PACBayesProof]:
    r"""Prove a bound on the expected loss of random weights, for losses without an attack.

    Half of ``alpha`` is used for the kl-inverse bound over all priors, half for the mean over independent random
    weights: with m of them, it is at most :math:`\mathrm{kl}^{-1}(\text{mean}, \log(1 / \alpha') / m)` (Langford and
    Caruana, "(Not) bounding the true error", 2001).  Only the weights and the points are random; the choice of the
    posterior may depend on anything, so the traces need no proof.

    Args:
        risk: the loss at independent points, such as training points; it must not have an attack, because the worst
            perturbations change with the weights.
        trace: trace of the whole Hessian, which is used only to choose the posterior.
        diagonal: diagonal of the Hessian, which is used only to choose the posterior.
        draws: number of random weights.
        clip: value at which the loss is clipped; 2 log K, twice the loss of guessing, if None.
        alpha: failure probability of the proof.
        seed: seed of the random weights.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Linear(2, 2, bias=False).eval()
    >>> risk = EmpiricalRisk(net, Standard(), torch.rand(500, 2), torch.arange(500) % 2)
    >>> (proof,) = pac_bayes_proof(risk, 1.0, draws=50)
    >>> risk.value() < proof.bound < 1.4
    True
    """
    check_provable(risk.model, risk.loss)
    check_count(1, draws=draws)
    guessing, clip = _scale(risk, clip, alpha)
    n, loss = len(risk), float(_values(risk, clip).clamp_max(clip).mean())
    options: dict[str, Any] = {"n": n, "clip": clip, "alpha": alpha / 2 / len(SIGMAS)}
    posteriors = _posteriors(risk, trace, diagonal, _squared_norm(risk))
    proofs = []
    for name, optimal in posteriors.items():
        candidates = [optimal(sigma0=sigma0, beta=t * n) for sigma0 in SIGMAS for t in TEMPERATURES]
        q = min(candidates, key=lambda q: kl_bound(loss + q.increase, q.kl, **options))
        deviations, means = _deviations(risk, q), []
        for number in range(draws):
            draw = generator(seed, "proof", name, number, device=risk.device)
            noise = [torch.empty_like(d).normal_(generator=draw) * d for d in deviations]
            means.append(float(risk.values_at((1, noise)).clamp(0, clip).mean()))
        if not all(map(math.isfinite, means)):
            raise InputError(
                "model: a PAC-Bayes proof requires finite losses with noise on the weights, got NaN or infinity"
            )
        share = alpha / 2 / len(posteriors)
        empirical = clip * kl_inverse(sum(means) / draws / clip, math.log(1 / share) / draws)
        bound = kl_bound(empirical, q.kl, **options)
        message = verdict(bound, clip=clip, guessing=guessing)
        message += f" (proven for random weights, with probability {1 - alpha:g})"
        proofs.append(PACBayesProof(name, q.sigma0, n, draws, clip, alpha, q.kl, empirical, bound, message))
    return proofs


def check_provable(model: nn.Module, loss: Loss) -> None:
    """Raise an InputError if a PAC-Bayes proof does not apply: losses with an attack, learned buffers, frozen weights.

    >>> from atoll.losses import AT
    >>> check_provable(nn.Linear(2, 2), AT())
    Traceback (most recent call last):
    atoll.errors.InputError: loss: a PAC-Bayes proof requires a loss without an attack, got AT
    """
    if loss.objective is not None:
        raise InputError(f"loss: a PAC-Bayes proof requires a loss without an attack, got {type(loss).__name__}")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise InputError(
                f"model: a PAC-Bayes proof does not cover {name}, which is frozen but may depend on the data"
            )
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not isinstance(module, Normalize):
                where = f"{prefix}.{name}" if prefix else name
                raise InputError(
                    f"model: a PAC-Bayes proof does not cover the buffer {where}, which may depend on the data"
                )


def _scale(risk: EmpiricalRisk, clip: float | None, alpha: float) -> tuple[float, float]:
    """Return the loss of guessing, and the value at which losses are clipped."""
    if not 0 < alpha < 1 or (clip is not None and not 0 < clip < math.inf):
        raise InputError(f"alpha, clip: expected a probability and a finite number > 0, got {alpha}, {clip}")
    if (classes := _classes(risk)) < 2:
        raise InputError(f"model: PAC-Bayes bounds require at least 2 classes, got {classes}")
    guessing = math.log(classes)
    return guessing, 2 * guessing if clip is None else clip


def _values(risk: EmpiricalRisk, clip: float) -> Tensor:
    """Return the losses, clamped to 0 because rounding may make them slightly negative; the bounds require >= 0."""
    values = risk.values()
    if float(values.min()) < -1e-3 * clip:
        raise InputError(f"loss: PAC-Bayes bounds require a loss >= 0, got {float(values.min()):.3g}")
    return values.clamp_min(0)


def _check_shapes(risk: EmpiricalRisk, **vectors: Sequence[Tensor] | None) -> None:
    shapes = [tuple(p.shape) for p in risk.parameters]
    for name, vector in vectors.items():
        if vector is not None and [tuple(part.shape) for part in vector] != shapes:
            raise InputError(f"{name}: expected one tensor per parameter, of the same shape")


def _squared_norm(risk: EmpiricalRisk) -> float:
    return float(flatten([p.detach() for p in risk.parameters]).double().square().sum())


def _posteriors(
    risk: EmpiricalRisk, trace: float, diagonal: Vector | None, squared_norm: float
) -> dict[str, Callable[..., Posterior]]:
    """Return optimal posteriors by name, as functions of prior and temperature."""
    _check_shapes(risk, diagonal=diagonal)
    posteriors: dict[str, Callable[..., Posterior]] = {}
    posteriors["spherical"] = partial(optimal_posterior, [trace], [risk.size], squared_norm)
    if diagonal is not None:
        traces = flatten(diagonal).cpu()
        posteriors["diagonal"] = partial(optimal_posterior, traces, torch.ones_like(traces), squared_norm)
    return posteriors


def _deviations(risk: EmpiricalRisk, posterior: Posterior) -> Vector:
    """Return the standard deviation of every weight."""
    return risk.split(posterior.variances.sqrt().expand(risk.size).to(risk.parameters[0]))


def verdict(bound: float, *, clip: float, guessing: float) -> str:
    """Explain a bound on a loss in [0, clip].

    >>> verdict(5.0, clip=4.6, guessing=2.3)
    'vacuous: the bound is 5, but the clipped loss never exceeds 4.6'
    >>> verdict(0.5, clip=4.6, guessing=2.3)
    'not vacuous: the expected loss is at most 0.5, and guessing has a loss of 2.3'
    """
    if bound >= clip:
        return f"vacuous: the bound is {bound:.3g}, but the clipped loss never exceeds {clip:.3g}"
    if bound >= guessing:
        return f"almost vacuous: the bound of {bound:.3g} is above {guessing:.3g}, the loss of guessing"
    return f"not vacuous: the expected loss is at most {bound:.3g}, and guessing has a loss of {guessing:.3g}"


def _classes(risk: EmpiricalRisk) -> int:
    with preserve_buffers(risk.model), torch.no_grad():
        out, _ = risk.outputs(torch.tensor([0]))
    return (out.g if out.logits is not None else out.g_adv).shape[1]
