"""Boundary search: closed forms, brute force in the plane, budgets, and inputs without a boundary."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.errors import InputError
from atoll.explain.boundary import BUDGET, NONE, SearchState, boundary_search, multi_start_fab, plan
from attack_cases import linear, plane
from explain_cases import check_batch_sizes, check_both_sides, check_counts, net

P = {"linf": math.inf, "l2": 2.0, "l1": 1.0}


def images(count=12, shape=(1, 8, 8)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Constant(nn.Module):
    """Whatever comes in, class 1."""

    def forward(self, x):
        return torch.tensor([0.0, 1.0, 0.5], dtype=x.dtype).expand(len(x), 3) + 0 * x.flatten(1).sum(1, keepdim=True)


class Masked(nn.Module):
    """Class 1 where most pixels are bright: no gradient tells."""

    def forward(self, x):
        bright = (x.flatten(1).mean(1) > 0.8).to(x) + 0 * x.flatten(1).sum(1)
        return torch.stack([0.5 - bright, bright - 0.5], 1)


@pytest.mark.parametrize("norm", P)
def test_linear_models_have_their_distance_in_closed_form(norm):
    model, x, y, distance = linear(norm)
    model, x = model.double(), x.double()
    boundary = boundary_search(model, x[:50], norm=norm, bounds=None, tolerance=1e-6)
    assert torch.equal(boundary.prediction, y[:50])
    torch.testing.assert_close(boundary.distance, distance[:50].double(), rtol=1e-4, atol=1e-6)
    assert boundary.success.all()
    if norm == "l2":  # the closest point is unique: along the normal of the boundary
        normal = (model.weight[1] - model.weight[0]).detach()
        sign = torch.where(y[:50] == 0, 1.0, -1.0)[:, None]
        closest = x[:50] + sign * distance[:50, None] * normal / normal.norm()
        torch.testing.assert_close(boundary.x_outside, closest, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", P)
def test_piecewise_linear_nets_of_the_plane_by_brute_force(norm):
    model, x, y = plane(40, torch.float64)
    ticks = torch.linspace(0, 1, 401, dtype=torch.float64).tolist()
    grid = torch.tensor(list(itertools.product(ticks, repeat=2)), dtype=torch.float64)
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid, p=P[norm]), math.inf).amin(1)
    boundary = boundary_search(model, x, norm=norm)
    step = 2 / 400
    assert (boundary.distance > truth - step).all()  # nobody is closer than the closest
    assert float((boundary.distance < 1.02 * truth + step).double().mean()) >= 0.95
    assert (boundary.distance < 2 * truth + step).all()


def test_both_sides_have_the_stated_classes():
    assert check_both_sides(multi_start_fab, 620).success.all()


@pytest.mark.parametrize("size", [1, 7])
def test_no_batch_size_changes_anything(size):
    check_batch_sizes(*net(9), multi_start_fab, 100, size)


def test_a_pool_brings_points_closer_and_never_changes_the_class():
    model, x, y = plane(60, torch.float64)
    alone, helped = boundary_search(model, x[:20], budget=40), boundary_search(model, x[:20], pool=x, budget=40)
    assert helped.distance.mean() <= alone.distance.mean() * 1.01
    assert torch.equal(helped.prediction, y[:20])
    assert helped.shared_forward == 60


@pytest.mark.parametrize("budget", [17, 60, BUDGET])
def test_budgets_hold_and_counts_are_true(budget):
    check_counts(multi_start_fab, budget)


def test_more_budget_gets_closer():
    model, x, _ = plane(60, torch.float64)
    few, many = (boundary_search(model, x, budget=budget).distance.mean() for budget in (20, 400))
    assert many < few


@given(calls=st.integers(5, 5000), examples=st.integers(0, 50), others=st.integers(1, 20))
def test_plans_spend_what_there_is_and_no_more(calls, examples, others):
    schedule = plan(calls, examples, others)
    assert schedule.forward + schedule.iterations <= calls
    assert schedule.forward + schedule.iterations > calls - 2 - schedule.rounds[-1][0] * 2
    assert schedule.examples <= examples
    assert schedule.runs - schedule.examples <= others
    assert [runs for runs, _ in schedule.rounds] == sorted({runs for runs, _ in schedule.rounds}, reverse=True)


def test_a_constant_model_is_reported():
    boundary = boundary_search(Constant(), images(4))
    assert not boundary.success.any()
    assert boundary.method == ("none",) * 4
    assert torch.equal(boundary.x_outside, boundary.x)
    assert boundary.notes == (
        "boundary: no other prediction was found for 4 of 4 inputs (class 1); the model may be constant",
    )
    assert (boundary.calls <= 400).all()


def test_inputs_of_one_class_still_get_a_point():
    model, x, y = plane(60, torch.float64)
    one = x[y == y[0]]
    assert len(one) > 1
    boundary = boundary_search(model, one)  # nobody among them has another prediction
    assert boundary.success.all()
    assert set(boundary.method) <= {"FAB from clean", "RayS"}


def test_where_no_gradient_leads_examples_and_rays_do():
    x = 0.5 * images(3)
    boundary = boundary_search(Masked(), x)
    assert boundary.success.all()
    assert set(boundary.method) == {"RayS"}
    pooled = boundary_search(Masked(), x, pool=torch.ones(1, 1, 8, 8, dtype=torch.float64))
    assert pooled.success.all()
    assert set(pooled.method) == {"example"}
    assert (boundary.calls <= 400).all()
    # The truth: the mean has to rise to 0.8, which costs least if all pixels rise alike, as far as the bounds let them.
    least = (0.8 - x.flatten(1).mean(1)) * math.sqrt(64)
    assert (pooled.distance >= least * (1 - 1e-9)).all()


def test_modes_buffers_gradients_and_the_global_generator_are_left_alone():
    model, x = net(4)[0].float(), net(4)[1].float()
    model.train()
    model.body[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state, before_x = torch.get_rng_state(), x.clone()
    boundary_search(model, x, budget=60)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, before_x)
    assert not x.requires_grad


def test_a_strategy_is_not_trusted():
    """Points of its own that have no other prediction do not count."""

    def claims_everything(model, threat, points, examples, calls, *, seed, batch_size):
        state = SearchState.start(points)
        state.record(torch.arange(len(points)), torch.full_like(points.x, 0.5), "magic")
        return state

    model, x, y = plane(20, torch.float64)
    boundary = boundary_search(model, x, strategy=claims_everything)
    other = model(torch.full((1, 2), 0.5, dtype=torch.float64)).argmax(1)
    assert torch.equal(boundary.success, other != y)
    assert set(boundary.method) == {"magic", NONE}


def test_progress_is_reported():
    model, x, _ = plane(10, torch.float64)
    progress = []
    boundary_search(model, x, budget=20, batch_size=4, on_progress=lambda *counts: progress.append(counts))
    assert progress == [("boundary", 4, 10), ("boundary", 8, 10), ("boundary", 10, 10)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"x": torch.full((2, 2), math.nan)}, "inputs: expected finite numbers"),
        ({"x": torch.full((2, 2), 3.0)}, r"inputs: expected values in \[0, 1\]"),
        ({"x": torch.rand(3)}, r"inputs: expected \(points, ...\), .* got \(3,\)"),
        ({"x": torch.rand(0, 2)}, r"inputs: expected .* got \(0, 2\)"),
        ({"pool": torch.rand(4, 3)}, r"a pool of the same shape, got \(2, 2\) and \(4, 3\)"),
        ({"pool": torch.full((4, 2), math.nan)}, "inputs: expected finite numbers"),
        ({"budget": 16}, "budget: expected at least 17 calls at this tolerance, got 16"),
        ({"tolerance": 0.0}, "tolerance: expected a number between 0 and 1, got 0.0"),
        ({"budget": math.inf}, "budget: expected a finite number of calls, got inf"),
        ({"norm": "l3"}, "norm: expected linf, l2, l1 or l0"),
        ({"norm": "l0"}, "norm: expected linf, l2 or l1, got l0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"model": nn.Linear(2, 1)}, r"model: expected logits of shape \(batch, classes\), got \(2, 1\)"),
    ],
)
def test_nonsense_is_one_sentence(options, sentence):
    given = {"model": nn.Linear(2, 2), "x": torch.rand(2, 2)} | options
    with pytest.raises(InputError, match=sentence):
        boundary_search(given.pop("model"), given.pop("x"), **given)
