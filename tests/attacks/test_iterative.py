"""Attacks on rows (APGD, FAB, Square): known worst cases, brute force, and independent rows."""

import itertools
import math

import foolbox
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.attacks import APGD, FAB, FMN, PDPGD, PGD, SigmaZero, Square
from atoll.attacks.apgd import SparseSteps, checkpoints
from atoll.attacks.iterative import AttackLoop, OneShot, Points
from atoll.attacks.square import bump, move_mass, tiles
from atoll.errors import InputError
from atoll.losses.objectives import dlr_targeted
from atoll.models import SmallConvNet
from atoll.rng import PointRNG
from atoll.threat import ThreatModel
from attack_cases import in_batches, plane

NORMS = ("linf", "l2", "l1")

# A new attack on rows joins every test by one line: how it is made, and for which norms it is.
ATTACKS = {
    "apgd-ce": (APGD, NORMS),
    "apgd-dlr": (lambda threat, **options: APGD(threat, "dlr", **options), NORMS),
    "apgd-t": (lambda threat, **options: APGD(threat, targets=9, **options), NORMS),
    "apgd-patience": (lambda threat, **options: APGD(threat, targets=9, patience=1, **options), ("linf", "l2")),
    "apgd-restarts": (lambda threat, **options: APGD(threat, restarts=2, **options), NORMS),
    "fab": (FAB, NORMS),
    "fab-t": (lambda threat, **options: FAB(threat, targets=9, **options), NORMS),
    "fab-restarts": (lambda threat, **options: FAB(threat, targets=2, restarts=2, **options), NORMS),
    # These find eps themselves, which takes more steps.
    "fmn": (lambda threat, steps=40: FMN(threat, steps=5 * steps), NORMS),
    "pdpgd": (lambda threat, steps=40: PDPGD(threat, steps=10 * steps), ("l1",)),
    "sigma-zero": (SigmaZero, ("l0",)),
    "square": (lambda threat, steps=500: Square(threat, queries=steps), NORMS),
}
CASES = [(name, norm) for name, (_, norms) in ATTACKS.items() for norm in norms]
CONVEX = [(name, norm) for name, norm in CASES if norm != "l0"]
# What they promise on a linear model: all points up to this share of eps.  Random search does not get to every corner.
REACH = {"square": {"linf": 0.99, "l2": 0.8, "l1": 0.6}}
SURE = ("apgd-t", "fab", "fab-t")  # with more than two classes the objectives of the others have other maxima


def linear(norm, classes=2):
    """A linear model, points with the labels it gives them, and their distance to every other class."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(6, classes)
    model.weight.data = torch.randn(classes, 6, generator=draw)
    model.bias.data = torch.randn(classes, generator=draw)
    x = torch.randn(120, 6, generator=draw)
    logits, weight = model(x).detach(), model.weight.detach()
    y = logits.argmax(1)
    normals = weight[y][:, None] - weight
    dual = torch.linalg.vector_norm(normals, {"linf": 1, "l2": 2, "l1": math.inf}[norm], dim=2)
    distance = (logits.gather(1, y[:, None]) - logits) / dual
    return model, x, y, distance.scatter(1, y[:, None], math.inf)


def broken(model, threat, x, y, x_adv):
    return (model(x_adv).argmax(1) != y) & (threat.distance(x_adv, x) <= threat.radius * (1 + 1e-5))


def run(attack, model, x, y, batch_size):
    """Candidates and claims of an attack whose batch is filled up as points leave."""
    points = Points(x, y, torch.arange(len(y)), model(x).detach())

    result, success, seen = x.clone(), torch.zeros(len(y), dtype=torch.bool), []
    classes = points.logits.shape[1]
    for rows in AttackLoop(
        attack, model, in_batches(points), lambda index: PointRNG(0, "rows", index=index), classes, batch_size
    ):
        result[rows.index], success[rows.index] = rows.x_adv, rows.success
        seen += rows.index.tolist()
    assert sorted(seen) == list(range(len(y)))  # every point comes out, once
    return result, success


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize(("name", "norm"), CONVEX)
def test_breaks_exactly_the_points_of_a_linear_model_that_can_be_broken(name, norm, classes):
    model, x, y, distances = linear(norm, classes)
    distance = distances.amin(1)
    eps = float(distance.median()) * 1.001
    threat = ThreatModel(norm, eps, None)
    attack = ATTACKS[name][0](threat, **({} if name == "square" else {"steps": 40}))
    result = broken(model, threat, x, y, attack(model, x, y))
    assert not (result & (distance > eps)).any()  # never more than the truth
    if classes == 2 or name in SURE:  # and all of it, up to the last percent
        reach = REACH.get(name, {}).get(norm, 0.99)
        assert (result | (distance > eps * reach)).all()
    else:
        assert int(result.sum()) > 0.7 * int((distance <= eps).sum())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attack", [APGD, FAB])
def test_a_target_is_the_likeliest_other_class(attack, norm):
    """With one target, a point is broken if it can be broken into that class (into others: perhaps)."""
    model, x, y, distances = linear(norm, 5)
    target = model(x).scatter(1, y[:, None], -math.inf).argmax(1)
    distance = distances.gather(1, target[:, None]).squeeze(1)
    eps = float(distance.median()) * 1.001
    threat = ThreatModel(norm, eps, None)
    result = broken(model, threat, x, y, attack(threat, targets=1)(model, x, y))
    assert (result | (distance > eps * 0.99)).all()
    assert not (result & (distances.amin(1) > eps)).any()


@pytest.mark.parametrize("targets", [9, 0])
@pytest.mark.parametrize("norm", NORMS)
def test_fab_finds_the_distance_to_the_boundary_of_a_linear_model(norm, targets):
    model, x, y, distances = linear(norm, 4)
    attack = FAB(ThreatModel(norm, 0.0, None), steps=30, targets=targets, minimum_norm=True)
    points = Points(x, y, torch.arange(len(y)), model(x).detach())
    rows = attack.init_state(points, PointRNG(0, index=points.index))
    for _ in range(attack.num_steps(4)):
        attack.step(model, rows)
    ratio = rows.state["closest"] / distances.amin(1)
    assert float(ratio.min()) >= 1 - 1e-5
    # Untargeted, some stop at the overshoot of their first step.
    assert float(ratio.max()) < (1.01 if targets else 1.06)
    assert (model(rows.x_adv).argmax(1) != y).all()
    torch.testing.assert_close(attack.threat.distance(rows.x_adv, x), rows.state["closest"])
    # Otherwise, what is not in the ball is not returned.
    small = ThreatModel(norm, 0.5 * float(distances.min()), None)
    assert torch.equal(FAB(small, steps=5, targets=targets)(model, x, y), x)


@pytest.mark.parametrize("norm", NORMS)
def test_finds_what_a_fine_grid_finds(norm):
    model, x, y = plane()
    eps = 0.15
    threat = ThreatModel(norm, eps)
    grid = torch.tensor(list(itertools.product(torch.linspace(-eps, eps, 81).tolist(), repeat=2)))
    offsets = grid[threat.distance(grid, torch.zeros_like(grid)) <= eps]
    truth = (model((x[:, None] + offsets).clamp(0, 1)).argmax(2) != y[:, None]).any(1)
    union = torch.zeros_like(truth)
    for name, (attack, norms) in ATTACKS.items():
        if norm in norms:
            options = {} if name == "square" else {"steps": 40}
            result = broken(model, threat, x, y, attack(threat, **options)(model, x, y))
            assert int((result & ~truth).sum()) <= 1, name  # between two points of the grid at most
            assert int((result & truth).sum()) >= 0.8 * int(truth.sum()), name
            union |= result
    assert int((union & truth).sum()) >= int(truth.sum()) - 1


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_a_point_does_not_depend_on_its_batch(name, norm):
    """Batches of any size, filled up as points leave, give every point the same candidate and the same outcome."""
    model, x, y = plane()
    model, x, y = model.double(), x[:8].double(), y[:8]
    attack = ATTACKS[name][0](ThreatModel(norm, 1 if norm == "l0" else 0.07), steps=8)
    result, success = run(attack, model, x, y, 8)
    for batch_size in (1, 3):
        other, outcome = run(attack, model, x, y, batch_size)
        torch.testing.assert_close(other, result, rtol=1e-9, atol=1e-9)
        assert torch.equal(outcome, success)
    assert torch.equal(success, model(result).argmax(1) != y)
    assert 0 < int(success.sum()) < 8  # else this shows nothing


shapes = st.sampled_from([(1,), (2,), (5,), (1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 3, 3), (3, 4, 7), (1, 11, 11)])


@settings(max_examples=150)
@given(
    case=st.sampled_from(CASES),
    eps=st.one_of(st.just(0.0), st.floats(1e-3, 3.0)),
    shape=shapes,
    bounds=st.sampled_from([(0.0, 1.0), (-1.0, 3.0), None]),
    classes=st.integers(2, 5),
    kind=st.sampled_from(["low", "high", "random"]),
    seed=st.integers(0, 10**6),
)
def test_output_is_always_inside_ball_and_bounds(case, eps, shape, bounds, classes, kind, seed):
    (name, norm), draw = case, torch.Generator().manual_seed(seed)
    low, high = bounds or (0.0, 1.0)
    value = {
        "low": torch.zeros(4, *shape),
        "high": torch.ones(4, *shape),
        "random": torch.rand(4, *shape, generator=draw),
    }
    x = value[kind] * (high - low) + low
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), classes))
    y = torch.randint(classes, (4,), generator=draw)
    before = x.clone()
    eps = float(math.ceil(eps)) if norm == "l0" else eps
    threat = ThreatModel(norm, eps, bounds)
    x_adv = ATTACKS[name][0](threat, steps=4)(model, x, y)
    assert torch.equal(x, before)  # the caller's points are not touched
    assert (threat.distance(x_adv.double(), x.double()) <= eps * (1 + 1e-5) + 1e-7).all()
    assert x_adv.isfinite().all()
    if bounds:
        assert x_adv.min() >= low
        assert x_adv.max() <= high


def passes(attack, model, x, y):
    """Points that went forward and backward through the model."""
    count = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(_, value):
            count["forward"] += len(value)
            return value.clone()

        @staticmethod
        def backward(_, gradient):
            count["backward"] += len(gradient)
            return gradient

    class Model(nn.Module):
        def forward(self, value):
            return model(Counted.apply(value))

    attack(Model(), x, y)
    return count["forward"], count["backward"]


@pytest.mark.parametrize(
    ("attack", "norm", "looks", "backward"),
    [
        ({}, "linf", 11, 1),
        ({}, "l1", 13, 1),  # three phases, each with a first look
        ({"restarts": 3}, "l2", 33, 1),
        ({"targets": 2}, "linf", 22, 1),
        ({"targets": 9, "restarts": 2}, "l1", 3 * 2 * 13, 1),  # four classes have three others
        ({"targets": 2, "patience": 1.0}, "l2", 2 * 3, 1),  # given up at the first checkpoint, after two steps
        ({"eot": 4}, "linf", 44, 1),
        ({"fab": 2}, "linf", 22, 1),
        ({"fab": 9, "restarts": 2}, "l1", 66, 1),
        ({"fab": 0, "restarts": 3}, "l2", 33, 3),
    ],
)
def test_counts_its_passes(attack, norm, looks, backward):
    model, x, y = plane()
    kind = FAB if "fab" in attack else APGD
    options = {"targets" if name == "fab" else name: value for name, value in attack.items()}
    forward, back = passes(kind(ThreatModel(norm, 0.0), steps=10, **options), model, x, y)  # nothing can be broken
    assert forward == len(x) * (1 + looks)  # clean logits, and the looks
    assert back == len(x) * looks * backward


def test_stops_at_the_first_success():
    model, x, y = plane()
    forward, _ = passes(APGD(ThreatModel("linf", 1.0), steps=10, restarts=9), model, x, y)  # nearly everything breaks
    assert forward < len(x) * 6
    assert passes(Square(ThreatModel("linf", 0.0), queries=7), model, x, y) == (len(x) * 8, 0)
    assert passes(Square(ThreatModel("linf", 0.0), queries=7, restarts=3), model, x, y) == (len(x) * 22, 0)


def test_any_other_attack_is_a_single_iteration_that_claims_all_points():
    model, x, y = plane()
    attack = OneShot(PGD(ThreatModel("linf", 0.05), steps=2))
    assert attack.num_steps(4) == 1
    _, success = run(attack, model, x, y, 7)
    assert success.all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_restart_of_square_is_a_fresh_run(norm):
    threat, asked = ThreatModel(norm, 0.2), []

    class Constant(nn.Module):
        def forward(self, x):
            asked.append(x.clone())
            return torch.tensor([1.0, 0.0]).expand(len(x), 2)

    def candidates(**options):
        asked.clear()
        x, y = torch.full((6, 1, 8, 8), 0.5), torch.zeros(6, dtype=torch.long)
        Square(threat, queries=30, **options)(Constant(), x, y)
        return torch.stack(asked[1:])  # without the clean pass

    twice = candidates(restarts=2)
    first, second = twice.split(30)
    assert torch.equal(first, candidates())
    assert not torch.equal(first[0], second[0])
    for run in (
        first,
        second,
    ):  # nothing gets better, so linf candidates differ from the start of their run in a square
        if norm == "linf":
            columns = run[0] - 0.5
            assert torch.equal(columns, columns[:, :, :1].expand_as(columns))  # the start: vertical stripes
            assert all((square != run[0]).flatten(1).float().mean() < 0.8 for square in run[1:])
        assert (threat.distance(run.flatten(0, 1), torch.full((180, 1, 8, 8), 0.5)) <= 0.2 * (1 + 1e-5)).all()


def test_restarts_of_square_do_not_depend_on_the_batch():
    model, x, y = plane()
    attack = Square(ThreatModel("linf", 0.08), queries=20, restarts=3)
    whole, _ = run(attack, model, x, y, 60)
    parts, success = run(attack, model, x, y, 7)
    assert torch.equal(whole, parts)
    assert 0 < int(success.sum()) < len(y)
    once = run(Square(ThreatModel("linf", 0.08), queries=20), model, x, y, 60)[1]
    assert int(success.sum()) >= int((once & success).sum()) == int(once.sum())  # more runs break no fewer points


def test_expectation_over_random_answers_finds_what_is_found_without_them():
    """A single pass is wrong by luck, so an attack that trusts it stops too early and claims too much."""
    model, x, y, distances = linear("linf")
    model.weight.data, model.bias.data = model.weight.data / 10, model.bias.data / 10
    eps = float(distances.amin(1).median())
    noise = eps * float((model.weight[0] - model.weight[1]).detach().abs().sum()) * 0.3

    class Noisy(nn.Module):
        def forward(self, value):
            logits = model(value)
            return logits + noise * torch.randn_like(logits)

    clear = (distances.amin(1) / eps - 1).abs() > 0.4
    breakable = distances.amin(1) < eps
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, trusting = run(APGD(ThreatModel("linf", eps, None), steps=30), Noisy(), x, y, 100)
        result, success = run(APGD(ThreatModel("linf", eps, None), steps=30, eot=20), Noisy(), x, y, 100)
    assert int((trusting & ~breakable & clear).sum()) > 10
    assert torch.equal(success[clear], breakable[clear])
    truly = model(result).argmax(1) != y
    assert int((truly & breakable & clear).sum()) > 0.9 * int((breakable & clear).sum())


def test_l1_phases_look_outside_but_never_return_it():
    model, x, y, distances = linear("l1")
    distance = distances.amin(1)
    eps = float(distance.median()) / 2
    threat, seen = ThreatModel("l1", eps, None), []
    between = (distance > 1.05 * eps) & (distance < 2.8 * eps)  # adversarial only in the larger balls
    x, y = x[between], y[between]
    assert len(x) > 30

    class Watched(nn.Module):
        def forward(self, value):
            seen.append((threat.distance(value.detach(), x) / eps, model(value).argmax(1) != y))
            return model(value)

    x_adv = APGD(threat, steps=20)(Watched(), x, y)
    sizes, wrong = (torch.stack(values[1:]) for values in zip(*seen, strict=True))
    assert wrong[:7].any(0).all()
    for phase, times in ((sizes[:7], 3), (sizes[7:14], 2), (sizes[14:], 1)):
        assert times * 0.99 < float(phase.max()) <= times * (1 + 1e-5)
    assert not wrong[14:].any()
    assert (model(x_adv).argmax(1) == y).all()
    assert (threat.distance(x_adv, x) <= eps * (1 + 1e-5)).all()


def test_l1_schedule():
    rule = SparseSteps(ThreatModel("l1", 12.0), 100)
    assert [(int(t), len(list(group))) for t, group in itertools.groupby(rule.times)] == [(3, 31), (2, 31), (1, 41)]
    assert SparseSteps(ThreatModel("l1", 12.0), 1).times.tolist() == [1, 1]
    gradient = torch.tensor([[3.0, -2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    step = SparseSteps._sparse(gradient, torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(step, torch.tensor([[0.5, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))


def convnet():
    """A convolutional net with random weights, and images with the labels it gives them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SmallConvNet((1, 8, 8), 10).eval()
        x = torch.rand(80, 1, 8, 8)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.12), ("l2", 0.8)])
def test_breaks_what_foolbox_breaks(norm, eps):
    model, x, y = convnet()
    theirs = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[norm](steps=40)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, _, success = theirs(wrapped, x, y, epsilons=eps)
    threat = ThreatModel(norm, eps)
    mine = broken(model, threat, x, y, APGD(threat, steps=40)(model, x, y))
    targeted = broken(model, threat, x, y, APGD(threat, steps=20, targets=9)(model, x, y))
    assert 10 < int(success.sum()) < 70
    assert int(mine.sum()) >= int(success.sum())
    assert (targeted | ~success).all()


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.12), ("l2", 0.8), ("l1", 3.0)])
def test_is_at_least_as_strong_as_pgd(norm, eps):
    model, x, y = convnet()
    threat = ThreatModel(norm, eps)
    strong = broken(model, threat, x, y, APGD(threat, steps=40)(model, x, y))
    weak = broken(model, threat, x, y, PGD(threat, steps=40)(model, x, y))
    assert 0 < int(strong.sum()) < len(x)
    assert int(strong.sum()) >= int(weak.sum())


@pytest.mark.parametrize("norm", NORMS)
def test_square_needs_no_gradient(norm):
    """A model whose gradient is zero everywhere stops APGD, but not Square."""

    class Masked(nn.Module):
        def forward(self, x):
            score = (x.detach() * 255).round().mean((1, 2, 3)) / 255
            return torch.stack([0.5 - score, score - 0.5], 1) + 0 * x.sum()

    x = torch.full((8, 1, 6, 6), 0.45)
    y = torch.zeros(8, dtype=torch.long)
    threat = ThreatModel(norm, {"linf": 0.1, "l2": 1.0, "l1": 3.6}[norm])
    assert (Masked()(APGD(threat, steps=5)(Masked(), x, y)).argmax(1) == y).float().mean() >= 0.5
    assert broken(Masked(), threat, x, y, Square(threat, queries=300)(Masked(), x, y)).all()


def test_squares_are_squares():
    attack = Square(ThreatModel("linf", 0.1), queries=100)
    x = torch.full((50, 3, 12, 12), 0.5)
    points = Points(x, torch.zeros(50, dtype=torch.long), torch.arange(50), torch.zeros(50, 2))
    rows = attack.init_state(points, PointRNG(0, index=points.index))
    stripes = rows.x_adv - x
    assert torch.equal(stripes, stripes[:, :, :1].expand_as(stripes))
    rows.state["best"], rows.iteration = x, rows.iteration + 30
    changed = (attack._propose(rows) - x).abs() > 0.05
    side = float((attack.share(rows.iteration)[0] * 144).sqrt().round())
    assert (changed.flatten(1).sum(1) == 3 * side**2).all()
    assert (changed.any(1).any(1).sum(1) == side).all()
    assert len({tuple(c.nonzero()[0].tolist()) for c in changed}) > 10  # at many places


def test_the_schedule_of_sizes_is_that_of_ten_thousand_queries_unless_fitted():
    assert float(Square(ThreatModel(), queries=50, horizon=None).share(torch.tensor([49]))) == pytest.approx(0.8 / 512)
    assert float(Square(ThreatModel(), queries=50).share(torch.tensor([49]))) == pytest.approx(0.4)
    # Andriushchenko et al. (2020), appendix B
    for count, last in enumerate((10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)):
        for times in (1, 100):
            first = (last + 1) * times  # the first query with half the area
            share = Square(ThreatModel(), horizon=10_000 * times).share(torch.tensor([first - 1, first]))
            torch.testing.assert_close(share, 0.8 / 2 ** torch.tensor([count, count + 1.0]))


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_bumps_against_their_definition(norm):
    power, order = {"l2": (2, 2), "l1": (4, 1)}[norm]

    def hill(height, width):
        value = torch.zeros(height, width)
        for k, i, j in itertools.product(range(max(height, width) // 2 + 1), range(height), range(width)):
            value[i, j] += (max(abs(i - height // 2), abs(j - width // 2)) <= k) / (k + 1) ** power
        return value / max(1e-9, float(torch.linalg.vector_norm(value, order)))

    for height, width in ((1, 1), (1, 4), (3, 3), (5, 2), (6, 6)):
        both = torch.cat([hill(height // 2, width), -hill(height - height // 2, width)])
        both /= torch.linalg.vector_norm(both, order)
        torch.testing.assert_close(bump(height, width, norm), both)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_mass_moves_between_windows(norm):
    threat = ThreatModel(norm, 2.0, None)
    x, streams = torch.zeros(40, 2, 15, 15), PointRNG(0, index=torch.arange(40))
    start = tiles(threat, x, streams)
    torch.testing.assert_close(threat.distance(start, x), torch.full((40,), 2.0), rtol=1e-5, atol=0)
    assert (start[0] != start[1]).any()
    moved = move_mass(threat, x, start, torch.full((40,), 0.05), streams)  # windows of 3 x 3
    torch.testing.assert_close(threat.distance(moved, x), torch.full((40,), 2.0), rtol=1e-5, atol=0)
    if norm == "l2":  # nothing was left to eps and nothing is clipped: the rest stays where it is
        changed = ((moved - start).abs() > 1e-5).any(1)
        # (But for a window that held just the opposite of its bump: there the mass goes to the whole image.)
        assert int((changed.flatten(1).sum(1) <= 18).sum()) >= 38
        assert len({tuple(c.nonzero()[0].tolist()) for c in changed}) > 10


def test_checkpoints_of_the_paper():
    """Croce & Hein (2020), section 3: p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)."""
    p = [0.0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    assert checkpoints(100) == [round(100 * share) for share in p[1:] if share <= 1]
    assert checkpoints(200) == [round(200 * share) for share in p[1:] if share <= 1]
    assert checkpoints(7) == [1, 2, 3, 4, 5, 6, 7]  # a window has at least one step


def test_targeted_dlr_against_its_formula_and_few_classes():
    g = torch.tensor([[5.0, 3.0, 1.0, 0.0, -1.0]])
    assert float(dlr_targeted(g, torch.tensor([0]), torch.tensor([2]))) == pytest.approx((1 - 5) / (5 - 0.5 * (1 + 0)))
    for few in (torch.tensor([[5.0, 3.0]]), torch.tensor([[5.0, 3.0, 1.0]])):
        assert float(dlr_targeted(few, torch.tensor([0]), torch.tensor([1]))) == -2


@pytest.mark.parametrize("name", ATTACKS)
def test_a_tie_between_classes_is_no_success(name):
    class Tie(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 2) + 0 * x.sum()

    attack, norms = ATTACKS[name]
    _, success = run(attack(ThreatModel(norms[0], 1), steps=3), Tie(), torch.rand(2, 4), torch.tensor([0, 0]), 2)
    assert not success.any()


@pytest.mark.parametrize("name", ATTACKS)
def test_labels_are_checked(name):
    model, x, y = plane()
    attack, norms = ATTACKS[name]
    with pytest.raises(InputError, match="labels: expected classes"):
        attack(ThreatModel(norms[0], 1))(model, x, y + 4)


def test_wrong_arguments_are_refused():
    for build, sentence in (
        (lambda: APGD(ThreatModel(), "kl"), "objective: expected ce, dlr, margin or pm"),
        (lambda: APGD(ThreatModel(), steps=0), "expected at least 1"),
        (lambda: APGD(ThreatModel("l0", 1)), "APGD: expected linf or l2 or l1, got l0"),
        (lambda: FMN(ThreatModel(), steps=0), "steps: expected at least 1, got 0"),
        (lambda: FMN(ThreatModel(), step_size=0.0), "step_size: expected a number > 0, got 0.0"),
        (lambda: PDPGD(ThreatModel("l2", 1)), "PDPGD: expected l1, got l2"),
        (lambda: PDPGD(ThreatModel("l1", 1), steps=0), "steps: expected at least 1, got 0"),
        (lambda: SigmaZero(ThreatModel("l1", 1)), "SigmaZero: expected l0, got l1"),
        (lambda: SigmaZero(ThreatModel("l0", 1), sigma=0.0), "sigma: expected a number > 0, got 0.0"),
        (lambda: APGD(ThreatModel(), restarts=0), "expected at least 1"),
        (lambda: APGD(ThreatModel(), eot=0), "expected at least 1"),
        (lambda: APGD(ThreatModel(), targets=-1), "targets: expected at least 0, got -1"),
        (lambda: APGD(ThreatModel(), "dlr", patience=-1), "patience: expected"),
        (lambda: APGD(ThreatModel(), patience=3), "patience: expected a number >= 0, linf or l2, and dlr or"),
        (lambda: APGD(ThreatModel("l1", 1.0), "dlr", patience=3), "patience: expected"),
        (lambda: FAB(ThreatModel(), targets=-1), "targets: expected at least 0, got -1"),
        (lambda: FAB(ThreatModel(), restarts=0), "expected at least 1"),
        (lambda: Square(ThreatModel(), queries=0), "queries: expected at least 1"),
        (lambda: Square(ThreatModel(), p_init=0.0), "p_init: expected a number in"),
        (lambda: Square(ThreatModel(), horizon=0), "horizon: expected at least 1"),
        (lambda: Square(ThreatModel(), restarts=0), "restarts: expected at least 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            build()
