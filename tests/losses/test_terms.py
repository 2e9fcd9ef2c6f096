"""Every loss and term against dense autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import InputError
from atoll.losses import (
    ALP,
    AT,
    KL,
    MART,
    TRADES,
    CrossEntropy,
    Loss,
    Margin,
    Outputs,
    Pairing,
    Standard,
    Term,
    WeightedKL,
    autograd_curvature,
)
from support import naive_loss

# A new loss or term joins every test below by one line.
LOSSES = {
    "standard": Standard(),
    "at": AT(),
    "trades": TRADES(),
    "trades-stopped": TRADES(lambda_t=3.0, stop_clean_gradient=True),
    "alp": ALP(lambda_a=0.7),
    "alp-stopped": ALP(stop_clean_gradient=True),
    "mart": MART(lambda_m=5.0),
    "mart-stopped": MART(stop_clean_gradient=True),
}
TERMS = {
    "ce-clean": CrossEntropy("clean"),
    "ce-adversarial": CrossEntropy("adversarial"),
    "kl": KL(),
    "kl-stopped": KL(stop_clean_gradient=True),
    "pairing": Pairing(),
    "pairing-stopped": Pairing(stop_clean_gradient=True),
    "margin": Margin(),
    "wkl": WeightedKL(),
    "wkl-stopped": WeightedKL(stop_clean_gradient=True),
}

shapes = st.tuples(st.integers(1, 4), st.integers(2, 7), st.floats(0.1, 6.0), st.integers(0, 10**6))


def logits(batch: int, classes: int, scale: float, seed: int):
    draw = torch.Generator().manual_seed(seed)
    g, g_adv = (scale * torch.randn(2, batch, classes, generator=draw, dtype=torch.float64)).unbind()
    return g, g_adv, torch.randint(classes, (batch,), generator=draw)


def dense(term: Term | Loss, g, g_adv, y):
    """All second derivatives of one example's loss by torch.func, then the three diagonals."""

    def value(both):
        out = Outputs(logits=both[None, 0], adv_logits=both[None, 1])
        result = term.value(out, y[None]) if isinstance(term, Term) else sum(term.values(out, y[None]).values())
        return result.squeeze()

    hessian = torch.autograd.functional.hessian(value, torch.stack([g, g_adv]))
    return torch.stack([hessian[0, :, 0].diagonal(), hessian[0, :, 1].diagonal(), hessian[1, :, 1].diagonal()])


def stack(curvature, like):
    parts = (curvature.clean, curvature.cross, curvature.adversarial)
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts], dim=1)


@pytest.mark.parametrize("name", [*LOSSES, *TERMS])
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_curvature_is_the_diagonal_of_the_dense_hessian(name, shape):
    term = LOSSES.get(name) or TERMS[name]
    g, g_adv, y = logits(*shape)
    truth = torch.stack([dense(term, *example) for example in zip(g, g_adv, y, strict=True)])
    closed = stack(term.curvature(Outputs(logits=g, adv_logits=g_adv), y), g)
    torch.testing.assert_close(closed, truth, rtol=1e-10, atol=1e-10)
    if isinstance(term, Term):
        automatic = stack(autograd_curvature(term, Outputs(logits=g, adv_logits=g_adv), y), g)
        torch.testing.assert_close(automatic, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TERMS)
def test_closed_and_automatic_curvature_have_the_same_gradient(name):
    """TrH trains through the curvature, so its own derivative has to be right as well."""
    term = TERMS[name]
    gradients = []
    for curvature in (term.curvature, lambda out, y, term=term: autograd_curvature(term, out, y)):
        g, g_adv, y = logits(3, 5, 1.5, 0)
        g.requires_grad_(), g_adv.requires_grad_()
        total = stack(curvature(Outputs(logits=g, adv_logits=g_adv), y), g).square().sum()
        grads = torch.autograd.grad(total, (g, g_adv), allow_unused=True)
        gradients.append(torch.stack([torch.zeros_like(g) if d is None else d for d in grads]))
    if "stopped" in name:  # "stopped" holds p constant in the closed form's derivative only where the term does
        gradients = [d[1] for d in gradients]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_value_is_the_formula_of_the_paper(name, shape):
    g, g_adv, y = logits(*shape)
    value = sum(LOSSES[name].values(Outputs(logits=g, adv_logits=g_adv), y).values())
    torch.testing.assert_close(value, naive_loss(LOSSES[name], g, g_adv, y), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits_stay_finite(name):
    """Confident logits in float32: nothing is clamped, and nothing overflows."""
    g = torch.tensor([[90.0, -90.0, 0.0], [-90.0, 90.0, 0.0]], requires_grad=True)
    g_adv = torch.tensor([[-90.0, 90.0, 0.0], [-90.0, 90.0, 0.0]], requires_grad=True)
    value = sum(LOSSES[name].values(Outputs(logits=g, adv_logits=g_adv), torch.tensor([0, 1])).values())
    value.sum().backward()
    assert value.isfinite().all()
    assert all(t.grad is None or t.grad.isfinite().all() for t in (g, g_adv))


def test_stopping_the_clean_gradient_only_removes_gradient():
    g, g_adv, y = logits(4, 3, 1.0, 1)
    for on, off in (("trades", "trades-stopped"), ("mart", "mart-stopped"), ("alp", "alp-stopped")):
        g.requires_grad_()
        names = [n for n in LOSSES[off].terms if n in ("kl", "pairing", "wkl")]
        stopped = LOSSES[off].values(Outputs(logits=g, adv_logits=g_adv), y)[names[0]]
        full = LOSSES[on].values(Outputs(logits=g, adv_logits=g_adv), y)[names[0]]
        assert not stopped.requires_grad
        assert full.requires_grad


def test_cross_entropy_takes_mixed_labels_and_mart_refuses_them():
    g, g_adv, y = logits(4, 3, 1.0, 1)
    mixed = F.one_hot(y, 3).double() * 0.7 + 0.1
    value = AT().values(Outputs(logits=g, adv_logits=g_adv), mixed)["ce"]
    torch.testing.assert_close(value, -(mixed * g_adv.log_softmax(1)).sum(1))
    with pytest.raises(InputError, match="mixup"):
        MART().values(Outputs(logits=g, adv_logits=g_adv), mixed)


def test_weights_are_checked():
    for build in (
        lambda: TRADES(lambda_t=-1),
        lambda: ALP(lambda_a=math.nan),
        lambda: MART(lambda_m=math.inf),
    ):
        with pytest.raises(InputError, match="expected at least 0"):
            build()
