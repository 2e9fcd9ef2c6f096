"""Traces of the Hessian, layer by layer, with standard errors and a stopping rule."""

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
OnProgress = Callable[[int, int], None]  # units done, and the expected total

_FEWEST = 20  # degrees of freedom of the groups that matter; a few equal samples would look exact
_FREEDOM = 60  # degrees of freedom of a standard error; with fewer, intervals of skewed numbers miss too often


@dataclass(frozen=True)
class Traces:
    """The trace of the Hessian with respect to each parameter, with its uncertainty.

    Args:
        names: names of the parameters.
        samples: ``(groups, probes, parameters)``; the contribution of each group, estimated with each random vector.
        estimator: the estimator.
        reason: why this estimator was used, and the result of its check.
        exact: whether the numbers have no error; there is then one probe.
    """

    names: tuple[str, ...]
    samples: Tensor
    estimator: str
    reason: str = "as requested"
    exact: bool = False

    @property
    def values(self) -> Tensor:
        """The traces."""
        return self.samples.mean(1).sum(0)

    @property
    def errors(self) -> Tensor:
        """The standard errors of the traces."""
        return self._variances(self.samples).sum(0).sqrt()

    @property
    def probes(self) -> int:
        """Number of random vectors for each group of points."""
        return 0 if self.exact else self.samples.shape[1]

    def __getitem__(self, name: str) -> Estimate:
        return self.estimate(torch.nn.functional.one_hot(torch.tensor(self.names.index(name)), len(self.names)))

    @property
    def total(self) -> Estimate:
        """The trace of the whole Hessian."""
        return self.estimate(torch.ones(len(self.names)))

    def estimate(self, weights: Tensor) -> Estimate:
        """Estimate a weighted sum of the traces, with Welch's degrees of freedom because errors of groups differ."""
        sums = self.samples @ weights.to(self.samples)
        value = float(sums.mean(1).sum())
        variances = self._variances(sums)
        if not variances.any():
            return Estimate(value)
        freedom = variances.sum() ** 2 / (variances.square() / (sums.shape[1] - 1)).sum()
        return Estimate(value, float(variances.sum().sqrt()), skewed=True, freedom=float(freedom))

    def _variances(self, samples: Tensor) -> Tensor:
        """Return the variance of the mean over random vectors, for each group."""
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
    r"""Estimate the trace of the Hessian with respect to each parameter.

    Points are divided into groups.  Each group has its own random vectors, and each vector gives an unbiased estimate
    of the trace of every layer over the group.  The mean over groups and vectors estimates the trace over all points,
    and the variance within groups gives its standard error (the points themselves are fixed).  A vector that is shared
    by all points would cost as much and usually be less accurate, because independent vectors average out.

    ==================  ==============================  ==========================================================
    estimator           cost of a vector, per point     for
    ==================  ==============================  ==========================================================
    ``gauss_newton``    1 forward, 1 backward           networks that are piecewise linear in each parameter (ReLU)
    ``hutchinson``      1 forward, 1 double backward    any network
    ``exact``           1 forward, K backward           piecewise linear networks with K logits
    ..                  1 forward, P double backward    any network with few parameters P
    ==================  ==============================  ==========================================================

    ``auto`` uses Gauss-Newton if it gives the trace of the Hessian, otherwise Hutchinson.  A Gauss-Newton pass is
    cheaper and has no noise from blocks between layers, or from the curvature of the network, whose trace is zero.

    Args:
        risk: the loss as a function of the weights.
        estimator: see above.
        relative_error: stop when the standard error of ``goal`` is at most this share of it.
        max_probes: maximum number of random vectors per group.
        goal: the quantity to estimate to ``relative_error``; by default the trace of the whole Hessian.
        group: number of points in a group, which share a pass; None to choose it for the estimator.
        seed: seed of the random vectors.
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
    linear = Check(False, "as requested") if estimator == "hutchinson" else check_linearity(risk, seed=seed)
    if estimator == "exact":
        return _exact(risk, linear, on_progress, seed)
    sampler: Callable[[EmpiricalRisk, Tensor, Sequence[int], object], Tensor]
    if linear.passed or estimator == "gauss_newton":
        name, sampler, reason = "gauss_newton", ggn_trace_samples, linear.message
        if not linear.passed:
            reason += ", so these are not the traces of the Hessian"
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
        required = probes * min((error / relative_error) ** 2, max_probes)
        probes = min(max_probes, max(probes + 1, enough, math.ceil(required)))


def _effective_groups(samples: Tensor) -> float:
    """Return the effective number of groups, which is smaller than their number if most points are saturated."""
    sizes = samples.abs().mean(1).sum(1)
    return float(sizes.sum() ** 2 / sizes.square().sum()) if sizes.any() else float(len(sizes))


def _group_size(estimator: str, points: int, relative_error: float) -> int:
    """Return the number of points per random vector: small groups have less variance, large groups faster passes.

    A double backward pass over eight points takes as much memory as a training step over about thirty.  With
    Gauss-Newton, pairs of points in groups of m give the index a relative variance of about m / (10 N) per vector
    (measured on ReLU networks with and without batch norm), so two vectors reach the requested error.
    """
    return 8 if estimator == "hutchinson" else max(1, min(8, round(20 * points * relative_error**2)))


def _exact(risk: EmpiricalRisk, linear: Check, on_progress: OnProgress | None, seed: object) -> Traces:
    """Return exact traces, from the Gauss-Newton matrix of a piecewise linear network or from the dense Hessian."""
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
    r"""Return an unbiased estimate of each layer's trace per probe, summed over some points: ``(probes, layers)``.

    A Rademacher vector v over all layers and one product with the Hessian give, for every layer k,

    .. math:: E\, v_k \cdot (H v)_k = \mathrm{Tr}\, H_{kk},

    because the signs of different weights are independent; the blocks between layers only add variance (Hutchinson,
    "A stochastic estimator of the trace of the influence matrix", 1990).  All probes share the forward and the first
    backward pass.

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
