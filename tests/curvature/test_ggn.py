"""The Gauss-Newton matrix against dense Hessians."""

import math

import pytest
import torch
from torch import nn

from atoll.curvature import EmpiricalRisk, traces
from atoll.curvature.ggn import block_factor, diagonal, logit_hessian
from atoll.curvature.risk import flatten
from atoll.losses import Outputs
from curvature.cases import block_traces, dense, make_risk, truth
from support import LOSSES, naive_loss


@pytest.mark.parametrize("loss", LOSSES)
def test_logit_hessian_is_dense_autograd(loss):
    draw = torch.Generator().manual_seed(0)
    g, g_adv = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    y = torch.tensor([0, 3, 1])
    out = {"standard": Outputs(logits=g), "at": Outputs(adv_logits=g_adv)}.get(
        loss, Outputs(logits=g, adv_logits=g_adv)
    )
    result = logit_hessian(LOSSES[loss](), out, y)
    for n in range(3):

        def value(both, n=n):
            pair = both if loss not in ("standard", "at") else both.repeat(2)
            return naive_loss(LOSSES[loss](), pair[None, :4], pair[None, 4:], y[n : n + 1]).sum()

        at = torch.cat([t[n] for t in (out.logits, out.adv_logits) if t is not None])
        torch.testing.assert_close(result[n], torch.autograd.functional.hessian(value, at), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loss", ["at", "mart"])
def test_diagonal_is_that_of_the_dense_hessian(loss):
    p = make_risk("conv-bn", loss)
    exact = truth("conv-bn", loss).diagonal()
    runs = torch.stack([flatten(diagonal(p, probes=4, group=4, seed=seed)) for seed in range(40)])
    assert ((runs.mean(0) - exact).abs() <= 5 * runs.std(0) / math.sqrt(40) + 1e-9).all()


@pytest.mark.parametrize("loss", ["at", "mart"])
def test_block_factor_gives_the_dense_block_of_every_layer(loss):
    p = make_risk("mlp", loss)
    sizes = [w.numel() for w in p.parameters]
    for layer, size in enumerate(sizes):
        rows, signs = block_factor(p, layer)
        start = sum(sizes[:layer])
        exact = truth("mlp", loss)[start : start + size, start : start + size]
        torch.testing.assert_close(rows.T @ (signs[:, None] * rows) / len(p), exact, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("loss", ["alp", "trades", "mart"])
def test_negative_curvature_in_logit_space_is_subtracted(loss):
    """With clean and adversarial logits far apart, these losses are not convex in the logits."""
    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3)).double().eval()
    for p in net.parameters():
        p.data = torch.eye(3, dtype=torch.float64) if p.dim() > 1 else torch.zeros_like(p)
    x, x_adv = 2 * torch.randn(2, 6, 3, generator=draw, dtype=torch.float64).abs()  # these are the logits
    y = torch.arange(6) % 3
    values = torch.linalg.eigvalsh(logit_hessian(LOSSES[loss](), Outputs(logits=x, adv_logits=x_adv), y))
    assert float(values.min()) < -0.1
    risk = EmpiricalRisk(net, LOSSES[loss](), x, y, x_adv, nonlinear={})
    matrix = dense(risk)
    exact = block_traces(risk, matrix)
    torch.testing.assert_close(traces(risk, "exact").values, exact, rtol=1e-9, atol=1e-9)
    rows, signs = block_factor(risk, 0)
    torch.testing.assert_close(rows.T @ (signs[:, None] * rows) / 6, matrix[:9, :9], rtol=1e-9, atol=1e-9)
    estimate = traces(risk, "gauss_newton", group=2, max_probes=60, relative_error=1e-6)
    assert ((estimate.values - exact).abs() <= 4.5 * estimate.errors).all()
    runs = torch.stack([flatten(diagonal(risk, seed=seed)) for seed in range(20)])
    assert ((runs.mean(0) - matrix.diagonal()).abs() <= 5 * runs.std(0) / math.sqrt(20) + 1e-9).all()
