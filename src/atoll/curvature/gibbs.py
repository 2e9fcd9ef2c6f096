"""The loss of a net with Gaussian noise on its weights, and the PAC-Bayes bounds on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.curvature.pac_bayes import (
    Posterior,
    catoni,
    catoni_constant,
    linear_form,
    optimal_posterior,
    square_root,
)
from atoll.curvature.risk import EmpiricalRisk, Vector, flatten
from atoll.errors import InputError
from atoll.modules import preserve_parameters
from atoll.rng import generator
from atoll.stats import Estimate

# Priors and temperatures to choose from; the bounds hold for all of them at once.
SIGMAS = tuple(2.0**-k for k in range(13))
TEMPERATURES = tuple(2.0**k for k in range(-6, 7))  # of lambda, in units of the number of points


@dataclass(frozen=True)
class Bounds:
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
        words: what that means.
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
    words: str

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"noisy": self.noisy.to_json(), "clipped": self.clipped.to_json()}


def gibbs_risk(
    problem: EmpiricalRisk, deviations: Sequence[Tensor], *, pairs: int = 10, clip: float = math.inf, seed: object = 0
) -> tuple[Estimate, Estimate]:
    """Mean loss, and mean clipped loss, of the net with noise of these standard deviations on its weights.

    Draws come in pairs with opposite signs, so that the slope of the loss adds no error.  The adversarial inputs stay
    those of the net without noise.  The kinks of a ReLU net count here, but not in its Hessian: with noise that reaches
    them the second-order expansion is too small.

    >>> from atoll.losses import Standard
    >>> problem = EmpiricalRisk(torch.nn.Linear(2, 2).eval(), Standard(), torch.rand(4, 2), torch.arange(4) % 2)
    >>> still, _ = gibbs_risk(problem, [torch.zeros_like(p) for p in problem.parameters], pairs=2)
    >>> abs(still.value - problem.value()) < 1e-9, still.standard_error
    (True, 0.0)
    """
    if pairs < 2:
        raise InputError(f"pairs: expected at least 2, got {pairs}")
    means = torch.zeros(pairs, 2, dtype=torch.float64)
    with preserve_parameters(problem.parameters):
        start = [p.detach().clone() for p in problem.parameters]
        for number in range(pairs):
            draw = generator(seed, "posterior", number, device=problem.device)
            noise = [torch.empty_like(w).normal_(generator=draw) * d for w, d in zip(start, deviations, strict=True)]
            for sign in (1, -1):
                with torch.no_grad():
                    for p, w, e in zip(problem.parameters, start, noise, strict=True):
                        p.copy_(w + sign * e)
                values = problem.values()
                means[number] += torch.stack([values.mean(), values.clamp_max(clip).mean()]) / 2
    errors = means.std(0) / math.sqrt(pairs)
    return Estimate(float(means[:, 0].mean()), float(errors[0])), Estimate(float(means[:, 1].mean()), float(errors[1]))


def pac_bayes(
    problem: EmpiricalRisk,
    trace: float,
    diagonal: Vector | None = None,
    *,
    clip: float | None = None,
    alpha: float = 0.05,
    pairs: int = 10,
    seed: object = 0,
) -> list[Bounds]:
    """Bounds for the optimal spherical posterior and, given the Hessian's diagonal, for the optimal diagonal one.

    Prior and temperature are chosen among ``SIGMAS`` and ``TEMPERATURES`` for the smallest bound to second order; a
    union bound pays for the choice.  What the numbers do not prove is in their ``words``.

    Args:
        problem: the loss at training points.
        trace: of the whole Hessian.
        diagonal: of the Hessian.
        clip: where the loss is cut off; twice that of guessing, 2 log K, if None.
        alpha: probability with which a bound may fail.
        pairs: Monte Carlo draws, in pairs.
        seed: of the draws.
    """
    if not 0 < alpha < 1 or (clip is not None and not 0 < clip < math.inf):
        raise InputError(f"alpha, clip: expected a probability and a finite number > 0, got {alpha}, {clip}")
    guessing, n = math.log(_classes(problem)), len(problem)
    clip = 2 * guessing if clip is None else clip
    each = alpha / (len(SIGMAS) * len(TEMPERATURES))
    values = problem.values()
    risk, clipped_risk = float(values.mean()), float(values.clamp_max(clip).mean())
    weights = flatten([p.detach() for p in problem.parameters]).double()
    squared_norm = float(weights.square().sum())

    def spherical(sigma0: float, lambda_: float) -> Posterior:
        return optimal_posterior([trace], [problem.size], squared_norm, sigma0=sigma0, beta=lambda_)

    def approximate(choice: tuple[float, float]) -> float:
        q = spherical(*choice)
        return catoni(clipped_risk + q.increase, q.kl, lambda_=choice[1], n=n, clip=clip, alpha=each)

    sigma0, lambda_ = min(((s, t * n) for s in SIGMAS for t in TEMPERATURES), key=approximate)
    posteriors = {"spherical": spherical(sigma0, lambda_)}
    if diagonal is not None:
        flat = flatten(diagonal).cpu()
        posteriors["diagonal"] = optimal_posterior(
            flat, torch.ones_like(flat), squared_norm, sigma0=sigma0, beta=lambda_
        )
    found = []
    for name, q in posteriors.items():
        deviations = problem.split(q.variances.sqrt().expand(problem.size).to(problem.parameters[0]))
        noisy, clipped = gibbs_risk(problem, deviations, pairs=pairs, clip=clip, seed=seed)
        constant = catoni_constant(lambda_=lambda_, n=n, clip=clip, alpha=each)
        bound = catoni(clipped.value, q.kl, lambda_=lambda_, n=n, clip=clip, alpha=each)
        root = square_root(clipped.value, q.kl, n=n, clip=clip, alpha=each)
        found.append(
            Bounds(
                posterior=name,
                sigma0=sigma0,
                lambda_=lambda_,
                n=n,
                clip=clip,
                alpha=alpha,
                risk=risk,
                expansion=risk + q.increase,
                noisy=noisy,
                clipped=clipped,
                kl=q.kl,
                linear=linear_form(risk, squared_norm, trace, sigma0=sigma0, beta=lambda_, constant=constant),
                catoni=bound,
                square_root=root,
                words=verdict(min(bound, root), clip=clip, guessing=guessing),
            )
        )
    return found


def verdict(bound: float, *, clip: float, guessing: float) -> str:
    """What a bound on a loss in [0, clip] says, and that it is no proof.

    >>> says, _, caveat = verdict(5.0, clip=4.6, guessing=2.3).partition(" (")
    >>> says
    'vacuous: 5 is more than 4.6, which the clipped loss cannot exceed anyway'
    >>> caveat
    'an estimate, no proof: perturbations are held fixed, the Monte Carlo mean is taken for exact)'
    >>> verdict(0.5, clip=4.6, guessing=2.3).partition(" (")[0]
    'not vacuous: the expected loss is at most 0.5, guessing costs 2.3'
    """
    if bound >= clip:
        says = f"vacuous: {bound:.3g} is more than {clip:.3g}, which the clipped loss cannot exceed anyway"
    elif bound >= guessing:
        says = f"next to vacuous: {bound:.3g} is more than {guessing:.3g}, the loss of guessing"
    else:
        says = f"not vacuous: the expected loss is at most {bound:.3g}, guessing costs {guessing:.3g}"
    # A reader must not take for a guarantee what holds for these perturbations only.
    return f"{says} (an estimate, no proof: perturbations are held fixed, the Monte Carlo mean is taken for exact)"


def _classes(problem: EmpiricalRisk) -> int:
    with torch.no_grad():
        out, _ = problem.outputs(torch.tensor([0]))
    return (out.g if out.logits is not None else out.g_adv).shape[1]
