"""Hutchinson's estimator of all layers' traces, for any net that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.curvature.risk import EmpiricalRisk, derivative
from atoll.rng import generator


def hutchinson(problem: EmpiricalRisk, index: Tensor, probes: Sequence[int], seed: object) -> Tensor:
    r"""For each probe one unbiased estimate of every layer's trace, summed over some points: ``(probes, layers)``.

    One Rademacher vector v over all layers and one product with the Hessian give every layer k

    .. math:: E\, v_k \cdot (H v)_k = \mathrm{Tr}\, H_{kk},

    because the signs of different weights are independent; the blocks between layers only add variance (Hutchinson,
    "A stochastic estimator of the trace of the influence matrix", 1990).  Forward and first backward pass are shared by
    all probes.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> problem = EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))
    >>> sorted(set(hutchinson(problem, torch.tensor([0]), range(20), 0).flatten().tolist()))  # trace 1/2, ± 1/2
    [0.0, 1.0]
    """
    slope = problem.slope(index)
    found = []
    for probe in probes:
        draw = generator(seed, "hutchinson", probe, int(index[0]), device=problem.device)
        v = [torch.empty_like(p).bernoulli_(0.5, generator=draw).mul_(2).sub_(1) for p in problem.parameters]
        product = derivative(slope, problem.parameters, v, retain_graph=True)
        found.append(torch.stack([(a * b).sum() for a, b in zip(v, product, strict=True)]))
    return torch.stack(found).double()
