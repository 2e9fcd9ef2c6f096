"""Distances of stretched inputs to planes, against brute force, and certificates that rest on them."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify import NearestCentroid
from atoll.certify.power import LipschitzEstimator
from atoll.certify.prototype_attack import PrototypeAttack
from atoll.data.base import to_float
from atoll.errors import InputError
from atoll.models import CentroidNet, LiResNet
from atoll.models.stretch import UNIT, Stretch, minimal_moves, multiplier, stretch_distance
from atoll.runs.recipe import build_recipe
from atoll.runs.train import build_trainer
from atoll.threat import ThreatModel

T = 0.15
SPREAD = 0.14  # of learned thresholds around T


def learned(features, seed=0):
    """Different thresholds for every pixel, as if learned."""
    stretch, draw = Stretch(T, pixels=features).double(), torch.Generator().manual_seed(seed)
    noise = 2 * torch.rand(2, features, generator=draw, dtype=torch.float64) - 1
    stretch.thresholds.data += SPREAD / UNIT * noise
    return stretch


def stretches(features):
    return {"fixed": Stretch(T), "learned": learned(features)}


def net(seed=0, features=2, classes=3, per_class=6, kind="fixed"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CentroidNet(
            (features,), classes, per_class=per_class, stretch=T, learn_stretch=kind == "learned"
        ).double()
        model.head.centroids.data.uniform_(0, 1)
    if kind == "learned":
        model.head.stretch.load_state_dict(learned(features, seed).state_dict())
    return model


def points(seed, count, features=2):
    """Most coordinates are almost black or white, like pixels."""
    draw = torch.rand(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (1.5 * draw - 0.25).clamp(0, 1)


@settings(max_examples=60)
@torch.no_grad()
@given(x=st.floats(0, 1), v=st.floats(-3, 3), black=st.floats(0, 0.43), white=st.floats(0, 0.43))
def test_the_cheapest_move_is_the_best_of_all(x, v, black, white):
    stretch, x = Stretch(0.0, pixels=1).double(), torch.tensor([x], dtype=torch.float64)
    stretch.thresholds.data = torch.tensor([[black], [white]], dtype=torch.float64) / UNIT
    moves = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    best = float((moves**2 / 2 + v * (stretch(x + moves) - stretch(x))).min())
    move, change = minimal_moves(torch.full_like(x, v), *stretch.slope(x), stretch.gain)
    objective = float(move**2 / 2 + v * change)
    assert torch.allclose(change, stretch(x + move) - stretch(x), atol=1e-12)
    assert objective <= best + 1e-12
    assert objective == pytest.approx(best, abs=2e-3)  # the grid's


def test_nothing_stretched_is_the_distance_in_the_box():
    x, p, c = points(0, 20, 5), points(1, 20, 5), points(2, 20, 5)
    a, margin = 2 * (p - c), (x - c).square().sum(1) - (x - p).square().sum(1)
    distance = stretch_distance(x, p, c, Stretch(0.0))
    inside = (x - margin[:, None] * a / a.square().sum(1, keepdim=True) - 0.5).abs().amax(1) <= 0.5
    plane = margin / a.norm(dim=1)
    assert inside.sum() > 3
    assert torch.allclose(distance[inside], plane[inside], rtol=1e-5)
    assert (distance >= plane - 1e-9).all()


@pytest.mark.parametrize("kind", ["fixed", "learned"])
@torch.no_grad()
def test_stretch_distances_are_those_of_a_fine_grid(kind):
    """In two dimensions the dual may stay below; it never is above, and mostly there."""
    stretch, axis = stretches(2)[kind], torch.linspace(0, 1, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    x, p, c = points(0, 60), points(1, 60), points(2, 60)
    distance, hits = stretch_distance(x, p, c, stretch), 0
    for each, start, own, other in zip(distance, x, p, c, strict=True):
        across = (stretch(grid) - other).norm(dim=1) <= (stretch(grid) - own).norm(dim=1)
        if float(each) > 0 and across.any():
            truth = float((grid[across] - start).norm(dim=1).min())
            assert float(each) <= truth + 1e-9
            hits += float(each) > truth - 0.02
    assert hits > 12


@pytest.mark.parametrize("kind", ["fixed", "learned"])
@torch.no_grad()
def test_in_many_dimensions_little_is_lost(kind):
    """The moves of the next multiplier do cross, and are hardly longer."""
    stretch, (x, p, c) = stretches(200)[kind], (points(seed, 200, 200) for seed in range(3))
    p = (0.7 * x + 0.3 * p).clamp(0, 1)
    a, u, gain = 2 * (p - c), stretch(x), stretch.gain
    margin = (u - c).square().sum(1) - (u - p).square().sum(1)
    low, high = stretch.slope(x)
    best = multiplier(a, margin, low, high, gain, steps=50)
    moved = x + minimal_moves(1.0001 * best[:, None] * a, low, high, gain)[0]
    across = (stretch(moved) - c).norm(dim=1) <= (stretch(moved) - p).norm(dim=1)
    ratio = stretch_distance(x, p, c, stretch) / (moved - x).norm(dim=1)
    assert across.double().mean() > 0.95
    assert (ratio[across] <= 1 + 1e-6).all()
    assert ratio[across].min() > 0.97


def test_next_to_the_plane_the_multiplier_is_still_the_best_one():
    """A black pixel: the plane is at 1e-4 after stretching, so little is missing, but the way to the slope is t."""
    stretch, x, p, c = Stretch(T), *(torch.tensor([[v]], dtype=torch.float64) for v in (0.0, -1.0, 1.0002))
    a, margin, (low, high) = 2 * (p - c), c[:, 0] ** 2 - p[:, 0] ** 2, stretch.slope(x)
    grid = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    move, change = minimal_moves(grid[:, None] * a, low, high, stretch.gain)
    q = grid * margin + (move.square() / 2 + grid[:, None] * a * change)[:, 0]
    torch.testing.assert_close(stretch_distance(x, p, c, stretch), (2 * q.max()).sqrt()[None], rtol=1e-3, atol=0)


@pytest.mark.parametrize("part", ["p", "c", "thresholds"])
def test_the_gradient_is_that_of_differences(part):
    (x, p, c), draw = (points(seed, 40, 30) for seed in range(3)), torch.Generator().manual_seed(0)
    stretch, p, c = learned(30), torch.nn.Parameter(0.6 * x + 0.4 * p), torch.nn.Parameter(c)
    value = {"p": p, "c": c, "thresholds": stretch.thresholds}[part]
    distance = stretch_distance(x, p, c, stretch)
    step = 1e-6 * torch.randn(value.shape, generator=draw, dtype=torch.float64)
    gradients = [torch.autograd.grad(each, value, retain_graph=True)[0] for each in distance]
    expected = torch.stack([(gradient * step).sum() for gradient in gradients])
    value.data += step
    moved = stretch_distance(x, p, c, stretch)
    # A pixel that only just is worth moving makes a kink.
    close = ((moved - distance - expected).abs() < 0.02 * expected.abs() + 1e-9).double().mean()
    assert close > 0.9


QUICK = [(0, "fixed", torch.float32), (0, "learned", torch.float64)]
GRIDS = list(itertools.product(range(3), ("fixed", "learned"), (torch.float32, torch.float64)))


@pytest.mark.parametrize(
    ("seed", "kind", "dtype"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRIDS if case not in QUICK)],
)
def test_certificates_hold_on_a_grid(seed, kind, dtype):
    model, x = net(seed, kind=kind).to(dtype), points(seed, 30).to(dtype)
    axis = torch.linspace(0, 1, 801, dtype=dtype)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        classes = model(grid).argmax(1)
        truth = torch.stack([(grid[classes != model(p[None]).argmax()] - p).norm(dim=1).min() for p in x])
    first, close = NearestCentroid.proven(model)(x), NearestCentroid.proven(model, radii=[2.0])(x)
    assert (first.radius <= close.radius).all()
    assert (close.radius <= truth).all()
    assert (close.radius > 0.5 * truth).double().mean() > 0.5


@pytest.mark.parametrize("options", [{"t": 0.5}, {"t": -0.1}])
def test_nonsense_is_one_sentence(options):
    with pytest.raises(InputError, match="stretch: expected a number in"):
        Stretch(**options)


def test_training_moves_the_thresholds_and_certificates_stand():
    overrides = ("model.per_class=10", "model.stretch=0.1", "model.learn_stretch=true", "trainer.epochs=2")
    trainer = build_trainer(build_recipe("digits-centroid", *overrides, "data.limit=400"))
    trainer.fit()
    model, split = trainer.model.eval(), trainer.data.split("test")
    moved = (UNIT * model.head.stretch.thresholds.detach() - 0.1).abs()
    assert (moved > 1e-3).double().mean() > 0.5
    x, y = to_float(split.fetch(torch.arange(100))), split.labels[:100]
    certifier = NearestCentroid.proven(copy.deepcopy(model).double(), radii=[0.5])
    radius = certifier(x).radius
    assert (radius > 0.5).double().mean() > 0.3
    for factor, least, most in ((1.0, 0, 0), (1.3, 5, 20)):
        attacks = (PrototypeAttack(ThreatModel("l2", float(factor * r), (0.0, 1.0))) for r in radius[:20])
        moves = [attack(model, x[i : i + 1], y[i : i + 1]) for i, attack in enumerate(attacks)]
        with torch.no_grad():
            changed = model(torch.cat(moves)).argmax(1) != model(x[:20]).argmax(1)
        assert least <= int(changed.sum()) <= most


def test_the_constant_of_training_follows_the_thresholds():
    model = net(kind="learned").float()
    estimator = LipschitzEstimator(model)
    model.head.stretch.thresholds.data.fill_(0.25 / UNIT)
    assert float(estimator()[0][0, 1].detach()) == pytest.approx(2 / (1 - 2 * 0.25))


def test_thresholds_stay_apart():
    stretch = Stretch(T, pixels=2)
    stretch.thresholds.data = torch.tensor([[-5.0, 99.0], [99.0, -5.0]])
    low, high = stretch.ends
    assert low.tolist() == [0.0, 7 / 16]
    assert high.tolist() == [9 / 16, 1.0]
    assert stretch.lipschitz == pytest.approx(16 / 9)


def test_thresholds_need_a_start():
    with pytest.raises(InputError, match="learn_stretch: expected stretch > 0, got 0"):
        CentroidNet((2,), 10, learn_stretch=True)


def test_an_encoder_takes_no_stretched_inputs():
    with pytest.raises(InputError, match="stretch: expected a net without an encoder"):
        CentroidNet((1, 8, 8), 10, encoder=LiResNet, stretch=0.1)
    with pytest.raises(InputError, match="stretch: expected a net without an encoder"):
        CentroidNet((2,), 10, stretch=0.1, bounds=None)
