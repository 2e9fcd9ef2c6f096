"""Traces of the Hessian, layer by layer, with standard errors and a rule when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.curvature.dense import blocks, hessian
from atoll.curvature.ggn import exact_gauss_newton, net_nonlinearity, sketch
from atoll.curvature.hutchinson import hutchinson
from atoll.curvature.risk import EmpiricalRisk, shared
from atoll.data.base import in_order
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import InputError
from atoll.stats import Estimate

Estimator = Literal["auto", "hutchinson", "gauss_newton", "exact"]
OnProgress = Callable[[int, int], None]  # how much is done, and of how much as far as is known

_SAMPLERS = {"hutchinson": hutchinson, "gauss_newton": sketch}
_FREEDOM = 60  # degrees of freedom of a standard error: with fewer, intervals of such skewed numbers miss too often


@dataclass(frozen=True)
class Traces:
    """The trace of the Hessian with respect to each parameter, and how far it can be trusted.

    Args:
        names: of the parameters.
        values: their traces.
        covariance: of the estimates, ``(layers, layers)``; zero where they are exact.
        estimator: which one was used.
        reason: why.
        probes: random vectors per group of points.
    """

    names: tuple[str, ...]
    values: Tensor
    covariance: Tensor
    estimator: str
    reason: str = "as asked"
    probes: int = 0

    def __getitem__(self, name: str) -> Estimate:
        i = self.names.index(name)
        return Estimate(float(self.values[i]), float(self.covariance[i, i].clamp_min(0).sqrt()), skewed=True)

    @property
    def total(self) -> Estimate:
        """The trace of the whole Hessian."""
        return Estimate(float(self.values.sum()), float(self.covariance.sum().clamp_min(0).sqrt()), skewed=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "estimator": self.estimator,
            "reason": self.reason,
            "probes": self.probes,
            "total": self.total.to_json(),
            "layers": {name: self[name].to_json() for name in self.names},
        }


def traces(
    problem: EmpiricalRisk,
    estimator: Estimator = "auto",
    *,
    relative_error: float = 0.05,
    max_probes: int = 1000,
    goal: Callable[[Traces], Estimate] = lambda found: found.total,
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

    ``auto`` takes Gauss-Newton where it is the Hessian's own trace, and Hutchinson elsewhere.  Its pass is cheaper, and
    it has no noise from the blocks between layers, nor from the curvature of the net itself, whose trace is zero.

    Args:
        problem: the loss as a function of the weights.
        estimator: see above.
        relative_error: stop when the standard error of ``goal`` is at most this share of it ...
        max_probes: ... or after so many random vectors per group.
        goal: what is to be known well; by default the trace of the whole Hessian.
        group: points in a group, all in one pass; None chooses for the estimator.
        seed: of the random vectors.
        on_progress: called after every group.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(2, 3, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> problem = EmpiricalRisk(model, Standard(), torch.eye(2), torch.tensor([0, 1]))
    >>> round(traces(problem, "exact").total.value, 6)  # 3 * 1/3 * 2/3 * mean ||x||^2
    0.666667
    >>> found = traces(problem, relative_error=0.01)
    >>> found.estimator, abs(found.total.value - 2 / 3) < 3 * 0.01
    ('gauss_newton', True)
    """
    if estimator not in ("auto", "exact", *_SAMPLERS):
        raise InputError(f"estimator: expected auto, exact, {' or '.join(_SAMPLERS)}, got {estimator!r}")
    if not 0 < relative_error < math.inf or max_probes < 2:
        raise InputError(
            f"relative_error, max_probes: expected more than 0 and at least 2, got {relative_error}, {max_probes}"
        )
    if group is not None and group < 1:
        raise InputError(f"group: expected at least 1, got {group}")
    if estimator == "exact":
        return _exact(problem, on_progress)
    bend = net_nonlinearity(problem)
    reason = f"{bend} is not piecewise linear" if bend else "the net is piecewise linear in each parameter"
    if estimator == "auto":
        estimator = "hutchinson" if bend else "gauss_newton"
    elif estimator == "gauss_newton" and bend:
        reason += ", so these are not the Hessian's own traces"
    else:
        reason = "as asked"
    group = group or _group_size(estimator, len(problem), relative_error)
    groups = in_order(len(problem), group)
    samples = torch.zeros(len(groups), 0, len(problem.names), dtype=torch.float64, device=problem.device)
    probes = min(max_probes, max(2, 1 + math.ceil(_FREEDOM / len(groups))))
    while True:
        done = samples.shape[1]
        new = samples.new_zeros(len(groups), probes - done, len(problem.names))
        for number in range(rank(), len(groups), world_size()):
            new[number] = _SAMPLERS[estimator](problem, groups[number], range(done, probes), seed)
            if on_progress:
                on_progress(len(groups) * done + (number + 1) * (probes - done), len(groups) * probes)
        samples = torch.cat([samples, all_sum(new)], 1)
        if not samples.isfinite().all():
            raise InputError("the loss or its derivatives are not finite at these weights and points")
        found = _summary(problem, samples.cpu(), estimator, reason)
        error = goal(found).relative_error
        if error <= relative_error or probes == max_probes:
            return found
        wanted = probes * min((error / relative_error) ** 2, max_probes)
        probes = min(max_probes, max(probes + 1, math.ceil(wanted)))


def _group_size(estimator: str, points: int, relative_error: float) -> int:
    """How many points share a random vector: small groups have less variance, large ones faster passes.

    A double backward pass over eight points takes the memory of a training step over some thirty.  In the sketch, pairs
    of points within groups of m give the index a relative variance of about m / (10 N) per vector (measured on ReLU
    nets with and without batch norm), so that two vectors reach the error that was asked for.
    """
    return 8 if estimator == "hutchinson" else max(1, min(8, round(20 * points * relative_error**2)))


def _summary(problem: EmpiricalRisk, samples: Tensor, estimator: str, reason: str) -> Traces:
    """Mean over the vectors of each group, summed over groups; the variance is that within the groups."""
    probes = samples.shape[1]
    centred = samples - samples.mean(1, keepdim=True)
    covariance = torch.einsum("gpk,gpl->kl", centred, centred) / (probes * (probes - 1) * len(problem) ** 2)
    values = samples.mean(1).sum(0) / len(problem)
    return Traces(problem.names, values, covariance, estimator, reason, probes)


def _exact(problem: EmpiricalRisk, on_progress: OnProgress | None) -> Traces:
    bend = net_nonlinearity(problem)
    if bend is None:
        name, reason = "exact_gauss_newton", "the net is piecewise linear in each parameter"
        values = torch.zeros(len(problem.names), dtype=torch.float64, device=problem.device)
        points = shared(len(problem), 1)
        for done, index in enumerate(points, 1):
            values += exact_gauss_newton(problem, index)
            if on_progress:
                on_progress(done, len(points))
        values = all_sum(values).cpu() / len(problem)
    else:
        name, reason = "exact_hessian", f"{bend} is not piecewise linear"
        parts = blocks(problem, hessian(problem)).values()
        values = torch.stack([part.diagonal().double().sum() for part in parts]).cpu()
    return Traces(problem.names, values, torch.zeros(len(values), len(values), dtype=torch.float64), name, reason)
