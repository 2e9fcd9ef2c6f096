"""Bounds against hand-computed examples, torch.distributions, numerical minimisation and Monte Carlo."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import rel_entr
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from atoll.curvature import EmpiricalRisk, gibbs_risk, pac_bayes, traces
from atoll.curvature.pac_bayes import (
    SIGMAS,
    TEMPERATURES,
    Posterior,
    catoni,
    catoni_constant,
    kl_bound,
    kl_inverse,
    linear_form,
    optimal_posterior,
    pac_bayes_proof,
    square_root,
    verdict,
)
from atoll.errors import InputError
from atoll.losses import Standard
from curvature.cases import make_risk, truth, weights


def test_kl_is_that_of_the_gaussians():
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    q = Posterior(torch.tensor([0.04, 0.01], dtype=torch.float64), torch.zeros(2), torch.tensor([2, 1]), 0.38, 0.5)
    variances = torch.tensor([0.04, 0.04, 0.01], dtype=torch.float64)
    truth = kl_divergence(Normal(theta, variances.sqrt()), Normal(torch.zeros(3).double(), 0.5)).sum()
    assert q.kl == pytest.approx(float(truth))


@pytest.mark.parametrize("sizes", [[6], [2, 1, 3], [1] * 6])
def test_optimal_variances_minimise_and_the_minimum_is_the_logarithm(sizes):
    traces = [3.0 + k for k in range(len(sizes))]
    sigma0, beta, norm = 0.4, 50.0, 2.0
    q = optimal_posterior(traces, sizes, norm, sigma0=sigma0, beta=beta)
    size, trace = torch.tensor(sizes, dtype=torch.float64), torch.tensor(traces, dtype=torch.float64)

    def objective(log_variance):
        variances = torch.from_numpy(np.exp(log_variance))
        other = Posterior(variances, trace, size, norm, sigma0)
        return other.increase + other.kl / beta

    result = minimize(objective, np.full(len(sizes), -3.0), tol=1e-12)
    np.testing.assert_allclose(np.exp(result.x), q.variances.numpy(), rtol=1e-4)
    # TrH, App. A: (1/2 beta) sum_b d_b log(1 + sigma0^2 beta T_b / d_b) + ||theta||^2 / (2 beta sigma0^2)
    closed = float((size * (1 + sigma0**2 * beta * trace / size).log()).sum()) / (2 * beta)
    assert q.increase + q.kl / beta == pytest.approx(closed + norm / (2 * beta * sigma0**2))
    # For a narrow prior that is the linear form, with sigma0^2 / 2 Tr in the spherical case too (see docs/errata.md).
    narrow = optimal_posterior(traces, sizes, norm, sigma0=1e-3, beta=beta)
    linear = linear_form(0.7, norm, sum(traces), sigma0=1e-3, beta=beta)
    assert 0.7 + narrow.increase + narrow.kl / beta == pytest.approx(linear, rel=1e-7)
    assert 0.7 + narrow.increase == pytest.approx(0.7 + 0.5e-6 * sum(traces), rel=1e-8)


def test_negative_curvature_counts_as_none():
    q = optimal_posterior([-5.0, 1.0], [1, 1], 0.0, sigma0=0.5, beta=4.0)
    assert q.variances.tolist() == [0.25, 0.125]


def test_bounds_by_hand():
    # 0.2 + 100/1000 + 1000 * 4 / (8 * 500) + ln(20) / 1000
    assert catoni(0.2, 100.0, lambda_=1000.0, n=500, clip=2.0, alpha=0.05) == pytest.approx(1.3 + math.log(20) / 1000)
    assert catoni_constant(lambda_=1000.0, n=500, clip=2.0, alpha=0.05) == pytest.approx(1 + math.log(20) / 1000)
    # 4 * 2 * sqrt((9 + ln(2 * 500 / 0.05)) / 500), not sqrt(9 / 500 + ln(...))
    assert square_root(0.2, 9.0, n=500, clip=2.0, alpha=0.05) == pytest.approx(
        0.2 + 8 * math.sqrt((9 + math.log(20_000)) / 500)
    )
    assert linear_form(0.2, 6.0, 40.0, sigma0=0.1, beta=300.0, constant=0.05) == pytest.approx(0.2 + 1.0 + 0.2 + 0.05)
    # A temperature below one: 0.2 + 6 / (2 * 0.5 * 4) + 4 / 2 * 40
    assert linear_form(0.2, 6.0, 40.0, sigma0=2.0, beta=0.5) == pytest.approx(0.2 + 1.5 + 80)


def test_catoni_holds_as_often_as_it_says():
    """Threshold classifiers on coin flips: an exact Gibbs posterior, 400 samples of 20 points."""
    draw, n, lambda_, alpha = np.random.default_rng(0), 20, 10.0, 0.2
    mean = np.linspace(0.2, 0.8, 7)  # the expected loss of seven classifiers; the prior is uniform
    broken = 0
    for _ in range(400):
        empirical = (draw.random((n, 7)) < mean).mean(0)
        q = np.exp(-lambda_ * empirical)
        q /= q.sum()
        kl = float((q * np.log(q * 7)).sum())
        broken += float(q @ mean) > catoni(float(q @ empirical), kl, lambda_=lambda_, n=n, clip=1.0, alpha=alpha)
    assert broken / 400 <= alpha


@pytest.mark.parametrize(("model", "sigma"), [("conv-bn", 1e-6), ("vit", 1e-2)])
def test_monte_carlo_agrees_with_the_expansion(model, sigma):
    p, matrix = make_risk(model, "trades"), truth(model, "trades")
    before, size = weights(p).clone(), p.parameters[-2].numel()
    last = matrix.diagonal()[-size - p.parameters[-1].numel() : -p.parameters[-1].numel()].sum()
    only = [torch.zeros_like(w) for w in p.parameters]
    only[-2] += sigma
    for deviations, trace in (([torch.full_like(w, sigma) for w in p.parameters], matrix.trace()), (only, last)):
        noisy, clipped = gibbs_risk(p, deviations, pairs=60, clip=1.0)
        increase = sigma**2 / 2 * float(trace)
        assert abs(noisy.value - p.value() - increase) < 4 * noisy.standard_error + 20 * sigma**4 + 1e-15
        assert noisy.standard_error < abs(increase)
        assert clipped.value < noisy.value
    assert torch.equal(weights(p), before)


def test_losses_are_clipped_point_by_point():
    p = make_risk("mlp")
    losses = p.values().numpy()
    assert losses.min() < 1 < losses.max()
    noisy, clipped = gibbs_risk(p, [torch.zeros_like(w) for w in p.parameters], pairs=2, clip=1.0)
    assert noisy.value == pytest.approx(losses.mean())
    assert clipped.value == pytest.approx(np.minimum(losses, 1).mean())
    (bounds,) = pac_bayes(p, 1.0, clip=1.0, pairs=2)
    assert bounds.clip == 1.0
    assert bounds.clipped.value <= 1


def test_the_kinks_of_a_relu_net_are_not_in_its_hessian():
    """With noise that reaches them, the loss grows by more than half the variance times the trace."""
    p = make_risk("conv-bn", "trades")
    noisy, _ = gibbs_risk(p, [torch.full_like(w, 0.01) for w in p.parameters], pairs=40)
    increase = 0.01**2 / 2 * float(truth("conv-bn", "trades").trace())
    assert noisy.value - p.value() - 5 * noisy.standard_error > 2 * increase


def test_noise_is_gaussian_with_the_given_deviations():
    p = make_risk("mlp")
    seen = []
    values = p.values
    p.values = lambda: (seen.append(weights(p).clone()), values())[1]
    start = weights(p).clone()
    gibbs_risk(p, p.split(torch.linspace(0.1, 1, p.size).double()), pairs=300)
    noise = torch.stack(seen) - start
    torch.testing.assert_close(noise[0], -noise[1])
    torch.testing.assert_close(noise[::2].std(0), torch.linspace(0.1, 1, p.size).double(), rtol=0.2, atol=0)


def test_numbers_of_a_net():
    p = make_risk("mlp", "at")
    exact = traces(p, "exact").total.value
    both = pac_bayes(p, exact, p.split(truth("mlp", "at").diagonal().clone()), pairs=5)
    assert [b.posterior for b in both] == ["spherical", "diagonal"]
    sphere, diagonal = both
    n, norm = len(p), float(weights(p).square().sum())
    assert sphere.clip == pytest.approx(2 * math.log(3))
    assert sphere.sigma0 in SIGMAS
    assert sphere.lambda_ / n in TEMPERATURES
    one_prior = 0.05 / 3 / len(SIGMAS)
    each = one_prior / len(TEMPERATURES)
    variance = sphere.sigma0**2 / (1 + sphere.sigma0**2 * sphere.lambda_ * exact / p.size)
    q = MultivariateNormal(weights(p), variance * torch.eye(p.size, dtype=torch.float64))
    prior = MultivariateNormal(torch.zeros_like(weights(p)), sphere.sigma0**2 * torch.eye(p.size, dtype=torch.float64))
    assert sphere.kl == pytest.approx(float(kl_divergence(q, prior)))
    assert sphere.expansion == pytest.approx(p.value() + variance / 2 * exact)
    penalty = (sphere.kl + math.log(1 / each)) / sphere.lambda_ + sphere.lambda_ * sphere.clip**2 / (8 * n)
    assert sphere.catoni == pytest.approx(sphere.clipped.value + penalty)
    assert sphere.square_root == pytest.approx(
        sphere.clipped.value + 4 * sphere.clip * math.sqrt((sphere.kl + math.log(2 * n / one_prior)) / n)
    )
    assert sphere.kl_inverse == kl_bound(sphere.clipped.value, sphere.kl, n=n, clip=sphere.clip, alpha=one_prior)
    constant = catoni_constant(lambda_=sphere.lambda_, n=n, clip=sphere.clip, alpha=each)
    assert sphere.linear == pytest.approx(
        linear_form(p.value(), norm, exact, sigma0=sphere.sigma0, beta=sphere.lambda_, constant=constant)
    )
    # Eight points prove nothing, and it says so; the diagonal posterior is never worse to second order.
    assert "vacuous" in sphere.message
    assert "not vacuous" not in sphere.message
    assert all("not a proof" in bounds.message for bounds in both)

    def second_order(bounds):
        return (
            bounds.expansion
            + bounds.kl / bounds.lambda_
            + bounds.lambda_ * bounds.clip**2 / (8 * n)
            + (math.log(1 / each) / bounds.lambda_)
        )

    assert second_order(diagonal) <= second_order(sphere) + 1e-9


@settings(max_examples=200)
@given(st.floats(0, 1), st.floats(1e-9, 5))
def test_the_kl_inverse_is_the_largest_mean_within_the_limit(q, limit):
    p = kl_inverse(q, limit)
    assert q <= p <= 1

    def kl(p):
        return float(rel_entr(q, p) + rel_entr(1 - q, 1 - p))

    assert kl(max(q, p - 1e-7)) <= limit * (1 + 1e-9) + 1e-12  # and not much larger than it has to be
    assert kl(p) >= limit * (1 - 1e-9) - 1e-12 or p == 1  # never below: a bound must not be too small


def test_the_kl_bound_is_the_tightest_of_the_three():
    """The example of a small loss: Catoni at its best temperature against the kl-inverse."""
    options = {"n": 1000, "clip": 1.0}
    assert len(SIGMAS) * len(TEMPERATURES) == 169
    inverse = kl_bound(0.02, 20.0, alpha=0.05 / 13, **options)
    best = min(catoni(0.02, 20.0, lambda_=1000 * t, alpha=0.05 / 169, **options) for t in TEMPERATURES)
    assert inverse < best < square_root(0.02, 20.0, alpha=0.05 / 13, **options)
    # Pinsker: kl^-1(q, c) <= q + sqrt(c / 2)
    assert inverse <= 0.02 + math.sqrt((20 + math.log(2 * math.sqrt(1000) * 13 / 0.05)) / 2000)


def test_proofs_hold_as_often_as_they_say():
    """A logistic model on points whose labels are pure noise: its expected loss under the posterior is known."""
    generator, failures = torch.Generator().manual_seed(0), 0
    for seed in range(40):
        net = nn.Linear(2, 2, bias=False).double().eval()
        net.weight.data = torch.randn(2, 2, generator=generator, dtype=torch.float64)
        x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
        y = torch.randint(2, (40,), generator=generator)
        (proof,) = pac_bayes_proof(EmpiricalRisk(net, Standard(), x, y), 1.0, draws=20, alpha=0.2, seed=seed)
        assert proof.draws == 20
        # The truth: fresh points and the posterior itself, by Monte Carlo.
        sigma0 = proof.sigma0
        weights = net.weight.detach()
        variance = next(
            q.variances
            for t in TEMPERATURES
            if (q := optimal_posterior([1.0], [4], float(weights.square().sum()), sigma0=sigma0, beta=40 * t)).kl
            == pytest.approx(proof.kl)
        )
        noise = torch.randn(4000, 2, 2, generator=generator, dtype=torch.float64) * variance.sqrt()
        fresh = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
        logits = torch.einsum("nij,nj->ni", weights + noise, fresh)
        losses = nn.functional.cross_entropy(logits, torch.randint(2, (4000,), generator=generator), reduction="none")
        truth = losses.clamp(0, proof.clip)
        failures += float(truth.mean() - 4 * truth.std() / math.sqrt(4000)) > proof.bound
    assert failures <= 8  # 20 % of 40; in truth bounds fail much more rarely


def test_what_cannot_be_proven_is_refused():
    with pytest.raises(InputError, match="requires a loss without an attack, got AT"):
        pac_bayes_proof(make_risk("mlp"), 1.0)
    with pytest.raises(InputError, match=r"does not cover the buffer .*running_mean"):
        pac_bayes_proof(make_risk("conv-bn", "standard"), 1.0)
    frozen = make_risk("mlp", "standard")
    frozen.model.body[1].weight.requires_grad_(False)  # may have been trained on the same points
    with pytest.raises(InputError, match=r"does not cover body.1.weight, which is frozen"):
        pac_bayes_proof(frozen, 1.0)
    memory = nn.Sequential(nn.Linear(2, 2))
    memory.register_buffer("points", torch.rand(4, 2))
    with pytest.raises(InputError, match="does not cover the buffer points"):
        pac_bayes_proof(EmpiricalRisk(memory.eval(), Standard(), torch.rand(4, 2), torch.arange(4) % 2), 1.0)
    with pytest.raises(InputError, match="finite"):
        pac_bayes_proof(make_risk("mlp", "standard"), math.nan)
    with pytest.raises(InputError, match="mean, limit"):
        kl_inverse(0.5, math.nan)


def test_messages():
    assert verdict(5.0, clip=4.6, guessing=2.3).startswith("vacuous")
    assert verdict(3.0, clip=4.6, guessing=2.3).startswith("almost vacuous")
    assert verdict(0.4, clip=4.6, guessing=2.3).startswith("not vacuous")


def test_nonsense_is_refused():
    p = make_risk("mlp")
    with pytest.raises(InputError, match="sigma0, beta"):
        optimal_posterior([1.0], [1], 1.0, sigma0=0.0, beta=1.0)
    with pytest.raises(InputError, match="pairs"):
        gibbs_risk(p, p.parameters, pairs=1)
    for options in ({"alpha": 0.0}, {"alpha": 1.0}, {"clip": -1.0}, {"clip": 0.0}, {"clip": math.inf}):
        with pytest.raises(InputError, match="alpha, clip"):
            pac_bayes(p, 1.0, **options)
