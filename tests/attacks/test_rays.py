"""RayS: known distances to the boundary, labels as all it sees, and what it spends."""

import itertools
import math

import pytest
import torch
from torch import nn

from atoll.attacks.iterative import AttackLoop, Points
from atoll.attacks.rays import RayS, boundary_distance, next_block
from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.threat import ThreatModel
from attack_cases import in_batches, plane

FREE, UNIT = None, (0.0, 1.0)


def flat(bounds, shape, classes=2, count=20):
    """A linear model, points with the labels it gives them, and their distances to the boundary (inside the bounds)."""
    draw = torch.Generator().manual_seed(0)
    size = math.prod(shape)
    linear = nn.Linear(size, classes)
    linear.weight.data = torch.randn(classes, size, generator=draw)
    x = torch.randn(count, *shape, generator=draw)
    if bounds is not None:
        x = 0.5 + 0.1 * x.clamp(-2, 2)
    linear.bias.data = -linear.weight.data @ x.mean(0).flatten()
    model = nn.Sequential(nn.Flatten(), linear).double()
    x = x.double()
    logits = model(x).detach()
    y = logits.argmax(1)
    normals = (linear.weight[y][:, None] - linear.weight).detach().abs().sum(2)
    distance = (logits.gather(1, y[:, None]) - logits) / normals.clamp_min(1e-9)
    return model, x, y, distance.scatter(1, y[:, None], math.inf).amin(1)


class Label(nn.Module):
    """All that a hard-label attacker sees of a model: one-hot vectors, without a gradient."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        logits = self.model(x).detach()
        return nn.functional.one_hot(logits.argmax(1), logits.shape[1]).float()


# A new kind of input joins by one line: bounds, shape, queries, and how close to the truth the mean has to come.
CASES = {
    "plane": (FREE, (2,), 100, 1.01),
    "vector": (FREE, (6,), 300, 1.01),
    "image": (UNIT, (1, 6, 6), 1000, 1.02),
    "odd image": (UNIT, (3, 5, 3), 1000, 1.02),
    "few queries": (UNIT, (1, 6, 6), 150, 1.6),
}


@pytest.mark.parametrize("name", CASES)
def test_finds_the_distance_to_the_boundary_of_a_linear_model(name):
    bounds, shape, queries, close = CASES[name]
    model, x, y, truth = flat(bounds, shape)
    result = boundary_distance(model, x, y, bounds=bounds, queries=queries)
    assert (result >= truth * (1 - 1e-9)).all()
    assert float(result.mean()) < close * float(truth.mean())


def test_sees_nothing_but_labels():
    model, x, y, truth = flat(UNIT, (1, 6, 6))
    seen = RayS(ThreatModel("linf", 0.0), minimum_norm=True, queries=300)(model, x, y)
    blind = RayS(ThreatModel("linf", 0.0), minimum_norm=True, queries=300)(Label(model), x, y)
    assert torch.equal(seen, blind)
    eps = float(truth.median()) * 1.01
    x_adv = RayS(ThreatModel("linf", eps), queries=1000)(Label(model), x, y)
    broken = model(x_adv).argmax(1) != y
    assert (broken == (truth < eps)).double().mean() >= 0.95
    assert not (broken & (truth > eps)).any()


def test_finds_what_a_fine_grid_finds():
    model, x, y = plane(40, torch.float64)
    grid = torch.tensor(list(itertools.product(torch.linspace(0, 1, 401).tolist(), repeat=2))).double()
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid, p=math.inf), math.inf).amin(1)
    result = boundary_distance(model, x, y, queries=300)
    assert (result > truth - 1 / 400).all()
    # Only the four diagonals are searched.
    ray = torch.arange(1, 2001).double()[:, None, None] / 2000 * torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    broken = model((x[:, None, None] + ray).clamp(0, 1)).argmax(3) != y[:, None, None]
    diagonal = torch.where(broken.any(2), torch.arange(1, 2001) / 2000, math.inf).amin(1)
    assert float((result < 1.01 * diagonal + 1 / 2000).double().mean()) >= 0.9  # bisection may miss a thin wedge


@pytest.mark.parametrize("size", [1, 7, 40])
def test_asks_no_more_often_than_it_may_and_not_about_points_that_are_done(size):
    model, x, y, truth = flat(UNIT, (1, 6, 6), count=60)
    calls, attack = [], RayS(ThreatModel("linf", 5 * float(truth.median())), queries=60)
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    _, _, iterations = together(attack, model, x, y, size)
    assert iterations.min() < iterations.max() == 60
    assert sum(calls) == len(x) + int(iterations.sum())  # the clean pass, and the queries


def test_starts_with_the_corners_and_goes_on_to_halves():
    asked = []

    class Sure(nn.Module):
        def forward(self, x):
            asked.append(x[0].tolist())
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    RayS(ThreatModel("linf", 0.1), queries=5)(Sure(), torch.full((1, 4), 0.3), torch.tensor([0]))
    assert asked[1:] == [[1.0] * 4, [0.0] * 4, [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]


def test_without_bounds_it_looks_as_far_as_a_million():
    """In the plane, the radius doubles after every round of three queries, from 1 up to 2**20."""
    asked = []

    class Sure(nn.Module):
        def forward(self, x):
            asked.append(x.abs().max().item())
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    RayS(ThreatModel("linf", 0.1, None), queries=76)(Sure(), torch.zeros(1, 2), torch.tensor([0]))
    assert asked[2:] == [2.0 ** min(number // 3, 20) for number in range(75)]  # after the clean pass and the corner


def test_gives_up_when_a_round_was_in_vain():
    model, x, y, _ = flat(FREE, (2,))
    calls = []
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    RayS(ThreatModel("linf", 0.0, None), minimum_norm=True)(model, x, y)
    assert sum(calls) < 100 * len(x)


def test_stops_within_eps_and_leaves_the_others_where_they_were():
    model, x, y, truth = flat(UNIT, (1, 6, 6))
    eps = float(truth.median()) * 1.01
    threat, calls = ThreatModel("linf", eps), []
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    x_adv = RayS(threat, queries=1000)(model, x, y)
    spent = sum(calls)
    broken = model(x_adv).argmax(1) != y
    assert broken.any()
    assert not broken.all()
    assert (threat.distance(x_adv, x) <= eps).all()
    assert torch.equal(x_adv[~broken], x[~broken])
    calls.clear()
    RayS(ThreatModel("linf", 0.0), minimum_norm=True, queries=1000)(model, x, y)
    assert spent < sum(calls)


def together(attack, model, x, y, size):
    """What comes out for each point when so many are under attack at a time and others take the place of leavers."""
    points = Points(x, y, torch.arange(len(y)), model(x).detach())

    result, closest, iterations = x.clone(), torch.full((len(x),), math.nan).double(), torch.zeros(len(x)).long()
    for rows in AttackLoop(attack, model, in_batches(points), lambda index: PointRNG(0, index=index), 4, size):
        result[rows.index], closest[rows.index], iterations[rows.index] = (
            rows.x_adv,
            rows.state["closest"],
            rows.iteration,
        )
    return result, closest, iterations


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_a_point_does_not_depend_on_its_batch(eps):
    model, x, y = plane(40, torch.float64)
    attack = RayS(ThreatModel("linf", eps), minimum_norm=not eps, queries=50)
    whole = together(attack, model, x, y, len(x))
    for size in (1, 7):
        for one, other in zip(together(attack, model, x, y, size), whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_distances_of_points_that_are_wrong_and_of_points_that_cannot_be_wrong():
    model, x, y = plane(40, torch.float64)
    assert torch.equal(boundary_distance(model, x, (y + 1) % 4), torch.zeros(40).double())
    sure = nn.Linear(2, 3).double()
    sure.weight.data.zero_()
    sure.bias.data = torch.tensor([1.0, 0.0, 0.0]).double()
    for bounds in (FREE, UNIT):
        assert boundary_distance(sure, x, torch.zeros(40).long(), bounds=bounds, queries=300).isinf().all()
    assert boundary_distance(model, x[:0], y[:0]).shape == (0,)


def test_mode_is_restored_and_images_stay_in_bounds():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)).train()
    buffers = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.cat([torch.full((3, 1, 6, 6), value) for value in (0.0, 0.5, 1.0)])
    y = torch.arange(9) % 4
    x_adv = RayS(ThreatModel("linf", 0.0), minimum_norm=True, queries=50)(model, x, y)
    boundary_distance(model, x, y, queries=5)
    assert model.training
    assert all(torch.equal(value, buffers[name]) for name, value in model.state_dict().items())
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 48, 147])
def test_blocks_cover_everything_on_every_level(size):
    first, width, covered = torch.tensor(size), torch.tensor(1), []
    while True:
        first, width, over = next_block(first, width, size)
        if over and covered:
            break
        if first == 0:
            covered.append(set())
        places = set(range(int(first), min(int(first + width), size)))
        assert places
        assert not places & covered[-1]
        covered[-1] |= places
    assert covered == [set(range(size))] * (math.ceil(math.log2(size)) + 1)


def test_wrong_arguments_are_refused():
    for build, sentence in (
        (lambda: RayS(ThreatModel("l2", 1.0)), "RayS: expected linf, got l2"),
        (lambda: RayS(ThreatModel(), queries=0), "queries: expected at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=sentence):
            build()
    model, x, y = plane(40, torch.float64)
    with pytest.raises(InputError, match="labels: expected classes"):
        boundary_distance(model, x, y + 4)
