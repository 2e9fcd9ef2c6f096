"""The Weight-Curvature Index ("Understanding Adversarially Robust Generalization via Weight-Curvature Index")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.trace import Estimator, OnProgress, Traces, traces
from atoll.errors import InputError
from atoll.stats import Estimate

RESOLVED = 3.0  # a trace of more than this number of standard errors counts as clearly positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Layer:
    """One weight matrix: Frobenius norm, trace of its Hessian block, its term of the index, and the share of it."""

    name: str
    norm: float
    trace: Estimate
    term: float
    share: float


@dataclass(frozen=True)
class WCI:
    r"""Weight-Curvature Index: the sum over weight matrices of the geometric mean of squared norm and curvature.

    .. math:: \mathrm{WCI} = \sum_k \sqrt{\|W_k\|_F^2\, \max(\mathrm{Tr}\, H_k, 0)}
              \le \sqrt{\sum_k \|W_k\|_F^2} \sqrt{\sum_k \max(\mathrm{Tr}\, H_k, 0)}

    The factors of the bound (Eq. 6 of the paper) are ``weight_norm`` and ``root_trace``.  The paper does not say how to
    treat negative traces; they count as zero, and ``negative`` is their number.  ``unresolved`` lists matrices whose
    trace is not clearly positive with these random vectors, so that their share of the index is uncertain.
    """

    index: Estimate
    layers: tuple[Layer, ...]
    weight_norm: float
    root_trace: float
    negative: int
    unresolved: tuple[str, ...]
    traces: Traces

    @property
    def plug_in(self) -> float:
        """The index of the estimated traces, without bias correction."""
        return sum(layer.norm * math.sqrt(max(layer.trace.value, 0.0)) for layer in self.layers)

    @property
    def bound(self) -> float:
        """The Cauchy-Schwarz bound on the index."""
        return self.weight_norm * self.root_trace

    def plot(self) -> Figure:
        """Plot the contribution of each weight matrix to the index."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(7, 1 + 0.22 * len(self.layers)), layout="constrained")
        axis = figure.subplots()
        axis.barh([layer.name for layer in self.layers], [layer.term for layer in self.layers])
        axis.invert_yaxis()
        axis.set_xlabel(f"norm × root of the trace; WCI {self.index}")
        return figure


def wci(
    risk: EmpiricalRisk,
    estimator: Estimator = "auto",
    *,
    relative_error: float = 0.05,
    max_probes: int = 1000,
    group: int | None = None,
    seed: object = 0,
    on_progress: OnProgress | None = None,
) -> WCI:
    """Estimate the index of a model at fixed points, to a relative standard error; for the options, see ``traces``.

    >>> from atoll.models import MLP
    >>> from atoll.losses import Standard
    >>> risk = EmpiricalRisk(MLP((2,), 2).eval(), Standard(), torch.rand(64, 2), torch.arange(64) % 2)
    >>> result = wci(risk, relative_error=0.02)
    >>> [layer.name for layer in result.layers], result.index.relative_error <= 0.02, result.index.value <= result.bound
    (['body.1.weight', 'body.3.weight', 'head.weight'], True, True)
    """
    if not risk.matrices:
        raise InputError("model: expected at least one weight matrix")
    norms = {n: float(p.detach().norm()) for n, p in zip(risk.names, risk.parameters, strict=True) if p.dim() > 1}
    estimates = traces(
        risk,
        estimator,
        relative_error=relative_error,
        max_probes=max_probes,
        goal=lambda so_far: wci_from(norms, so_far).index,
        group=group,
        seed=seed,
        on_progress=on_progress,
    )
    return wci_from(norms, estimates)


def wci_from(norms: Mapping[str, float], estimates: Traces) -> WCI:
    r"""Compute the index from norms of weight matrices and traces.

    The root of a noisy trace is too small on average, to second order by :math:`\mathrm{Var}(T) / 8 T^{3/2}`, which is
    added.  The error comes from the linearization, with slopes :math:`\|W_k\| / 2 \sqrt{T_k}`.  Neither is valid for a
    trace of less than ``RESOLVED`` standard errors: its term is then the root itself, and its error, the largest that
    the interval of the trace allows, is added to the other errors.

    >>> both = Traces(("a", "b"), torch.tensor([[[4.0, -1.0]]]), "exact", exact=True)
    >>> result = wci_from({"a": 3.0, "b": 1.0}, both)
    >>> result.index.value, result.negative
    (6.0, 1)
    """
    norm = torch.tensor(list(norms.values()), dtype=torch.float64)
    rows = [estimates.names.index(name) for name in norms]
    values, errors = estimates.values[rows].double(), estimates.errors[rows].double()
    root = values.clamp_min(0).sqrt()
    resolved = values > RESOLVED * errors
    safe = torch.where(resolved, values, 1.0)
    terms = norm * torch.where(resolved, root + errors.square() / (8 * safe**1.5), root)
    slopes = torch.zeros(len(estimates.names), dtype=torch.float64)
    slopes[rows] = torch.where(resolved, norm / (2 * safe.sqrt()), 0.0)
    linear = estimates.estimate(slopes)
    # The interval of the trace, converted to an interval of its root.
    reach = norm * ((values.clamp_min(0) + 2 * errors).sqrt() - root) / 2
    error = linear.standard_error + float(reach[~resolved].sum())
    index = Estimate(float(terms.sum()), error, skewed=True, freedom=linear.freedom)
    layers = tuple(
        Layer(name, size, estimates[name], float(term), float(term) / index.value if index.value else 0.0)
        for (name, size), term in zip(norms.items(), terms, strict=True)
    )
    root_trace = float(values.clamp_min(0).sum().sqrt())
    unresolved = tuple(
        name for name, known in zip(norms, (resolved | (errors == 0)).tolist(), strict=True) if not known
    )
    return WCI(index, layers, float(norm.norm()), root_trace, int((values < 0).sum()), unresolved, estimates)


@dataclass(frozen=True)
class LayerwiseBound:
    r"""The terms of the bound of the WCI paper on the robust generalization gap (Lemma 2.2), to second order.

    The noise of each weight matrix has its own variance, which is also that of the prior.  The sum of ``divergence``
    and ``variability`` is smallest, :math:`\mathrm{WCI} / \sqrt\lambda`, at the variances of Theorem 2.5,

    .. math:: \sigma_k^2 = \frac{\|W_k\|}{\sqrt{\lambda\, \mathrm{Tr}\, H_k}}.

    These numbers are not a proof: the expansion omits higher orders, the prior depends on the data, and the remaining
    term of the lemma, the perturbation discrepancy, is a mean over the unknown distribution.

    Args:
        lambda_: temperature.
        deviations: standard deviation of the noise, for each weight matrix with a positive trace.
        divergence: KL / lambda, up to constants that do not depend on the weights.
        variability: increase of the mean loss due to the noise.
        constant: lambda C^2 / (8 n) + log(1 / alpha) / lambda.
    """

    lambda_: float
    deviations: dict[str, float]
    divergence: float
    variability: float
    constant: float


def layerwise_bound(index: WCI, *, n: int, clip: float, alpha: float = 0.05) -> LayerwiseBound:
    r"""Return the terms of Lemma 2.2 at the variances of Theorem 2.5 and the temperature that minimizes their sum.

    The sum is :math:`\mathrm{WCI} / \sqrt\lambda + \lambda C^2 / 8 n + \log(1 / \alpha) / \lambda`.

    Args:
        index: norms and traces of the weight matrices.
        n: number of points.
        clip: C, the largest value of the loss.
        alpha: failure probability of the bound.

    >>> index = wci_from({"a": 3.0}, Traces(("a",), torch.tensor([[[4.0]]]), "exact", exact=True))
    >>> bound = layerwise_bound(index, n=100, clip=2.0)
    >>> sum_of_both = bound.divergence + bound.variability
    >>> math.isclose(sum_of_both, 6 / math.sqrt(bound.lambda_)), math.isclose(bound.divergence, bound.variability)
    (True, True)
    """

    def total(lambda_: float) -> float:
        return index.plug_in / math.sqrt(lambda_) + lambda_ * clip**2 / (8 * n) + math.log(1 / alpha) / lambda_

    lambda_ = min((n * 2.0 ** (k / 8) for k in range(-80, 81)), key=total)
    layers = [layer for layer in index.layers if layer.trace.value > 0 and layer.norm]
    variances = [layer.norm / math.sqrt(lambda_ * layer.trace.value) for layer in layers]
    both = list(zip(layers, variances, strict=True))
    return LayerwiseBound(
        lambda_,
        {layer.name: math.sqrt(variance) for layer, variance in both},
        divergence=sum(layer.norm**2 / (2 * lambda_ * variance) for layer, variance in both),
        variability=sum(layer.trace.value * variance / 2 for layer, variance in both),
        constant=lambda_ * clip**2 / (8 * n) + math.log(1 / alpha) / lambda_,
    )
