"""Traces of the Hessian, layer by layer, with standard errors and a rule when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.curvature.ggn import exact_gauss_newton, ggn_trace_samples, net_nonlinearity
from atoll.curvature.risk import EmpiricalRisk, derivative, flatten, shared
from atoll.data.base import in_order
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import InputError, check_range
from atoll.rng import generator
from atoll.stats import Estimate

Estimator = Literal["auto", "hutchinson", "gauss_newton", "exact"]
OnProgress = Callable[[int, int], None]  # how much is done, and of how much as far as is known

LIMIT = 20_000  # parameters: in float32 the matrix takes 1.6 GB then
_ROWS = 32  # at a time
_FREEDOM = 60  # degrees of freedom of a standard error: with fewer, intervals of skewed numbers miss too often


@dataclass(frozen=True)
class Traces:
    """The trace of the Hessian with respect to each parameter, and how far it can be trusted.

    ``covariance`` is that of the estimates, ``(layers, layers)``, and zero if they are exact; ``reason`` says why this
    estimator was used, ``probes`` how many random vectors each group of points got.
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
    if estimator not in ("auto", "exact", *_SAMPLERS):
        raise InputError(f"estimator: expected auto, exact, {' or '.join(_SAMPLERS)}, got {estimator!r}")
    if not 0 < relative_error < math.inf or max_probes < 2:
        raise InputError(
            f"relative_error, max_probes: expected more than 0 and at least 2, got {relative_error}, {max_probes}"
        )
    check_range("[1, inf)", group=group)
    nonlinear = net_nonlinearity(risk)
    reason = f"{nonlinear} is not piecewise linear" if nonlinear else "the net is piecewise linear in each parameter"
    if estimator == "exact":
        values = _exact(risk, nonlinear is None, on_progress)
        name = "exact_hessian" if nonlinear else "exact_gauss_newton"
        return Traces(risk.names, values, values.new_zeros(len(values), len(values)), name, reason)
    if estimator == "auto":
        estimator = "hutchinson" if nonlinear else "gauss_newton"
    elif estimator == "gauss_newton" and nonlinear:
        reason += ", so these are not the Hessian's own traces"
    else:
        reason = "as asked"
    group = group or _group_size(estimator, len(risk), relative_error)
    groups = in_order(len(risk), group)
    samples = torch.zeros(len(groups), 0, len(risk.names), dtype=torch.float64, device=risk.device)
    probes = min(max_probes, max(2, 1 + math.ceil(_FREEDOM / len(groups))))
    while True:
        done = samples.shape[1]
        new = samples.new_zeros(len(groups), probes - done, len(risk.names))
        for number in range(rank(), len(groups), world_size()):
            new[number] = _SAMPLERS[estimator](risk, groups[number], range(done, probes), seed)
            if on_progress:
                on_progress(len(groups) * done + (number + 1) * (probes - done), len(groups) * probes)
        samples = torch.cat([samples, all_sum(new)], 1)
        if not samples.isfinite().all():
            raise InputError("the loss or its derivatives are not finite at these weights and points")
        result = _summary(risk, samples.cpu(), estimator, reason)
        error = goal(result).relative_error
        if error <= relative_error or probes == max_probes:
            return result
        wanted = probes * min((error / relative_error) ** 2, max_probes)
        probes = min(max_probes, max(probes + 1, math.ceil(wanted)))


def _group_size(estimator: str, points: int, relative_error: float) -> int:
    """How many points share a random vector: small groups have less variance, large ones faster passes.

    A double backward pass over eight points takes the memory of a training step over some thirty.  With Gauss-Newton
    samples, pairs of points within groups of m give the index a relative variance of about m / (10 N) per vector
    (measured on ReLU nets with and without batch norm), so two vectors reach the requested error.
    """
    return 8 if estimator == "hutchinson" else max(1, min(8, round(20 * points * relative_error**2)))


def _summary(risk: EmpiricalRisk, samples: Tensor, estimator: str, reason: str) -> Traces:
    """Mean over the vectors of each group, summed over groups; the variance is that within the groups."""
    probes = samples.shape[1]
    centered = samples - samples.mean(1, keepdim=True)
    covariance = torch.einsum("gpk,gpl->kl", centered, centered) / (probes * (probes - 1) * len(risk) ** 2)
    values = samples.mean(1).sum(0) / len(risk)
    return Traces(risk.names, values, covariance, estimator, reason, probes)


def _exact(risk: EmpiricalRisk, linear: bool, on_progress: OnProgress | None) -> Tensor:
    """Traces without error: by the Gauss-Newton matrix of a piecewise linear net, else by the dense Hessian."""
    if not linear:
        return torch.stack([part.sum() for part in risk.split(hessian(risk).diagonal().double())]).cpu()
    values = torch.zeros(len(risk.names), dtype=torch.float64, device=risk.device)
    points = shared(len(risk), 1)
    for done, index in enumerate(points, 1):
        values += exact_gauss_newton(risk, index)
        if on_progress:
            on_progress(done, len(points))
    return all_sum(values).cpu() / len(risk)


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
    gradient = risk.gradient_graph(index)
    samples = []
    for probe in probes:
        draw = generator(seed, "hutchinson", probe, int(index[0]), device=risk.device)
        v = [torch.empty_like(p).bernoulli_(0.5, generator=draw).mul_(2).sub_(1) for p in risk.parameters]
        product = derivative(gradient, risk.parameters, v, retain_graph=True)
        samples.append(torch.stack([(a * b).sum() for a, b in zip(v, product, strict=True)]))
    return torch.stack(samples).double()


def hessian(risk: EmpiricalRisk, rows: Tensor | None = None) -> Tensor:
    """All second derivatives of the mean loss, ``(parameters, parameters)``, or some rows: a product for each row.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])), torch.tensor([1])).tolist()
    [[-0.25, 0.25]]
    """
    if risk.size > LIMIT:
        raise InputError(f"model: a dense Hessian is for at most {LIMIT:,} parameters, this net has {risk.size:,}")
    rows = torch.arange(risk.size) if rows is None else rows
    total = torch.zeros(len(rows), risk.size, dtype=risk.parameters[0].dtype, device=risk.device)
    for index in shared(len(risk), risk.micro_batch):
        gradient = flatten(risk.gradient_graph(index))
        for part_rows, sums in zip(torch.split(rows.to(risk.device), _ROWS), torch.split(total, _ROWS), strict=True):
            vectors = torch.nn.functional.one_hot(part_rows, risk.size).to(gradient.dtype)
            parts = torch.autograd.grad(
                gradient, risk.parameters, vectors, retain_graph=True, is_grads_batched=True, materialize_grads=True
            )
            sums += torch.cat([part.reshape(len(part_rows), -1) for part in parts], 1)
    return all_sum(total) / len(risk)


_SAMPLERS = {"hutchinson": hutchinson, "gauss_newton": ggn_trace_samples}
