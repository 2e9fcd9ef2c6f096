"""Traces, eigenvalues and products of random nets against differences of gradients; none is wrong without a refusal."""

import numpy as np
import pytest
import torch

from atoll.curvature import HessianProducts, top_eigenvalues, traces
from atoll.curvature.check import check_gauss_newton
from atoll.curvature.risk import flatten
from curvature.random_nets import BLOCKS, random_risk, true_hessian

QUICK = len(BLOCKS)
SEEDS = [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, QUICK + 400))]


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_those_of_the_true_hessian(seed):
    risk, names = random_risk(seed)
    truth = true_hessian(risk)
    scale = float(truth.abs().max()) + 1e-9
    assert float((truth - truth.T).abs().max()) < 1e-4 * scale, names  # no kink is so close
    layers = torch.stack([part.sum() for part in truth.diagonal().split([p.numel() for p in risk.parameters])])
    # The graph is read only for some nets, because that takes longest; the check by differences sees all.
    if seed % 5:
        risk.nonlinear = {}
    exact = traces(risk, "exact")
    assert exact.values.tolist() == pytest.approx(layers.tolist(), rel=1e-4, abs=1e-4 * scale), (names, exact.reason)
    if exact.estimator == "exact_gauss_newton":
        assert check_gauss_newton(risk).passed
    v = torch.randn(risk.size, dtype=torch.float64)
    product = flatten(HessianProducts(risk)(risk.split(v)))
    assert float((product - truth @ v).norm()) < 1e-4 * (scale + float((truth @ v).norm())), names
    largest = np.linalg.eigvalsh(truth.numpy())[-1]
    assert float(top_eigenvalues(risk, 1, tolerance=1e-6)[0]) == pytest.approx(largest, rel=1e-3, abs=1e-4 * scale)
