"""The Gauss-Newton matrix against dense Hessians."""

import math

import pytest
import torch

from atoll.curvature.ggn import block_factor, diagonal, logit_hessian
from atoll.curvature.risk import flatten
from atoll.losses import Outputs
from curvature.cases import make_risk, truth
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
