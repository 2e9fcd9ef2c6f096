"""Attacks on rows (APGD, FAB): known worst cases, brute force, and rows that do not notice each other."""

import itertools

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, FAB, PGD, Square
from atoll.attacks.apgd import checkpoints
from atoll.attacks.objectives import dlr_targeted, margin
from atoll.attacks.rows import Points, drive
from atoll.errors import InputError
from atoll.streams import Streams
from atoll.threat import ThreatModel

# A new attack on rows joins every test by one line: how it is made, and for which norms it is.
ATTACKS = {
    "apgd-ce": (APGD, ("linf", "l2")),
    "apgd-dlr": (lambda threat, **options: APGD(threat, "dlr", **options), ("linf", "l2")),
    "apgd-t": (lambda threat, **options: APGD(threat, targets=9, **options), ("linf", "l2")),
    "fab-t": (FAB, ("linf", "l2", "l1")),
    "square": (lambda threat, steps=500: Square(threat, queries=steps), ("linf",)),
}
CASES = [(name, norm) for name, (_, norms) in ATTACKS.items() for norm in norms]


def linear(norm):
    """A linear model of two classes, points with the labels it gives them, and their distances to the boundary."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 2)
    model.weight.data, model.bias.data = torch.randn(2, 6, generator=draw), torch.randn(2, generator=draw)
    x = torch.randn(200, 6, generator=draw)
    y = model(x).argmax(1)
    difference = (model.weight[1] - model.weight[0]).detach()
    dual = {"linf": difference.abs().sum(), "l2": difference.norm(), "l1": difference.abs().max()}[norm]
    return model, x, y, -margin(model(x), y).detach() / dual


def plane():
    """A small net with a crooked boundary, and points of the unit square with the labels it gives them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 4)).eval()
        model[0].weight.data *= 5
        model[0].bias.data = -model[0].weight.data.sum(1) / 2 + 0.3 * torch.randn(12)
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_breaks_exactly_the_points_of_a_linear_model_that_can_be_broken(name, norm):
    model, x, y, distance = linear(norm)
    eps = float(distance.median()) * 1.001
    threat = ThreatModel(norm, eps, None)
    x_adv = ATTACKS[name][0](threat)(model, x, y)
    broken = (model(x_adv).argmax(1) != y) & (threat.distance(x_adv, x) <= eps * (1 + 1e-5))
    assert not (broken & (distance > eps)).any()  # never more than the truth
    assert (broken | (distance > eps * 0.99)).all()  # and all of it, up to the last percent


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_fab_finds_the_distance_to_the_boundary_of_a_linear_model(norm):
    model, x, y, distance = linear(norm)
    threat = ThreatModel(norm, 0.0, None)  # nothing is close enough, so it goes on to the end
    x_adv = FAB(threat, steps=30)(model, x, y)
    ratio = threat.distance(x_adv, x) / distance
    assert (model(x_adv).argmax(1) != y).all()
    assert float(ratio.min()) >= 1
    assert float(ratio.max()) < 1.01


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_finds_what_a_fine_grid_finds(norm):
    model, x, y = plane()
    eps = 0.15
    threat = ThreatModel(norm, eps)
    grid = torch.tensor(list(itertools.product(torch.linspace(-eps, eps, 81).tolist(), repeat=2)))
    offsets = grid[threat.distance(grid, torch.zeros_like(grid)) <= eps]
    truth = (model((x[:, None] + offsets).clamp(0, 1)).argmax(2) != y[:, None]).any(1)
    found = torch.zeros_like(truth)
    for attack, norms in ATTACKS.values():
        if norm in norms:
            x_adv = attack(threat)(model, x, y)
            found |= (model(x_adv).argmax(1) != y) & (threat.distance(x_adv, x) <= eps * (1 + 1e-5))
    assert int((found & truth).sum()) >= int(truth.sum()) - 1
    assert int((found & ~truth).sum()) <= 1  # between two points of the grid at most


def test_is_at_least_as_strong_as_pgd():
    model, x, y = plane()
    threat = ThreatModel("linf", 0.08)
    strong = model(APGD(threat)(model, x, y)).argmax(1) != y
    weak = model(PGD(threat, steps=20)(model, x, y)).argmax(1) != y
    assert int(strong.sum()) >= int(weak.sum())


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_a_point_does_not_notice_its_company(name, batch_size):
    """Batches of any size, filled up as points leave, give every point the same candidate and the same verdict."""
    model, x, y = plane()
    model, x = model.double(), x.double()
    attack = ATTACKS[name][0](ThreatModel("linf", 0.05), steps=20)

    def run(size):
        points, position = Points(x, y, torch.arange(len(y)), model(x).detach()), [0]

        def feed(count):
            start = position[0]
            position[0] += count
            return points[slice(start, start + count)] if start < len(points) else None

        found, seen = x.clone(), []
        for rows in drive(attack, model, feed, lambda index: Streams(0, "apgd", index=index), batch_size=size):
            found[rows.index] = rows.adv
            seen += rows.index.tolist()
        assert sorted(seen) == list(range(len(y)))  # every point comes out, once
        return found

    torch.testing.assert_close(run(batch_size), run(32), rtol=1e-9, atol=1e-9)


def test_counts_its_passes_and_stops_at_the_first_success():
    model, x, y = plane()
    calls = []
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    APGD(ThreatModel("linf", 0.0), steps=10)(model, x, y)  # nothing can be broken
    assert sum(calls) == len(x) * (1 + 11)  # clean logits, and steps + 1 looks
    calls.clear()
    APGD(ThreatModel("linf", 1.0), steps=10)(model, x, y)  # nearly everything breaks at once
    assert sum(calls) < len(x) * 6


def test_square_needs_no_gradient_and_proposes_squares():
    """A model whose gradient is zero everywhere stops APGD, but not Square."""

    class Masked(nn.Module):
        def forward(self, x):
            score = (x.detach() * 255).round().mean((1, 2, 3)) / 255
            return torch.stack([0.5 - score, score - 0.5], 1) + 0 * x.sum()

    x = torch.full((8, 1, 6, 6), 0.45)
    y = torch.zeros(8, dtype=torch.long)
    threat = ThreatModel("linf", 0.1)
    assert (Masked()(APGD(threat, steps=5)(Masked(), x, y)).argmax(1) == y).float().mean() >= 0.5
    x_adv = Square(threat, queries=300)(Masked(), x, y)
    assert (Masked()(x_adv).argmax(1) != y).all()
    assert (x_adv - x).abs().max() <= 0.1 + 1e-6


def test_squares_are_squares():
    attack = Square(ThreatModel("linf", 0.1), queries=100)
    x = torch.full((50, 3, 12, 12), 0.5)
    points = Points(x, torch.zeros(50, dtype=torch.long), torch.arange(50), torch.zeros(50, 2))
    rows = attack.rows(points, Streams(0, index=points.index))
    stripes = rows.adv - x
    assert torch.equal(stripes, stripes[:, :, :1].expand_as(stripes))
    rows.state["best"], rows.clock = x, rows.clock + 30
    changed = (attack._propose(rows) - x).abs() > 0.05
    side = float((attack.share(rows.clock)[0] * 144).sqrt().round())
    assert (changed.flatten(1).sum(1) == 3 * side**2).all()
    assert (changed.any(1).any(1).sum(1) == side).all()
    assert len({tuple(c.nonzero()[0].tolist()) for c in changed}) > 10  # at many places


def test_checkpoints_of_the_paper():
    """Croce & Hein (2020), section 3: p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)."""
    p = [0.0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    assert checkpoints(100) == [round(100 * share) for share in p[1:] if share <= 1]


def test_targeted_dlr_against_its_formula_and_few_classes():
    g = torch.tensor([[5.0, 3.0, 1.0, 0.0, -1.0]])
    assert float(dlr_targeted(g, torch.tensor([0]), torch.tensor([2]))) == pytest.approx((1 - 5) / (5 - 0.5 * (1 + 0)))
    three = torch.tensor([[5.0, 3.0, 1.0]])
    assert float(dlr_targeted(three, torch.tensor([0]), torch.tensor([1]))) == pytest.approx((3 - 5) / (5 - 1))
    two = torch.tensor([[5.0, 3.0]])
    assert float(dlr_targeted(two, torch.tensor([0]), torch.tensor([1]))) == -2


@pytest.mark.parametrize("name", ATTACKS)
def test_labels_are_checked(name):
    model, x, y = plane()
    with pytest.raises(InputError, match="labels: expected classes"):
        ATTACKS[name][0](ThreatModel())(model, x, y + 4)


def test_nonsense_is_refused():
    for build, sentence in (
        (lambda: APGD(ThreatModel("l1", 1.0)), "linf or l2"),
        (lambda: APGD(ThreatModel(), "kl"), "objective: expected ce or dlr"),
        (lambda: APGD(ThreatModel(), steps=0), "steps >= 1"),
        (lambda: FAB(ThreatModel(), targets=0), "expected at least 1"),
        (lambda: Square(ThreatModel("l2", 1.0)), "expected linf"),
        (lambda: Square(ThreatModel(), queries=0), "queries >= 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            build()
