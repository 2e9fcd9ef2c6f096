"""The threat model against brute force and a general solver."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, dot, number

NORMS = ["linf", "l2", "l1"]
BOUNDS = [(0.0, 1.0), None]
cases = st.tuples(
    st.sampled_from(NORMS),
    st.sampled_from(BOUNDS),
    st.one_of(st.just(0.0), st.floats(1e-4, 3.0)),
    st.integers(1, 12),
    st.integers(0, 10**6),
)


def points(size: int, seed: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(3, size, generator=draw, dtype=dtype)
    x[0] = x[0].round()  # a point in a corner of the box
    return x, x + torch.randn(3, size, generator=draw, dtype=dtype)


def inside(threat, x_adv, x):
    assert (threat.distance(x_adv.double(), x.double()) <= threat.radius * (1 + 1e-5) + 1e-7).all()
    if threat.bounds:
        assert x_adv.min() >= threat.bounds[0]
        assert x_adv.max() <= threat.bounds[1]


@settings(deadline=None, max_examples=200)
@given(case=cases)
def test_projection_and_start_stay_inside(case):
    norm, bounds, eps, size, seed = case
    threat = ThreatModel(norm, eps, bounds)
    x, far = points(size, seed)
    inside(threat, threat.project(far, x), x)
    inside(threat, threat.random_start(x, PointRNG(seed, index=torch.arange(3))), x)
    # A point that is inside already stays where it is.
    near = threat.project(far, x)
    torch.testing.assert_close(threat.project(near, x), near, atol=1e-5, rtol=1e-5)


# Without ("l2", (0, 1)): ball then box is not the exact projection onto the intersection, and does not claim to be.
@pytest.mark.parametrize(
    ("norm", "bounds"),
    [("linf", (0.0, 1.0)), ("linf", None), ("l2", None), ("l1", (0.0, 1.0)), ("l1", (-0.5, 1.0)), ("l1", None)],
)
def test_projection_is_the_closest_point(norm, bounds):
    """Against a general solver."""
    size = 4
    for seed in range(10):
        x, far = points(size, seed, torch.float64)
        threat = ThreatModel(norm, 0.6, bounds)
        mine = threat.project(far.clone(), x)
        for row in range(3):
            a, b = x[row].numpy(), far[row].numpy()
            # Split the perturbation into its positive and negative parts: then all three balls are smooth.
            low, high = (0 - a, 1 - a) if bounds else ([-math.inf] * size, [math.inf] * size)
            box = [(0, max(0, h)) for h in high] + [(0, max(0, -lo)) for lo in low]
            ball = {
                "linf": lambda d: 0.6 - d.max(),
                "l2": lambda d: 0.36 - ((d[:size] - d[size:]) ** 2).sum(),
                "l1": lambda d: 0.6 - d.sum(),
            }[norm]
            if norm == "linf":
                box = [(lo, min(hi, 0.6)) for lo, hi in box]
            optimum = minimize(
                lambda d: ((d[:size] - d[size:] + a - b) ** 2).sum(),  # noqa: B023
                [0.01] * (2 * size),
                bounds=box,
                constraints=[{"type": "ineq", "fun": ball}],
                method="SLSQP",
                options={"ftol": 1e-12, "maxiter": 500},
            )
            assert float((mine[row] - far[row]).square().sum()) <= optimum.fun + 1e-5


@pytest.mark.parametrize("norm", NORMS)
def test_steepest_is_the_solution_of_the_linear_program(norm):
    gradient = torch.tensor([[3.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    step = ThreatModel(norm, 1.0).steepest(gradient, sparsity=0.99)
    assert step[1].abs().sum() == 0
    if norm == "l1":
        best = -linprog([-3, 1, -0.5, 3, -1, 0.5], A_ub=[[1] * 6], b_ub=[1]).fun
    else:
        best = {"linf": 4.5, "l2": gradient[0].norm().item()}[norm]
    assert float((gradient[0] * step[0]).sum()) == pytest.approx(best)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_way_to_a_hyperplane_is_the_shortest(norm, bounds):
    """Against a linear program (linf, l1) and a general solver (l2), with and without bounds."""
    draw = torch.Generator().manual_seed(0)
    size, threat = 5, ThreatModel(norm, 1.0, bounds)
    for _ in range(20):
        x = torch.rand(size, generator=draw, dtype=torch.float64)
        w = torch.randn(size, generator=draw, dtype=torch.float64)
        rise = torch.randn(1, generator=draw, dtype=torch.float64) * 0.5
        d = threat.to_hyperplane(x[None], w[None], rise)[0]
        if bounds:
            assert (x + d).min() >= -1e-12
            assert (x + d).max() <= 1 + 1e-12
        low, high = ((-x).tolist(), (1 - x).tolist()) if bounds else ([None] * size, [None] * size)
        if norm == "l2":
            optimum = minimize(
                lambda v: (v**2).sum(),
                [0.0] * size,
                bounds=list(zip(low, high, strict=True)),
                constraints=[{"type": "eq", "fun": lambda v, w=w, rise=rise: w.numpy() @ v - rise.item()}],
                method="SLSQP",
                options={"ftol": 1e-12, "maxiter": 500},
            )
            best = optimum.fun**0.5
        else:  # variables: d, and one bound t (linf) or one per coordinate (l1) with |d_i| <= t
            bounding = 1 if norm == "linf" else size
            spread = torch.ones(size, 1) if norm == "linf" else torch.eye(size)
            above = torch.cat([torch.eye(size), -spread], 1).numpy()
            below = torch.cat([-torch.eye(size), -spread], 1).numpy()
            optimum = linprog(
                [0.0] * size + [1.0] * bounding,
                A_ub=[*above, *below],
                b_ub=[0.0] * (2 * size),
                A_eq=[[*w.tolist(), *[0.0] * bounding]],
                b_eq=[rise.item()],
                bounds=[*zip(low, high, strict=True), *[(0, None)] * bounding],
            )
            best = optimum.fun
        far = torch.where(w * rise > 0, 1 - x, -x)
        if bounds and abs(float(w @ far)) < abs(rise.item()):  # the bounds do not allow it: as far as they do
            torch.testing.assert_close(d, far)
            continue
        assert float(w @ d) == pytest.approx(rise.item(), abs=1e-9)
        assert float(threat.distance(d[None], torch.zeros(1, size))) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_random_start_fills_the_ball_uniformly(norm):
    """In d dimensions the share of points within half the radius is 2^-d."""
    threat = ThreatModel(norm, 0.1, None)
    x = torch.zeros(40_000, 3)
    start = threat.random_start(x, PointRNG(0, index=torch.arange(len(x))))
    share = (threat.distance(start, x) <= 0.05).float().mean()
    assert float(share) == pytest.approx(1 / 8, abs=4 * (1 / 8 * 7 / 8 / len(x)) ** 0.5)
    assert start.mean(0).abs().max() < 0.002
    # The share of points whose first coordinate exceeds half the radius, by the volumes of caps.
    cap = {"linf": 0.5, "l2": 0.3125, "l1": 0.125}[norm]
    share = (start[:, 0].abs() > 0.05).float().mean()
    assert float(share) == pytest.approx(cap, abs=4 * (cap * (1 - cap) / len(x)) ** 0.5)


class LargestDraws(PointRNG):
    """The largest number for each of 100 points, which chance hardly ever draws."""

    def uniform(self, *shape, dtype=torch.float32):
        return torch.ones(100, *shape, dtype=dtype).nextafter(torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_farthest_start_is_in_the_ball(norm):
    threat, x = ThreatModel(norm, 0.1, None), torch.zeros(100, 3, dtype=torch.float64)
    start = threat.random_start(x, LargestDraws(0, index=torch.arange(100)))
    assert (threat.distance(start, x) <= 0.1).all()
    assert (threat.distance(start, x) > 0.1 - 1e-6).all()


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_projections_do_not_round_out_of_the_ball(norm):
    x, far = points(6, 0, torch.float64)
    threat = ThreatModel(norm, 0.6, None)
    assert (threat.distance(threat.project(far, x), x) <= 0.6).all()


@pytest.mark.parametrize(
    ("moved", "inside"),
    [
        ([[0.5, 0.5]], True),
        ([[0.6, 0.4]], True),
        ([[0.6 + 2e-6, 0.5]], False),  # only the ball
        ([[0.6, 0.38]], False),
    ],
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_what_is_inside_the_ball(moved, inside, repeats):
    x = torch.full((repeats, 2), 0.5, dtype=torch.float64)
    x_adv = torch.tensor(moved, dtype=torch.float64).repeat(repeats, 1)
    threat = ThreatModel("linf", 0.1)
    assert threat.contains(x_adv, x).tolist() == [inside] * repeats
    x_adv[0] = x[0]
    assert threat.contains(x_adv, x).tolist() == [True] + [inside] * (repeats - 1)


def test_the_bounds_are_part_of_the_threat():
    """The ball alone, the lower and the upper bound alone, and both ends of the bounds, which are inside."""
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.05, 0.95]])
    x_adv = torch.tensor([[-1e-3, 1.0], [0.0, 1.001], [0.05, 0.95], [0.0, 1.0]])
    assert ThreatModel("linf", 0.1).contains(x_adv, x).tolist() == [False, False, True, True]
    assert ThreatModel("linf", 0.1, None).contains(x_adv, x).tolist() == [True] * 4
    assert ThreatModel("l2", 0.1, (-1.0, 2.0)).contains(x_adv, x).tolist() == [True] * 4
    edge = torch.tensor([[1e-7]], dtype=torch.float64)  # what rounding may add to a radius of 0
    assert ThreatModel("linf", 0.0).contains(edge, 0 * edge).tolist() == [True]


def test_dot_products_of_images():
    a, b = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    torch.testing.assert_close(dot(a, b), torch.einsum("bchw,bchw->b", a, b))


def test_steepest_steps_by_hand():
    gradient = torch.tensor([[0.4, -0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0]])
    steps = {
        ("l1", 0.5): [0.5, -0.5, 0.0, 0.0],
        ("l1", 0.25): [1 / 3, -1 / 3, 1 / 3, 0.0],
        ("l1", 0.99): [1.0, 0.0, 0.0, 0.0],
        ("l2", 0.5): [0.4 / 0.3**0.5, -(0.3**0.5), 0.2 / 0.3**0.5, 0.1 / 0.3**0.5],
        ("linf", 0.5): [1.0, -1.0, 1.0, 1.0],
    }
    for (norm, sparsity), step in steps.items():
        result = ThreatModel(norm, 1.0).steepest(gradient, sparsity)
        torch.testing.assert_close(result, torch.tensor([step, [0.0] * 4]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_way_to_a_hyperplane_does_not_depend_on_other_points(norm, bounds):
    """Rows that need no change, cannot reach it, or have coordinates that do not matter, beside ordinary ones."""
    x, w, rise = torch.rand(9, 2, 3), torch.randn(9, 2, 3), torch.randn(9) * 0.5
    rise[2], rise[5] = 0.0, 100.0
    w[1, 0], w[7] = 0.0, torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    threat = ThreatModel(norm, 1.0, bounds)
    together = threat.to_hyperplane(x, w, rise)
    for i in range(9):
        torch.testing.assert_close(
            together[i : i + 1], threat.to_hyperplane(x[i : i + 1], w[i : i + 1], rise[i : i + 1])
        )
    assert together.isfinite().all()
    assert together[2].abs().max() == 0
    if norm != "linf":
        assert together[1, 0].abs().max() == 0  # moves only what matters


def test_a_way_over_many_coordinates():
    """Small rooms, so that l1 has to move most of 300 coordinates: against a loop over coordinates."""
    x, w = torch.rand(4, 300, dtype=torch.float64) * 0.02, -torch.rand(4, 300, dtype=torch.float64)
    rise = torch.tensor([0.05, 0.5, 1.0, 1.2], dtype=torch.float64)
    moves = ThreatModel("l1", 1.0).to_hyperplane(x, w, rise)
    for i in range(4):
        left, expected = float(rise[i]), torch.zeros(300, dtype=torch.float64)
        for j in w[i].argsort().tolist():  # the largest weights first
            step = min(float(x[i, j]), left / -float(w[i, j]))
            expected[j] = -step
            left -= -float(w[i, j]) * step
        torch.testing.assert_close(moves[i], expected)


@settings(deadline=None, max_examples=100)
@given(case=cases)
def test_rounding_gives_images_inside_the_ball(case):
    norm, _, eps, size, seed = case
    threat = ThreatModel(norm, eps)
    x = (points(size, seed)[0] * 255).round() / 255
    x_adv = threat.project(points(size, seed)[1], x)
    rounded = threat.round(x_adv, x)
    inside(threat, rounded, x)
    torch.testing.assert_close(rounded * 255, (rounded * 255).round(), atol=1e-3, rtol=0)


def test_rounding_by_hand():
    """To the nearest level; toward x if the nearest is outside; to x if even this overshoots."""
    x = torch.tensor([[90.0, 90.0, 90.0, 127.5, 127.5]]) / 255
    x_adv = torch.tensor([[95.4, 95.6, 98.9, 127.8, 127.2]]) / 255
    rounded = ThreatModel("linf", 8.95 / 255).round(x_adv, x) * 255
    torch.testing.assert_close(rounded, torch.tensor([[95.0, 96.0, 98.0, 128.0, 127.0]]))
    rounded = ThreatModel("linf", 0.3 / 255).round(x_adv[:, 3:], x[:, 3:]) * 255
    torch.testing.assert_close(rounded, torch.tensor([[127.5, 127.5]]))
    rounded = ThreatModel("linf", 3.05 / 255).round(torch.tensor([[124.49]]) / 255, torch.tensor([[127.5]]) / 255) * 255
    torch.testing.assert_close(rounded, torch.tensor([[125.0]]))


@settings(deadline=None, max_examples=100)
@given(case=cases)
def test_rounding_never_leaves_the_ball_even_for_inputs_that_are_not_images(case):
    norm, _, eps, size, seed = case
    threat = ThreatModel(norm, eps)
    x, far = points(size, seed)
    inside(threat, threat.round(threat.project(far, x), x), x)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("l0", 0.5), "eps: expected a whole number of components for l0, got 0.5"),
        (("l3", 0.1), "norm: expected linf, l2, l1 or l0, got 'l3'"),
        (("linf", -0.1), "eps: expected a finite number >= 0, got -0.1"),
        (("linf", math.nan), "eps: expected a finite number >= 0"),
        (("linf", math.inf), "eps: expected a finite number >= 0"),
        (("linf", "8/0"), "eps: expected a number or a fraction like 8/255, got '8/0'"),
        (("linf", "a lot"), "eps: expected a number or a fraction"),
        (("linf", 0.1, (1.0, 0.0)), "bounds: expected lower < upper"),
    ],
)
def test_nonsense_is_refused(arguments, sentence):
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        ThreatModel(*arguments)


def test_fractions():
    assert number("8/255") == 8 / 255
    assert number(" 2 / 255") == 2 / 255
    assert number("0.5") == 0.5
    assert ThreatModel("linf", "8/255").radius == 8 / 255


def test_inputs_are_checked():
    threat = ThreatModel()
    threat.check(torch.rand(2, 3))
    for x, sentence in (
        (torch.tensor([[0.0, math.nan]]), "NaN"),
        (torch.tensor([[0.0, 1.5]]), r"expected values in \[0, 1\], got \[0, 1.5\]"),
        (torch.tensor([[math.inf, 0.0]]), "infinity"),
    ):
        with pytest.raises(InputError, match=sentence):
            threat.check(x)
    ThreatModel(bounds=None).check(torch.tensor([[5.0, -5.0]]))
    ThreatModel("linf", 5.0, None).check_radius((1,))  # without bounds, any radius makes sense
    ThreatModel("linf", 5.0).check_radius()


def test_l0_counts_components_and_has_no_projection():
    threat, x = ThreatModel("l0", 3), torch.zeros(2, 3, 2, 2)
    x_adv = x.clone()
    x_adv[0, :, 0, 0] = 0.5
    assert threat.distance(x_adv, x).tolist() == [3, 0]
    streams = PointRNG(0, index=torch.arange(2))
    for name, arguments in {
        "project": (x_adv, x),
        "random_start": (x, streams),
        "steepest": (x_adv,),
        "to_hyperplane": (x, x_adv, torch.ones(2)),
    }.items():
        with pytest.raises(InputError, match=f"{name}: expected linf, l2 or l1, got l0"):
            getattr(threat, name)(*arguments)


@pytest.mark.parametrize("norm", NORMS)
def test_each_point_can_have_its_own_radius(norm):
    x, radius = torch.rand(3, 1, 4, 4), torch.tensor([0.05, 0.5, 2.0])
    x_adv = x + torch.randn(3, 1, 4, 4)
    together = ThreatModel(norm, 0.0).project(x_adv, x, radius)
    for i in range(3):
        alone = ThreatModel(norm, float(radius[i])).project(x_adv[i : i + 1], x[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone)


def test_inputs_are_compared_with_bounds_in_their_own_precision():
    threat = ThreatModel("linf", 0.1, (-0.42, 0.3))  # in float32, 0.3 is larger than 0.3 in float64
    threat.check(torch.tensor([[-0.42, 0.3]]))
    for value in (0.31, -0.43, math.nan, math.inf):
        with pytest.raises(InputError, match="inputs: expected"):
            threat.check(torch.tensor([[value, 0.0]]))
    with pytest.raises(InputError, match="finite numbers"):
        ThreatModel(bounds=None).check(torch.tensor([[math.inf]]))
