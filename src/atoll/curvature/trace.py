"""Traces of the Hessian, layer by layer, with standard errors and a rule when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from atoll.curvature.check import Check, check_linearity
from atoll.curvature.ggn import exact_gauss_newton, ggn_trace_samples
from atoll.curvature.products import NOT_FINITE, HessianProducts, hessian
from atoll.curvature.risk import EmpiricalRisk, shared
from atoll.data.base import in_order
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import InputError, check_count, check_range
from atoll.rng import generator
from atoll.stats import Estimate

Estimator = Literal["auto", "hutchinson", "gauss_newton", "exact"]
OnProgress = Callable[[int, int], None]  # how much is done, and of how much as far as is known

_FEWEST = 20  # degrees of freedom of the groups that matter: a few equal samples would look exact
_FREEDOM = 60  # degrees of freedom of a standard error: with fewer, intervals of skewed numbers miss too often


@dataclass(frozen=True)
class Traces:
    """The trace of the Hessian with respect to each parameter, and how far it can be trusted.

    Args:
        names: of the parameters.
        samples: ``(groups, probes, parameters)``; a group's part of the traces as each of its random vectors gives it.
        estimator: which one was used.
        reason: why, and what the check of it says.
        exact: whether the numbers have no error; there is then one probe.
    """

    names: tuple[str, ...]
    samples: Tensor
    estimator: str
    reason: str = "as asked"
    exact: bool = False

    @property
    def values(self) -> Tensor:
        """The traces."""
        return self.samples.mean(1).sum(0)

    @property
    def errors(self) -> Tensor:
        """Their standard errors."""
        return self._variances(self.samples).sum(0).sqrt()

    @property
    def probes(self) -> int:
        """Random vectors for each group of points."""
        return 0 if self.exact else self.samples.shape[1]

    def __getitem__(self, name: str) -> Estimate:
        return self.estimate(torch.nn.functional.one_hot(torch.tensor(self.names.index(name)), len(self.names)))

    @property
    def total(self) -> Estimate:
        """The trace of the whole Hessian."""
        return self.estimate(torch.ones(len(self.names)))

    def estimate(self, weights: Tensor) -> Estimate:
        """A weighted sum of the traces, with Welch's degrees of freedom: groups have errors of different size."""
        sums = self.samples @ weights.to(self.samples)
        value = float(sums.mean(1).sum())
        variances = self._variances(sums)
        if not variances.any():
            return Estimate(value)
        freedom = variances.sum() ** 2 / (variances.square() / (sums.shape[1] - 1)).sum()
        return Estimate(value, float(variances.sum().sqrt()), skewed=True, freedom=float(freedom))

    def _variances(self, samples: Tensor) -> Tensor:
        """Of each group's mean over its vectors."""
        return torch.zeros_like(samples[:, 0]) if self.exact else samples.var(1) / samples.shape[1]


def traces(
    risk: EmpiricalRisk,
    estimator: Estimator = "auto",
    *,
    relative_error: float = 0.05,
    max_probes: int = 1000,
    goal: Callable[[Traces], Estimate] = lambda result: result.total,
    group: int | None = None,
    seed: object = 0,
    on_progress: OnProgress | None = None,
) -> Traces:
    r"""The trace of the Hessian with respect to each parameter.

    Points are taken in groups.  Each group gets random vectors of its own, each of which gives an unbiased estimate of
    every layer's trace over the group; the mean over groups and vectors estimates the trace over all points, and the
    scatter within the groups gives its standard error (the points themselves are fixed).  One vector for all points
    would cost as much and, as a rule, tell less, because the groups' own vectors average out.

    ==================  ==============================  ==========================================================
    estimator           one vector costs, per point     for
    ==================  ==============================  ==========================================================
    ``gauss_newton``    1 forward, 1 backward           nets that are piecewise linear in each parameter (ReLU)
    ``hutchinson``      1 forward, 1 double backward    any net
    ``exact``           1 forward, K backward           piecewise linear nets with K logits
    ..                  1 forward, P double backward    any net with few parameters P
    ==================  ==============================  ==========================================================

    ``auto`` uses Gauss-Newton if it gives the trace of the Hessian, otherwise Hutchinson.  A Gauss-Newton pass is
    cheaper.  It has no noise from the blocks between layers, nor from the curvature of the net, whose trace is zero.

    Args:
        risk: the loss as a function of the weights.
        estimator: see above.
        relative_error: stop when the standard error of ``goal`` is at most this share of it ...
        max_probes: ... or after this many random vectors per group.
        goal: what is to be known well; by default the trace of the whole Hessian.
        group: points in a group, all in one pass; None chooses for the estimator.
        seed: of the random vectors.
        on_progress: called after every group.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(2, 3, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> risk = EmpiricalRisk(model, Standard(), torch.eye(2), torch.tensor([0, 1]))
    >>> round(traces(risk, "exact").total.value, 6)  # 3 * 1/3 * 2/3 * mean ||x||^2
    0.666667
    >>> result = traces(risk, relative_error=0.01)
    >>> result.estimator, abs(result.total.value - 2 / 3) < 3 * 0.01
    ('gauss_newton', True)
    """
    if estimator not in ("auto", "exact", "gauss_newton", "hutchinson"):
        raise InputError(f"estimator: expected auto, exact, gauss_newton or hutchinson, got {estimator!r}")
    check_range("(0, inf)", relative_error=relative_error)
    check_count(2, max_probes=max_probes)
    check_count(1, group=group)
    linear = Check(False, "as asked") if estimator == "hutchinson" else check_linearity(risk, seed=seed)
    if estimator == "exact":
        return _exact(risk, linear, on_progress, seed)
    sampler: Callable[[EmpiricalRisk, Tensor, Sequence[int], object], Tensor]
    if linear.passed or estimator == "gauss_newton":
        name, sampler, reason = "gauss_newton", ggn_trace_samples, linear.message
        if not linear.passed:
            reason += ", so these are not the Hessian's own traces"
    else:
        products = HessianProducts(risk, seed=seed)
        name, sampler, reason = "hutchinson", partial(_hutchinson, products), f"{linear.message}; {products.message}"
    group = group or _group_size(name, len(risk), relative_error)
    groups = in_order(len(risk), group)
    samples = torch.zeros(len(groups), 0, len(risk.names), dtype=torch.float64, device=risk.device)
    probes = min(max_probes, max(2, 1 + math.ceil(_FREEDOM / len(groups))))
    while True:
        done = samples.shape[1]
        new = samples.new_zeros(len(groups), probes - done, len(risk.names))
        for number in range(rank(), len(groups), world_size()):
            new[number] = sampler(risk, groups[number], range(done, probes), seed) / len(risk)
            if on_progress:
                on_progress(len(groups) * done + (number + 1) * (probes - done), len(groups) * probes)
        samples = torch.cat([samples, all_sum(new)], 1)
        if not samples.isfinite().all():
            raise InputError(NOT_FINITE)
        result = Traces(risk.names, samples.cpu(), name, reason)
        error, enough = goal(result).relative_error, 1 + math.ceil(_FEWEST / _effective_groups(samples))
        if (error <= relative_error and probes >= enough) or probes == max_probes:
            return result
        wanted = probes * min((error / relative_error) ** 2, max_probes)
        probes = min(max_probes, max(probes + 1, enough, math.ceil(wanted)))


def _effective_groups(samples: Tensor) -> float:
    """How many groups have a part in the traces: fewer than there are if most points are saturated."""
    sizes = samples.abs().mean(1).sum(1)
    return float(sizes.sum() ** 2 / sizes.square().sum()) if sizes.any() else float(len(sizes))


def _group_size(estimator: str, points: int, relative_error: float) -> int:
    """How many points share a random vector: small groups have less variance, large ones faster passes.

    A double backward pass over eight points takes the memory of a training step over some thirty.  With Gauss-Newton
    samples, pairs of points within groups of m give the index a relative variance of about m / (10 N) per vector
    (measured on ReLU nets with and without batch norm), so two vectors reach the requested error.
    """
    return 8 if estimator == "hutchinson" else max(1, min(8, round(20 * points * relative_error**2)))


def _exact(risk: EmpiricalRisk, linear: Check, on_progress: OnProgress | None, seed: object) -> Traces:
    """Traces without error: by the Gauss-Newton matrix of a piecewise linear net, else by the dense Hessian."""
    if linear.passed:
        values = torch.zeros(len(risk.names), dtype=torch.float64, device=risk.device)
        points = shared(len(risk), 1)
        for done, index in enumerate(points, 1):
            values += exact_gauss_newton(risk, index)
            if on_progress:
                on_progress(done, len(points))
        values = all_sum(values).cpu() / len(risk)
        name, reason = "exact_gauss_newton", linear.message
    else:
        products = HessianProducts(risk, seed=seed)
        diagonal = hessian(risk, products=products).diagonal().double()
        values = torch.stack([part.sum() for part in risk.split(diagonal)]).cpu()
        name, reason = "exact_hessian", f"{linear.message}; {products.message}"
    if not values.isfinite().all():
        raise InputError(NOT_FINITE)
    return Traces(risk.names, values[None, None], name, reason, exact=True)


def hutchinson(risk: EmpiricalRisk, index: Tensor, probes: Sequence[int], seed: object) -> Tensor:
    r"""For each probe one unbiased estimate of every layer's trace, summed over some points: ``(probes, layers)``.

    One Rademacher vector v over all layers and one product with the Hessian give every layer k

    .. math:: E\, v_k \cdot (H v)_k = \mathrm{Tr}\, H_{kk},

    because the signs of different weights are independent; the blocks between layers only add variance (Hutchinson,
    "A stochastic estimator of the trace of the influence matrix", 1990).  Forward and first backward pass are shared by
    all probes.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> risk = EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))
    >>> sorted(set(hutchinson(risk, torch.tensor([0]), range(20), 0).flatten().tolist()))  # trace 1/2, ± 1/2
    [0.0, 1.0]
    """
    return _hutchinson(HessianProducts(risk, seed=seed), risk, index, probes, seed)


def _hutchinson(
    products: HessianProducts, risk: EmpiricalRisk, index: Tensor, probes: Sequence[int], seed: object
) -> Tensor:
    draws = (generator(seed, "hutchinson", probe, int(index[0]), device=risk.device) for probe in probes)
    vectors = [
        [torch.empty_like(p).bernoulli_(0.5, generator=draw).mul_(2).sub_(1) for p in risk.parameters] for draw in draws
    ]
    pairs = zip(vectors, products.sums(index, vectors), strict=True)
    samples = [torch.stack([(a * b).sum() for a, b in zip(v, product, strict=True)]) for v, product in pairs]
    return torch.stack(samples).double()
