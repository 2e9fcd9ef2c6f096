"""Carlini & Wagner's attack: known distances, brute force, Foolbox, and independent rows."""

import itertools
import math

import foolbox
import pytest
import torch
from torch import nn

from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.iterative import AttackLoop, Points
from atoll.errors import InputError
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel
from attack_cases import in_batches, plane

MINIMUM, FREE = ThreatModel("l2", 0.0), ThreatModel("l2", 0.0, None)


def flat(bounds, classes, scale=1.0):
    """A linear model, points with the labels it gives them, and their distances to the boundary (inside the bounds)."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(8, classes).double()
    model.weight.data = scale * torch.randn(classes, 8, generator=draw).double()
    x = torch.randn(24, 8, generator=draw).double()
    if bounds is not None:
        x = 0.5 + 0.1 * x.clamp(-2, 2)
    model.bias.data = -model.weight.data @ x.mean(0)
    logits = model(x).detach()
    y = logits.argmax(1)
    normals = (model.weight[y][:, None] - model.weight).detach().norm(dim=2)
    distance = (logits.gather(1, y[:, None]) - logits) / normals.clamp_min(1e-9)
    return model, x, y, distance.scatter(1, y[:, None], math.inf).amin(1)


def net(seed=0, kind="conv"):
    """A small net on 8x8 images with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "conv":
            layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(64, 10)).eval()
        layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 10)).eval()


def images(count, edges=False):
    """Random images, with many black and white pixels if they have edges."""
    x = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.where(x < 0.4, 0.0, torch.where(x > 0.7, 1.0, x)) if edges else x


# A new model joins the comparison with Foolbox by one line.
NETS = {"conv": lambda: net(0, "conv"), "mlp": lambda: net(0, "mlp")}


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_finds_the_distance_to_the_boundary_of_a_linear_model(bounds, scale):
    """Whatever the scale of the logits."""
    model, x, y, distance = flat(bounds, 2, scale)
    threat = ThreatModel("l2", 0.0, bounds)
    x_adv = CarliniWagner(threat, minimum_norm=True, steps=150, binary_search_steps=3)(model, x, y)
    result = threat.distance(x_adv, x)
    assert (model(x_adv).argmax(1) != y).all()
    assert (result >= distance * (1 - 1e-9)).all()
    assert float(result.mean()) < 1.01 * float(distance.mean())


@pytest.mark.parametrize("options", [{"initial_const": 1e-3}, {"initial_const": 1e3}, {"abort_early": False}], ids=str)
def test_the_options_change_the_cost_more_than_the_result(options):
    model, x, y, distance = flat((0.0, 1.0), 2)
    x_adv = CarliniWagner(MINIMUM, minimum_norm=True, steps=60, **options)(model, x, y)
    result = MINIMUM.distance(x_adv, x)
    assert (model(x_adv).argmax(1) != y).all()
    assert float(distance.mean()) <= float(result.mean()) < 1.05 * float(distance.mean())


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_is_at_least_as_good_as_foolbox(name, edges):
    model, x = NETS[name](), images(16, edges)
    y = model(x).argmax(1)
    # Foolbox's own first constant, 1e-3, would spend most of the few steps on finding nothing.
    attack = foolbox.attacks.L2CarliniWagnerAttack(steps=50, binary_search_steps=5, initial_const=0.1)
    with torch.enable_grad():
        theirs = attack.run(
            foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, foolbox.criteria.Misclassification(y)
        )
    ours = CarliniWagner(MINIMUM, minimum_norm=True, steps=50, binary_search_steps=5)(model, x, y)
    # Foolbox leaves black images where it has result nothing.
    success = (model(theirs).argmax(1) != y) & theirs.flatten(1).any(1)
    assert success.any()
    assert (model(ours).argmax(1) != y)[success].all()
    distance, reference = MINIMUM.distance(ours, x)[success], MINIMUM.distance(theirs, x)[success]
    assert float(distance.mean()) <= 1.01 * float(reference.mean())


def test_finds_what_a_fine_grid_finds():
    model, x, y = plane(40, torch.float64)
    ticks = torch.linspace(0, 1, 401)
    grid = torch.tensor(list(itertools.product(ticks.tolist(), repeat=2))).double()
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid), math.inf).amin(1)
    x_adv = CarliniWagner(MINIMUM, minimum_norm=True, steps=200, binary_search_steps=4)(model, x, y)
    result, broken, step = MINIMUM.distance(x_adv, x), model(x_adv).argmax(1) != y, 1 / 400
    assert float(broken.double().mean()) >= 0.9
    assert (result > truth - step)[broken].all()
    assert float((broken & (result < 1.02 * truth + step)).double().mean()) >= 0.6  # others end at another boundary


def together(attack, model, x, y, size):
    """What comes out for each point when so many are under attack at a time and others take the place of leavers."""
    points = Points(x, y, torch.arange(len(y)), model(x).detach())

    result, closest = x.clone(), torch.full_like(x[:, 0], math.nan)
    for rows in AttackLoop(attack, model, in_batches(points), lambda index: PointRNG(0, index=index), 4, size):
        result[rows.index], closest[rows.index] = rows.x_adv, rows.state["closest"]
    return result, closest


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_a_point_does_not_depend_on_its_batch(eps):
    model, x, y = plane(40, torch.float64)
    x, y = x[:18], y[:18]
    attack = CarliniWagner(ThreatModel("l2", eps), minimum_norm=not eps, steps=12, binary_search_steps=3)
    result, closest = together(attack, model, x, y, len(x))
    for size in (3, 7):
        again = together(attack, model, x, y, size)
        torch.testing.assert_close(again[0], result, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(again[1], closest, rtol=1e-9, atol=1e-9)


def test_shows_points_within_eps_and_leaves_the_others_where_they_were():
    model, x, y = plane(40, torch.float64)
    closest = CarliniWagner(MINIMUM, minimum_norm=True, steps=60, binary_search_steps=3)(model, x, y)
    minimum, result = MINIMUM.distance(closest, x), model(closest).argmax(1) != y
    eps = float(minimum.median())
    threat = ThreatModel("l2", eps)
    x_adv = CarliniWagner(threat, steps=60, binary_search_steps=3)(model, x, y)
    broken = result & (minimum <= eps)
    assert (threat.distance(x_adv, x) <= eps).all()
    assert torch.equal(model(x_adv).argmax(1) != y, broken)
    assert torch.equal(x_adv[~broken], x[~broken])
    assert torch.equal(CarliniWagner(MINIMUM, steps=5)(model, x, y), x)  # also where nothing is


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_constant_images_are_no_special_case(value):
    """On the bounds the tanh of the plain formula has no slope."""
    model = net()
    x = torch.full((2, 1, 8, 8), value)
    y = model(x).argmax(1)
    x_adv = CarliniWagner(MINIMUM, minimum_norm=True, steps=150, binary_search_steps=3)(model, x, y)
    assert (model(x_adv).argmax(1) != y).all()
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1
    assert (MINIMUM.distance(x_adv, x) < 4).all()


def test_bounds_other_than_zero_and_one():
    model, x = net(), images(6, edges=True)
    y = model(x).argmax(1)
    shifted = nn.Sequential(nn.Identity(), model)
    shifted[0].register_forward_pre_hook(lambda _, inputs: ((inputs[0] + 1) / 4,))
    options = {"steps": 100, "binary_search_steps": 4}
    wide = CarliniWagner(ThreatModel("l2", 0.0, (-1.0, 3.0)), minimum_norm=True, **options)(shifted, 4 * x - 1, y)
    assert wide.min() >= -1
    assert wide.max() <= 3
    unit = CarliniWagner(MINIMUM, minimum_norm=True, **options)(model, x, y)
    ratio = MINIMUM.distance(wide, 4 * x - 1).mean() / MINIMUM.distance(unit, x).mean()
    assert float(ratio) == pytest.approx(4, rel=0.05)


def test_misclassified_points_have_distance_zero_and_cost_next_to_nothing():
    model, x, y = plane(40, torch.float64)
    calls = []
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    wrong = (y + 1) % 4
    assert torch.equal(CarliniWagner(MINIMUM, minimum_norm=True)(model, x, wrong), x)
    assert sum(calls) == 2 * len(x)


def test_counts_its_passes_and_stops_at_the_first_success():
    model, x, y = plane(40, torch.float64)
    calls = []
    model.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    CarliniWagner(MINIMUM, minimum_norm=True, steps=20, binary_search_steps=3, abort_early=False)(model, x, y)
    assert sum(calls) == len(x) * (1 + 20 * 3)  # clean logits, and a look per step
    calls.clear()
    CarliniWagner(MINIMUM, minimum_norm=True, steps=20, binary_search_steps=3)(model, x, y)
    assert sum(calls) < len(x) * (1 + 20 * 3)
    calls.clear()
    CarliniWagner(ThreatModel("l2", 0.3), steps=100, binary_search_steps=3, abort_early=False)(model, x, y)
    assert sum(calls) < len(x) * 150


def test_confidence_is_reached():
    model, x, y = plane(40, torch.float64)
    x_adv = CarliniWagner(FREE, minimum_norm=True, steps=100, binary_search_steps=4, confidence=0.3)(model, x, y)
    result = FREE.distance(x_adv, x) > 0
    assert result.double().mean() > 0.9
    assert (margin(model(x_adv), y)[result] > 0.3).all()


def test_zero_gradients_do_no_harm():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3) + 0 * x.sum()

    x = torch.rand(3, 5)
    assert torch.equal(
        CarliniWagner(MINIMUM, minimum_norm=True, steps=5)(Flat(), x, torch.zeros(3, dtype=torch.long)), x
    )


def test_wrong_arguments_are_refused():
    for options, sentence in (
        ({"threat": ThreatModel("linf", 0.1)}, "expected l2, got linf"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"binary_search_steps": 0}, "binary_search_steps: expected at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number > 0, got 0.0"),
        ({"initial_const": -1.0}, r"initial_const: expected a number in \(0, 1e\+10\], got -1.0"),
        ({"confidence": -0.1}, "confidence: expected at least 0, got -0.1"),
        ({"confidence": math.nan}, "confidence: expected a finite number, got nan"),
    ):
        with pytest.raises(InputError, match=sentence):
            CarliniWagner(**{"threat": MINIMUM, **options})
