"""Boundary search: closed forms, brute force in the plane, budgets, and inputs without a boundary."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.attacks.progress import AttackCounts
from atoll.errors import InputError
from atoll.explain.boundary import boundary_search
from atoll.explain.race import plan
from atoll.modules import count_passes
from attack_cases import linear, plane
from explain_cases import net

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
    found = boundary_search(model, x[:50], norm=norm, bounds=None, tolerance=1e-6)
    assert torch.equal(found.prediction, y[:50])
    torch.testing.assert_close(found.distance, distance[:50].double(), rtol=1e-4, atol=1e-6)
    assert found.success.all()
    if norm == "l2":  # the closest point is unique: along the normal of the boundary
        normal = (model.weight[1] - model.weight[0]).detach()
        sign = torch.where(y[:50] == 0, 1.0, -1.0)[:, None]
        closest = x[:50] + sign * distance[:50, None] * normal / normal.norm()
        torch.testing.assert_close(found.across, closest, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", P)
def test_piecewise_linear_nets_of_the_plane_by_brute_force(norm):
    model, x, y = plane(40, torch.float64)
    ticks = torch.linspace(0, 1, 401, dtype=torch.float64).tolist()
    grid = torch.tensor(list(itertools.product(ticks, repeat=2)), dtype=torch.float64)
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid, p=P[norm]), math.inf).amin(1)
    found = boundary_search(model, x, norm=norm)
    step = 2 / 400
    assert (found.distance > truth - step).all()  # nobody is closer than the closest
    assert float((found.distance < 1.02 * truth + step).double().mean()) >= 0.95
    assert (found.distance < 2 * truth + step).all()


@pytest.mark.parametrize("strategy", ["race", "ladder", "rungs"])
def test_both_sides_are_where_they_are_said_to_be(strategy):
    model, x, y = plane(30, torch.float64)
    found = boundary_search(model, x, strategy=strategy, tolerance=0.01, budget=620)
    ok = found.success
    assert ok.all() if strategy == "race" else ok.any()
    assert torch.equal(model(found.inside).argmax(1), y)
    assert torch.equal(model(found.across).argmax(1), found.other)
    assert (found.other != y)[ok].all()
    torch.testing.assert_close(found.distance[ok], (found.across - x).norm(dim=1)[ok])
    gap = (found.across - found.inside).norm(dim=1)
    # The segment that was bisected ended at most sqrt(2), the diagonal of the bounds, away.
    assert (gap <= 0.01 * math.sqrt(2)).all()
    assert found.across.min() >= 0
    assert found.across.max() <= 1
    cross = (found.across - x)[:, 0] * (found.inside - x)[:, 1] - (found.across - x)[:, 1] * (found.inside - x)[:, 0]
    assert cross.abs().max() < 1e-12  # inside is on the way to across


@pytest.mark.parametrize("strategy", ["race", "ladder", "rungs"])
@pytest.mark.parametrize("size", [1, 7])
def test_no_batch_size_changes_anything(strategy, size):
    model, x = net(9) if strategy == "race" else plane(9, torch.float64)[:2]
    budget = 100 if strategy == "race" else 430
    whole = boundary_search(model, x, strategy=strategy, budget=budget, batch_size=256)
    parts = boundary_search(model, x, strategy=strategy, budget=budget, batch_size=size)
    assert whole.method == parts.method
    assert whole.success.any()
    for name in ("across", "inside", "distance", "forward", "backward", "other"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-7, atol=1e-7)
    few = boundary_search(model, x[:4], pool=x, strategy=strategy, budget=budget)  # nor does company
    torch.testing.assert_close(few.across, whole.across[:4], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(whole[2:4].across, whole.across[2:4])
    assert whole[torch.tensor([3, 1])].method == (whole.method[3], whole.method[1])


def test_a_pool_brings_points_closer_and_never_changes_the_class():
    model, x, y = plane(60, torch.float64)
    alone, helped = boundary_search(model, x[:20], budget=40), boundary_search(model, x[:20], pool=x, budget=40)
    assert helped.distance.mean() <= alone.distance.mean() * 1.01
    assert torch.equal(helped.prediction, y[:20])
    assert helped.shared_forward == 60


@pytest.mark.parametrize(
    ("strategy", "budget"), [("race", 17), ("race", 60), ("race", None), ("ladder", 430), ("rungs", 430)]
)
def test_budgets_are_kept_and_counts_are_true(strategy, budget):
    model, x = net(10)
    tally = AttackCounts()
    with count_passes(model, tally):
        found = boundary_search(model, x, strategy=strategy, budget=budget)
    assert tally.forward == int(found.forward.sum())
    assert tally.backward == int(found.backward.sum())
    assert (found.calls <= (400 if budget is None else budget)).all()
    tally = AttackCounts()
    with count_passes(model, tally):
        pooled = boundary_search(model, x, pool=images(30), strategy=strategy, budget=budget)
    assert tally.forward == int(pooled.forward.sum()) + pooled.shared_forward


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
    found = boundary_search(Constant(), images(4))
    assert not found.success.any()
    assert found.method == ("none",) * 4
    assert torch.equal(found.across, found.x)
    assert found.words == (
        "boundary: no other prediction was found for 4 of 4 inputs (class 1); the model may be constant"
    )
    assert found.to_json()["distance"] == [None] * 4
    assert (found.calls <= 400).all()


def test_inputs_of_one_class_still_get_a_point():
    model, x, y = plane(60, torch.float64)
    one = x[y == y[0]]
    assert len(one) > 1
    found = boundary_search(model, one)  # nobody among them has another prediction
    assert found.success.all()
    assert set(found.method) <= {"FAB from clean", "RayS"}


def test_where_no_gradient_leads_examples_and_rays_do():
    x = 0.5 * images(3)
    found = boundary_search(Masked(), x)
    assert found.success.all()
    assert set(found.method) == {"RayS"}
    pooled = boundary_search(Masked(), x, pool=torch.ones(1, 1, 8, 8, dtype=torch.float64))
    assert pooled.success.all()
    assert set(pooled.method) == {"example"}
    assert (found.calls <= 400).all()
    # The truth: the mean has to rise to 0.8, which costs least if all pixels rise alike, as far as the bounds let them.
    least = (0.8 - x.flatten(1).mean(1)) * math.sqrt(64)
    assert (pooled.distance >= least * (1 - 1e-9)).all()


def test_modes_buffers_gradients_and_the_global_generator_are_left_alone():
    model, x = net(4)[0].float(), net(4)[1].float()
    model.train()
    model.body[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state, kept = torch.get_rng_state(), x.clone()
    boundary_search(model, x, budget=60)
    boundary_search(model, x, strategy="ladder", budget=300)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, kept)
    assert not x.requires_grad


def test_progress_is_told():
    model, x, _ = plane(10, torch.float64)
    told = []
    boundary_search(model, x, budget=20, batch_size=4, on_progress=lambda *words: told.append(words))
    assert told == [("boundary", 4, 10), ("boundary", 8, 10), ("boundary", 10, 10)]


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
        ({"tolerance": 0.0}, "tolerance: expected a share between 0 and 1, got 0.0"),
        ({"strategy": "magic"}, "strategy: expected race, ladder or rungs, got 'magic'"),
        ({"strategy": "ladder", "norm": "linf"}, "the ladder expects l2, got linf"),
        ({"norm": "l3"}, "norm: expected linf, l2 or l1"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"model": nn.Linear(2, 1)}, r"model: expected logits of shape \(batch, classes\), got \(2, 1\)"),
    ],
)
def test_nonsense_is_one_sentence(options, sentence):
    given = {"model": nn.Linear(2, 2), "x": torch.rand(2, 2)} | options
    with pytest.raises(InputError, match=sentence):
        boundary_search(given.pop("model"), given.pop("x"), **given)
