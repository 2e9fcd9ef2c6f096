"""The Weight-Curvature Index ("Understanding Adversarially Robust Generalization via Weight-Curvature Index")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.trace import Estimator, OnProgress, Traces, traces
from atoll.errors import InputError
from atoll.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Layer:
    """One weight matrix: Frobenius norm, trace of its Hessian block, its summand of the index and share in it."""

    name: str
    norm: float
    trace: Estimate
    term: float
    share: float


@dataclass(frozen=True)
class WCI:
    r"""Sum over the weight matrices of the geometric mean of squared norm and curvature.

    .. math:: \mathrm{WCI} = \sum_k \sqrt{\|W_k\|_F^2\, \max(\mathrm{Tr}\, H_k, 0)}
              \le \sqrt{\sum_k \|W_k\|_F^2} \sqrt{\sum_k \max(\mathrm{Tr}\, H_k, 0)}

    The factors of the bound (the paper's Eq. 6) are ``weight_norm`` and ``root_trace``.  The paper leaves open what to
    do with negative traces; they count as zero, and ``negative`` is their number.
    """

    index: Estimate
    layers: tuple[Layer, ...]
    weight_norm: float
    root_trace: float
    negative: int
    traces: Traces

    @property
    def bound(self) -> float:
        """The Cauchy-Schwarz bound on the index."""
        return self.weight_norm * self.root_trace

    def plot(self) -> Figure:
        """What each weight matrix adds to the index."""
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
    """The index of a model at fixed points, to a relative standard error; options as for ``traces``.

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
    r"""The index from norms of weight matrices and traces.

    Its variance is that of its linearization, :math:`d^T C d` with :math:`d_k = \|W_k\| / (2 \sqrt{T_k})`.  If a
    trace is smaller than its own standard error, the error replaces it, because the square root is too steep there.

    >>> both = Traces(("a", "b"), torch.tensor([4.0, -1.0]), torch.zeros(2, 2), "exact")
    >>> result = wci_from({"a": 3.0, "b": 1.0}, both)
    >>> result.index.value, result.negative
    (6.0, 1)
    """
    norm = torch.tensor(list(norms.values()), dtype=torch.float64)
    rows = [estimates.names.index(name) for name in norms]
    values, covariance = estimates.values[rows].double(), estimates.covariance[rows][:, rows].double()
    terms = norm * values.clamp_min(0).sqrt()
    known = torch.maximum(values, covariance.diagonal().clamp_min(0).sqrt())
    slope = torch.where(known > 0, norm / (2 * known.clamp_min(torch.finfo(known.dtype).tiny).sqrt()), 0)
    index = Estimate(float(terms.sum()), float((slope @ covariance @ slope).clamp_min(0).sqrt()), skewed=True)
    layers = tuple(
        Layer(name, size, estimates[name], float(term), float(term) / index.value if index.value else 0.0)
        for (name, size), term in zip(norms.items(), terms, strict=True)
    )
    root_trace = float(values.clamp_min(0).sum().sqrt())
    return WCI(index, layers, float(norm.norm()), root_trace, int((values < 0).sum()), estimates)
