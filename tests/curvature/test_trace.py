"""Traces of every estimator against dense Hessians in float64, their intervals over repeated runs, the rule to stop."""

import math

import pytest
import torch
from torch import nn

from atoll.curvature import EmpiricalRisk, traces
from atoll.errors import InputError
from atoll.losses import Standard
from atoll.stats import Estimate
from atoll.training.methods.trh import full_trace
from curvature.cases import CASES, MODELS, RELU, Twice, block_traces, dense, make_risk, truth
from support import LOSSES

ESTIMATORS = [(model, "gauss_newton") for model in RELU] + [(model, "hutchinson") for model in MODELS]


def layers(model: str, loss: str) -> torch.Tensor:
    """The true traces."""
    return block_traces(make_risk(model, loss), truth(model, loss))


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_exact_traces_are_those_of_the_dense_hessian(model, loss):
    result = traces(make_risk(model, loss), "exact")
    torch.testing.assert_close(result.values, layers(model, loss), rtol=1e-8, atol=1e-9)
    assert result.total.standard_error == 0
    assert result.estimator == ("exact_gauss_newton" if model in RELU else "exact_hessian")


@pytest.mark.parametrize(
    ("model", "loss", "estimator"),
    [(m, loss, e) for m, loss in CASES for e in ("gauss_newton", "hutchinson") if m in RELU or e == "hutchinson"],
)
def test_estimates_are_within_their_stated_error(model, loss, estimator):
    p, exact = make_risk(model, loss), layers(model, loss)
    result = traces(p, estimator, group=2, max_probes=40, relative_error=1e-6)
    errors = result.errors
    assert result.probes == 40
    assert ((result.values - exact).abs() <= 4.5 * errors + 1e-9).all()  # of some 200 layers, none beyond
    assert abs(result.total.value - float(exact.sum())) <= 4.5 * result.total.standard_error
    assert [result[name].value for name in p.names] == pytest.approx(result.values.tolist())
    assert [result[name].standard_error for name in p.names] == pytest.approx(errors.tolist())


COVERED = [("at", "gauss_newton"), ("at", "hutchinson"), pytest.param("alp", "gauss_newton", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("loss", "estimator"), COVERED)
def test_intervals_cover_the_truth_in_95_percent_of_runs(loss, estimator):
    """Stopped by the rule, as in a measurement."""
    p, exact = make_risk("mlp", loss), layers("mlp", loss)
    runs = [traces(p, estimator, group=4, relative_error=0.3, seed=seed) for seed in range(60)]
    values = torch.stack([run.values for run in runs])
    intervals = torch.tensor([[run[name].interval for name in p.names] for run in runs], dtype=torch.float64)
    inside = ((intervals[..., 0] <= exact) & (exact <= intervals[..., 1])).double().mean(0)
    assert (inside >= 0.85).all(), inside  # the share of one layer has a standard error of 3 %
    assert float(inside.mean()) > 0.92
    # Unbiased, and the stated error is the actual one.
    assert ((values.mean(0) - exact).abs() <= 4.5 * values.std(0) / math.sqrt(len(runs)) + 1e-9).all()
    total = torch.tensor([run.total.value for run in runs])
    stated = torch.tensor([run.total.standard_error for run in runs])
    assert 0.75 < float(stated.square().mean().sqrt() / total.std()) < 1.33


@pytest.mark.parametrize(("model", "estimator"), ESTIMATORS)
def test_micro_batches_do_not_matter(model, estimator):
    result = [traces(make_risk(model, micro_batch=m), estimator, group=3, max_probes=4).values for m in (1, 100)]
    torch.testing.assert_close(*result, rtol=1e-12, atol=0)


def test_seeds_matter_and_groups_are_chosen():
    p = make_risk("mlp")
    same, other = (traces(p, max_probes=3, seed=seed).values for seed in (0, 1))
    assert torch.equal(same, traces(p, max_probes=3).values)
    assert not torch.equal(same, other)


def test_it_stops_at_the_error_that_was_asked_for_or_at_the_budget():
    p = make_risk("mlp")
    steps = []
    rough = traces(p, group=2, relative_error=0.2, on_progress=lambda done, total: steps.append((done, total)))
    fine = traces(p, group=2, relative_error=0.05)
    assert rough.total.relative_error <= 0.2
    assert fine.total.relative_error <= 0.05
    assert fine.probes > rough.probes
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    layer = traces(p, relative_error=0.05, goal=lambda result: result["body.1.weight"])
    assert layer["body.1.weight"].relative_error <= 0.05
    assert traces(p, relative_error=1e-9, max_probes=7).probes == 7


def linear_risk(points: int, informative: int | None = None) -> EmpiricalRisk:
    """Two classes and weights of zero: every vector gives the exact trace of a group, and zero for points of zeros."""
    net = nn.Linear(2, 2, bias=False).eval()
    nn.init.zeros_(net.weight)
    x = torch.ones(points, 2)
    x[informative:] = 0
    return EmpiricalRisk(net, Standard(), x, torch.arange(points) % 2, nonlinear={})


@pytest.mark.parametrize(
    ("estimator", "points", "relative_error", "groups"),
    [
        ("gauss_newton", 126, 0.05, 21),  # two vectors reach the error if groups have 20 * 126 * 0.05^2 = 6.3 points
        ("gauss_newton", 1000, 0.05, 125),  # at most eight
        ("gauss_newton", 10, 0.01, 10),  # at least one
        ("hutchinson", 24, 0.01, 3),  # always eight
    ],
)
def test_groups_are_as_large_as_the_error_allows(estimator, points, relative_error, groups):
    result = traces(linear_risk(points), estimator, relative_error=relative_error, max_probes=2)
    assert len(result.samples) == groups


@pytest.mark.parametrize(("informative", "probes"), [(60, 2), (3, 8), (1, 21)])
def test_groups_that_matter_have_twenty_degrees_of_freedom(informative, probes):
    """Even if all samples are equal, because a few equal samples may be luck."""
    result = traces(linear_risk(60, informative), "gauss_newton", group=1)
    assert result.probes == probes
    assert result.total.relative_error < 1e-6


def test_the_second_round_has_as_many_vectors_as_the_error_requires():
    for first, second in ((0.1, 13), (0.041, 3), (2.0, 20)):  # 2 * (0.1 / 0.04)^2 = 12.5; at least one more
        rounds = []

        def goal(result, first=first, rounds=rounds):
            rounds.append(result.probes)
            return Estimate(1.0, first if len(rounds) == 1 else 0.04)

        traces(linear_risk(60), "gauss_newton", group=1, relative_error=0.04, max_probes=20, goal=goal)
        assert rounds == [2, second]


def test_progress_counts_vectors_or_points():
    steps = []
    traces(linear_risk(60), "gauss_newton", group=20, max_probes=5, on_progress=lambda *step: steps.append(step))
    assert steps == [(5, 15), (10, 15), (15, 15)]
    steps.clear()
    traces(linear_risk(3), "exact", on_progress=lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    steps.clear()
    never = Estimate(1.0, 1.0)  # so it takes two vectors for each of 60 groups, then as many as it may
    options = {"group": 1, "max_probes": 4, "goal": lambda result: never}
    traces(linear_risk(60), "gauss_newton", on_progress=lambda *step: steps.append(step), **options)
    assert steps == [(k, 120) for k in range(2, 121, 2)] + [(k, 240) for k in range(122, 241, 2)]


def test_auto_says_what_it_takes_and_why():
    relu, smooth = (traces(make_risk(model), max_probes=2) for model in ("conv-bn", "vit"))
    assert relu.estimator == "gauss_newton"
    assert relu.reason == (
        "the model is piecewise linear in each parameter, and Gauss-Newton agrees with differences of gradients"
    )
    assert smooth.estimator == "hutchinson"
    assert smooth.reason.startswith("native_layer_norm is not piecewise linear in body.cls")
    assert smooth.reason.endswith("; the double backward pass agrees with differences of gradients")
    asked = traces(make_risk("vit"), "gauss_newton", max_probes=2)
    assert asked.reason.endswith(", so these are not the traces of the Hessian")


def test_a_layer_used_twice_is_not_linear_but_measured_right():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Twice().double().eval()
        x = torch.rand(6, 2, dtype=torch.float64)
    p = EmpiricalRisk(net, Standard(), x, torch.arange(6) % 3)
    result = traces(p, relative_error=0.02)
    assert result.reason.startswith("linear: inner.weight is in more than one factor")
    exact = block_traces(p, dense(p))
    assert ((result.values - exact).abs() <= 4.5 * result.errors + 1e-9).all()
    torch.testing.assert_close(traces(p, "exact").values, exact)


@pytest.mark.parametrize("loss", LOSSES)
def test_exact_traces_sum_to_the_one_that_is_trained(loss):
    p = make_risk("mlp", loss)
    trained = full_trace(p.model, p.loss, p.x, p.x_adv, p.y).mean()
    assert traces(p, "exact").total.value == pytest.approx(float(trained.detach()), rel=1e-9)


def test_nonsense_is_refused():
    p = make_risk("mlp")
    for options in ({"estimator": "magic"}, {"relative_error": 0.0}, {"max_probes": 1}, {"group": 0}):
        with pytest.raises(InputError, match="expected"):
            traces(p, **options)
    with torch.no_grad():
        p.model.head.weight[0, 0] = torch.nan
    for estimator in ("gauss_newton", "hutchinson"):
        with pytest.raises(InputError, match="not finite"):
            traces(p, estimator)
