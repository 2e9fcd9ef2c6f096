"""Distances of stretched inputs to planes, against brute force, and certificates that rest on them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify import NearestCentroid
from atoll.errors import InputError
from atoll.models import CentroidNet, LiResNet
from atoll.models.stretch import Stretch, minimal_moves, multiplier, stretch_distance

T = 0.15


def net(seed=0, features=2, classes=3, per_class=6):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CentroidNet((features,), classes, per_class=per_class, stretch=T).double()
        model.head.centroids.data.uniform_(0, 1)
    return model


def points(seed, count, features=2):
    """Most coordinates are almost black or white, like pixels."""
    draw = torch.rand(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (1.5 * draw - 0.25).clamp(0, 1)


@settings(max_examples=60)
@given(x=st.floats(0, 1), v=st.floats(-3, 3), t=st.floats(0, 0.45))
def test_the_cheapest_move_is_the_best_of_all(x, v, t):
    stretch, x = Stretch(t), torch.tensor([x], dtype=torch.float64)
    moves = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    best = float((moves**2 / 2 + v * (stretch(x + moves) - stretch(x))).min())
    move, change = minimal_moves(torch.full_like(x, v), *stretch.slope(x), stretch.lipschitz)
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


def test_stretch_distances_are_those_of_a_fine_grid():
    """In two dimensions the dual may stay below; it never is above, and mostly there."""
    stretch, axis = Stretch(T), torch.linspace(0, 1, 801, dtype=torch.float64)
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


def test_in_many_dimensions_little_is_lost():
    """The moves of the next multiplier do cross, and are hardly longer."""
    stretch, (x, p, c) = Stretch(T), (points(seed, 200, 200) for seed in range(3))
    p = (0.7 * x + 0.3 * p).clamp(0, 1)
    a, u, gain = 2 * (p - c), stretch(x), stretch.lipschitz
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
    move, change = minimal_moves(grid[:, None] * a, low, high, stretch.lipschitz)
    q = grid * margin + (move.square() / 2 + grid[:, None] * a * change)[:, 0]
    torch.testing.assert_close(stretch_distance(x, p, c, stretch), (2 * q.max()).sqrt()[None], rtol=1e-3, atol=0)


def test_the_gradient_is_that_of_differences():
    stretch, (x, p, c) = Stretch(T), (points(seed, 40, 30) for seed in range(3))
    p, c = (0.6 * x + 0.4 * p).requires_grad_(), c.requires_grad_()
    distance = stretch_distance(x, p, c, stretch)
    gradients = torch.autograd.grad(distance.sum(), (p, c))
    step = 1e-6 * torch.randn(2, *p.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = stretch_distance(x, (p + step[0]).detach(), (c + step[1]).detach(), stretch)
    expected = sum((g * s).sum(1) for g, s in zip(gradients, step, strict=True))
    # A pixel that only just is worth moving makes a kink.
    close = ((moved - distance - expected).abs() < 0.02 * expected.abs() + 1e-9).double().mean()
    assert close > 0.9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_certificates_hold_on_a_grid(seed):
    model, x = net(seed), points(seed, 30)
    axis = torch.linspace(0, 1, 801, dtype=torch.float64)
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


def test_an_encoder_takes_no_stretched_inputs():
    with pytest.raises(InputError, match="stretch: expected a net without an encoder"):
        CentroidNet((1, 8, 8), 10, encoder=LiResNet, stretch=0.1)
    with pytest.raises(InputError, match="stretch: expected a net without an encoder"):
        CentroidNet((2,), 10, stretch=0.1, bounds=None)
