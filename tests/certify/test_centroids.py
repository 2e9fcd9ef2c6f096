"""Radii of Centroid Nets against brute force, a general solver and attacks."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize

from atoll.certify import NearestCentroid, certifier_for
from atoll.certify.bounds import Bound
from atoll.certify.centroids import OWN
from atoll.certify.evaluate import attack_certified, certify
from atoll.certify.polyhedra import distance_bounds
from atoll.errors import InputError, UnsoundError
from atoll.models import MLP, CentroidNet, EtaLayer
from atoll.runs.recipe import build_recipe
from atoll.runs.train import build_trainer

BOX = (0.0, 1.0)


def net(seed=0, features=2, classes=3, per_class=6, bounds=None, encoder=None):
    """Centroids anywhere in the box; those of different classes lie between each other."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CentroidNet((features,), classes, per_class=per_class, bounds=bounds, encoder=encoder).double()
        model.head.centroids.data.uniform_(0, 1)
    return model


def points(seed, count, features=2):
    return torch.rand(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def nearest_of_another_class(model, x, low, high, side=601):
    """By looking at all points of a fine grid; and the length of its diagonal steps."""
    axis = torch.linspace(low, high, side, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    classes = model(grid).argmax(1)
    distances = [(grid[classes != model(p[None]).argmax()] - p).norm(dim=1).min() for p in x]
    return torch.stack(distances), math.sqrt(2) * float(axis[1] - axis[0])


@pytest.mark.parametrize("bounds", [None, BOX], ids=["plane", "box"])
@pytest.mark.parametrize("seed", [0, 1])
def test_planes_are_below_polyhedra_are_at_the_truth(seed, bounds):
    model, x = net(seed, bounds=bounds), points(seed, 30)
    truth, step = nearest_of_another_class(model, x, *(BOX if bounds else (-1.0, 2.0)))
    single, exact = NearestCentroid.proven(model)(x), NearestCentroid.proven(model, radii=[2.0])(x)
    assert torch.equal(single.prediction, model(x).argmax(1))
    assert (single.radius <= exact.radius).all()
    assert (exact.radius <= truth).all()
    assert (truth - exact.radius).max() < 2 * step  # the grid misses the tip of a wedge
    assert (single.radius < exact.radius - 1e-3).any()  # together, planes do see more
    assert (single.radius > 0).all()


def test_the_box_adds_to_the_radius():
    """Where the nearest point of another class is no valid input."""
    model = net(per_class=1, classes=2, bounds=BOX)
    model.head.centroids.data = torch.tensor([[[0.9, 0.9]], [[1.3, 0.5]]], dtype=torch.float64)
    x = torch.tensor([[0.95, 0.8]], dtype=torch.float64)
    inside = NearestCentroid.proven(model, radii=[1.0])(x).radius
    truth, step = nearest_of_another_class(model, x, *BOX)
    assert float(inside) == pytest.approx(float(truth), abs=step)
    model.bounds = None
    assert NearestCentroid.proven(model, radii=[1.0])(x).radius < inside - 0.01


def test_inputs_that_are_not_valid_are_certified_without_harm():
    model, x = net(bounds=BOX), 3 * points(0, 20) - 1
    truth, _ = nearest_of_another_class(model, x, *BOX)
    certificate = NearestCentroid.proven(model, radii=[3.0])(x)
    assert (certificate.radius <= truth).all()


# A network of each size is captured only once.
SIZES = [(1, 3, OWN), (2, 4, 1), (3, 2, 2 * OWN), (4, 3, 2)]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    boxed=st.booleans(),
)
def test_nothing_changes_within_the_radius(seed, size, scale, boxed):
    model, features = net(seed, *size), size[0]
    model.head.centroids.data *= scale
    model.bounds = (0.0, scale) if boxed else None
    x = scale * points(seed + 1, 3, features)
    certificate = NearestCentroid.proven(model, radii=[scale])(x)
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randn(500, features, generator=draw, dtype=torch.float64)
    direction /= direction.norm(dim=1, keepdim=True)
    for point, radius, prediction in zip(x, certificate.radius, certificate.prediction, strict=True):
        moved = point + min(float(radius), 10 * scale) * direction
        if boxed:  # projection into the box does not lead away from a point inside
            moved = moved.clamp(0, scale)
        assert (model(moved).argmax(1) == prediction).all()


def exact_distance(own, other, margin, low, high):
    """The same convex problem, by a general solver."""
    a = 2 * (own - other)
    constraint = {"type": "ineq", "fun": lambda d: -(a @ d + margin), "jac": lambda d: -a}
    starts = [np.zeros(len(low)), np.clip(-a[0] * margin[0] / (a[0] @ a[0]), low, high)]
    solved = [
        minimize(
            lambda d: d @ d / 2, start, jac=lambda d: d, bounds=list(zip(low, high, strict=True)),
            constraints=[constraint], method="SLSQP", options={"maxiter": 500, "ftol": 1e-14},
        )
        for start in starts
    ]  # fmt: skip
    lengths = [float(np.linalg.norm(s.x)) for s in solved if s.success and (a @ s.x + margin).max() < 1e-7]
    return min(lengths, default=None)


@pytest.mark.parametrize("boxed", [False, True])
def test_bounds_are_below_the_solver_after_any_number_of_steps(boxed):
    draw, solved = np.random.default_rng(0), 0
    z, own, other = draw.random((20, 5)), draw.random((20, 4, 5)), draw.random((20, 3, 5))
    squares = [((z[:, None] - c) ** 2).sum(2) for c in (other, own)]
    margin = squares[0][:, :, None] - squares[1][:, None]
    low, high = (-z, 1 - z) if boxed else (np.full((20, 5), -50.0), np.full((20, 5), 50.0))
    tensors = [torch.tensor(v) for v in (own, other, margin, low, high)]
    goal = torch.full((20, 3), 9.0).double()
    bounds = {steps: distance_bounds(*tensors, goal, steps=steps) for steps in (1, 7, 50, 1000)}
    for i in range(20):
        for j in range(3):
            truth = exact_distance(own[i], other[i, j], margin[i, j], low[i], high[i])
            if truth is not None:
                solved += 1
                assert all(float(bound[i, j]) <= truth + 1e-8 for bound in bounds.values())
                assert float(bounds[1000][i, j]) == pytest.approx(truth, rel=1e-3, abs=1e-6)
    assert solved > 40


def test_an_encoder_divides_by_its_constant():
    """A crooked one, against the grid; and one that only stretches, where the radius is known."""

    def encoder(shape, classes):
        return MLP(shape, classes, hidden=(8, 6), activation="minmax", bounds=None)

    model = net(1, encoder=encoder)
    for layer in model.body:
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data *= 3
    x = points(0, 20)
    model.head.centroids.data = model.features(points(3, 18)).detach().view(3, 6, 6)
    truth, step = nearest_of_another_class(model, x, -1.0, 2.0)
    for radii in ((), (1.0,)):
        certificate = NearestCentroid.proven(model, radii=radii)(x)
        assert (certificate.radius <= truth).all()
        assert certificate.radius.max() > 3 * step
    wide = CentroidNet((2,), 2, per_class=1, input_range="[-1,1]", bounds=None).double()  # 2 x - 1
    wide.head.centroids.data = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]]).double()
    assert float(NearestCentroid.proven(wide)(torch.tensor([[0.5, 0.3]])).radius) == pytest.approx(0.5)


def test_rounding_is_paid_for():
    model, x = net(), points(0, 30)
    truth = NearestCentroid.proven(model)(x).radius
    single = NearestCentroid.proven(model.float())(x.float()).radius
    assert (single < truth).all()
    assert (single > truth - 1e-2).all()


def test_a_tie_is_no_certificate():
    model = net(per_class=2)
    model.head.centroids.data[1] = model.head.centroids.data[0]
    x = points(0, 50)
    certificate = NearestCentroid.proven(model, radii=[0.5])(x)
    assert (certificate.radius[certificate.prediction < 2] == 0).all()
    assert (certificate.radius[certificate.prediction == 2] > 0).any()


distances = st.floats(0, 10)


@given(d=st.lists(distances, min_size=2, max_size=5), eta=st.floats(0, 1))
def test_theorem_7(d, eta):
    """Accepted iff d2 - d1 >= eta (d1 + d2)."""
    logits = EtaLayer(eta)(-torch.tensor([d], dtype=torch.float64))[0]
    first, second = sorted(d)[:2]
    gap = second - first - eta * (first + second)
    if abs(gap) > 1e-9:
        assert (gap > 0) == bool(logits[-1] < logits[:-1].max())


@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_guarantees_of_the_eta_layer(eta):
    model = net(per_class=2, classes=2)
    model.bounds = (-0.5, 1.5)
    certifier = NearestCentroid.proven(model, eta=eta)
    axis = torch.linspace(-0.5, 1.5, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    certificate = certifier(grid)
    accepted = certificate.radius > 0
    assert 0.02 < accepted.double().mean() < 0.98
    assert torch.equal(accepted, EtaLayer(eta)(model(grid)).argmax(1) < 2)
    one, two = (grid[accepted & (certificate.prediction == j)] for j in (0, 1))
    assert float(torch.cdist(one, two).min()) >= certifier.global_radius > 0
    assert (certificate.radius[accepted] >= certifier.local_radius * (1 - 1e-6)).all()
    far = 100 * (grid - 0.5)
    outside = far.norm(dim=1) > 50
    assert (certifier(far).radius[outside] == 0).all()  # the accepted region is closed
    assert (NearestCentroid.proven(model)(far).radius[outside] > 0).any()  # without the layer it is not


@pytest.fixture(scope="module")
def digits():
    trainer = build_trainer(build_recipe("digits-centroid", "model.per_class=20", "trainer.epochs=4"))
    trainer.fit()
    return trainer.model.eval(), trainer.data.split("test").take(torch.arange(100))


def test_no_certificate_breaks_and_a_wrong_radius_is_detected(digits):
    model, split = digits
    certifier = certifier_for(copy.deepcopy(model).double(), radii=[0.5])
    certification = certify(certifier, split)
    assert certification.clean.value > 0.9
    assert certification.verified(0.5).value > 0.5
    attack_certified(model, certifier, split, certification, bounds=BOX, points=20, batch_size=10)

    def wrong(x):
        honest = certifier(x)
        return type(honest)(honest.prediction, 2 * honest.radius)

    with pytest.raises(UnsoundError, match="a certificate is false"):
        attack_certified(model, wrong, split, certify(wrong, split), bounds=BOX, points=40)


def test_nonsense_is_one_sentence():
    with pytest.raises(InputError, match=r"eta: expected a number in \[0, 1\], got 2"):
        EtaLayer(2)
    with pytest.raises(InputError, match="per_class: expected at least 1"):
        CentroidNet((2,), 2, per_class=0)


# --- rounding errors


def worst_encoder(bound, sign):
    """A feature that falls as fast as the bound allows, with the largest error of computing it."""
    return lambda x: bound.lipschitz * x + sign * (bound.relative * abs(x) + bound.absolute)


@pytest.mark.parametrize("relative", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("absolute", [0.0, 0.05])
def test_the_radius_is_right_up_to_the_worst_rounding_of_an_encoder(relative, absolute):
    """Errors much larger than those of a computer: the certificate holds, and is exact on the line away from zero."""
    model = net(features=1, classes=2, per_class=1)
    model.head.centroids.data = torch.tensor([[[0.0]], [[-12.0]]], dtype=torch.float64)
    bound = Bound(2.0, 0.0, relative, absolute)

    def computed(sign):
        def run(x):
            z = worst_encoder(bound, sign)(x)
            return z, model.head(z)

        return run

    certifier = NearestCentroid(model.head, bound, computed(+1), model=model)  # too far from the other class here
    neighbor = worst_encoder(bound, -1)  # and too close to it here
    for x in (-0.5, -1.0, -1.5):
        certificate = certifier(torch.tensor([[x]], dtype=torch.float64))
        assert certificate.prediction == 0
        nearest = brentq(lambda r, x=x: neighbor(x - r) + 6, 0, 100)
        assert float(certificate.radius) == pytest.approx(nearest, rel=1e-9)


def test_centroids_that_are_almost_equal():
    """Their distance cancels in float64, but the distance to the plane between them is known."""
    model = net(features=2, classes=2, per_class=1)
    for gap in (1e-7, 1e-9, 3e-11):
        model.head.centroids.data = torch.tensor([[[1.0, 0.0]], [[1.0, gap]]], dtype=torch.float64)
        certificate = NearestCentroid.proven(model)(torch.tensor([[1.0, -1.0]], dtype=torch.float64))
        assert certificate.prediction == 0
        assert 0 < float(certificate.radius) <= 1 + gap / 2


def test_inputs_that_may_overflow_have_no_certificate():
    """In float64, squares overflow beyond 1.3e154; a radius ends well before."""
    model = net(features=1, classes=2, per_class=1)
    model.head.centroids.data = torch.tensor([[[0.0]], [[1e150]]], dtype=torch.float64)
    certifier = NearestCentroid.proven(model)
    x = torch.tensor([[-1e100], [-1e153], [-1.6e153], [-3e153], [-9e153], [-2e154]], dtype=torch.float64)
    radius = certifier(x).radius
    assert (radius[:3] > 0).all()
    assert (radius[3:] == 0).all()
    assert model(x - 1.01 * radius[:, None]).isfinite()[:3].all()
    assert float((x.abs().squeeze(1) + radius)[:3].max()) < 1.7e153


@pytest.mark.parametrize("eta", [0.05, 0.5])
def test_margins_of_the_eta_layer_are_right_up_to_the_worst_rounding(eta, monkeypatch):
    """The smallest difference of two distances that is accepted, and the largest that is a tie, by trying them all.

    Errors of squared distances are much larger than those of a computer.
    """
    certifier = NearestCentroid.proven(net(bounds=BOX), eta=eta)
    smallest = certifier.separation
    one, more = torch.meshgrid(*[torch.linspace(0, 1, 1001, dtype=torch.float64) * smallest] * 2, indexing="ij")
    for share in (0.0, 0.01):
        error = share * eta * smallest**2
        monkeypatch.setattr(certifier, "_square_error", lambda size, error=error: error)
        margin, tie, _ = certifier._margin()
        two = one + more  # the distance of the other class
        possible = one + two >= smallest  # by the triangle inequality
        ratio = (1 + eta) / (1 - eta)
        accepted = possible & ((two.square() + error).sqrt() >= ratio * (one.square() - error).clamp_min(0).sqrt())
        equal = possible & (two.square() - error <= one.square() + error)
        assert margin <= float(more[accepted].min()) <= margin + 0.005 * smallest
        assert float(more[equal].max()) <= tie <= float(more[equal].max()) + 0.005 * smallest
    certifier = certifier.with_eta(1.0)
    assert certifier.global_radius == certifier.local_radius == 0


@pytest.mark.parametrize("stretch", [0.0, 0.3])
def test_errors_of_squared_distances_are_those_of_the_textbook(stretch):
    """Five times that of a sum of n squares of numbers as large as both vectors, and the error of the stretch."""
    model = CentroidNet((1000,), 2, per_class=1, stretch=stretch)
    model.head.centroids.data = torch.stack([torch.full((1, 1000), 0.01), torch.full((1, 1000), -0.1)])
    certifier = NearestCentroid.proven(model)
    largest, unit, root = 0.1 * 1000**0.5, 2.0**-24, 1000**0.5
    for size in (0.3, 3.0, 10.0):
        stretched = min(size / (1 - 2 * stretch), root) if stretch else size  # numbers in [0, 1]
        squares = 5 * 1000 * unit * (stretched + largest) ** 2
        moved = 4 * largest * 8 * unit * root / (1 - 2 * stretch) if stretch else 0.0  # by rounding of the stretch
        assert squares + moved <= certifier._square_error(size) <= 1.03 * (squares + moved)


@pytest.mark.parametrize(("eta", "absolute"), [(0.2, 0.0), (0.2, 1e-3), (0.6, 1e-3)])
def test_radii_of_the_eta_layer_divide_by_the_encoder(eta, absolute):
    """Theorems 8 and 9 in float64, where only the given error of the encoder matters."""
    model = net(bounds=BOX)
    certifier = NearestCentroid(model.head, Bound(3.0, 0.0, 0.5, absolute), model, model=model, bounds=BOX, eta=eta)
    certifier.input_size = 4  # valid inputs have a norm of at most 2
    error = 0.5 * 2 + absolute
    for radius, differences in ((certifier.global_radius, 2), (certifier.local_radius, 4)):
        separation = eta * certifier.separation
        expected = (separation / (differences / 2) - 2 * error) / (3.0 + 0.5)
        assert radius == pytest.approx(max(0.0, expected), rel=1e-6)


def test_no_certificate_is_false_next_to_a_plane_in_float32():
    """Far from the origin, where rounding takes the wrong one of two centroids and thereby decides the class."""
    model = CentroidNet((2,), 2, per_class=2, bounds=None)
    places = torch.tensor([[[40.0, 0.7], [40.01, 0.7]], [[60.0, 0.7], [100.0, 0.7]]], dtype=torch.float64)
    model.head.centroids.data = (places + 1000).float()
    steps = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    line = torch.cat([1050.005 + 15 * steps, 1050.005 + 0.02 * steps]).float().unique()
    x, place = torch.stack([line, torch.full_like(line, 1000.7)], 1), line.double()
    certificate, prediction = NearestCentroid.proven(model)(x), model(x).argmax(1)
    assert torch.equal(certificate.prediction, prediction)
    assert prediction.diff().abs().sum() > 2  # there is more than one change of class on the line
    others = torch.stack([(place[:, None] - place[prediction != j]).abs().amin(1) for j in (0, 1)], 1)
    distance = others.gather(1, prediction[:, None]).squeeze(1)
    assert (certificate.radius <= distance).all()
    assert (certificate.radius > 0.9 * (distance - 5).clamp_min(0)).sum() > 500
