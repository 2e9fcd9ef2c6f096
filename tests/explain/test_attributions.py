"""Attributions: closed forms, autograd, Captum, completeness, and nothing left changed."""

import captum.attr
import pytest
import torch
from torch import nn

from atoll.attacks.progress import AttackCounts
from atoll.errors import InputError
from atoll.explain import (
    BoundaryIntegratedGradients,
    BoundaryNormal,
    BoundarySaliency,
    IntegratedGradients,
    SmoothGrad,
    attribution,
    boundary_search,
)
from atoll.explain.attributions import ATTRIBUTIONS, NAMES
from atoll.modules import count_passes
from attack_cases import plane
from explain_cases import SmoothedReLU, linear, net, one_layer, smooth

BOUNDARY = {"budget": 60}
# Arguments that keep the tests short; a new attribution needs none.
OPTIONS = {"BSM": BOUNDARY, "BIG": BOUNDARY, "BNM": BOUNDARY, "SG": {"samples": 4}}
PATHS = ["IG", "BIG"]
MODELS = {"relu": lambda: net(5)[0], "softplus": smooth, "linear": linear}


def build(name, model):
    return attribution(name, model, **OPTIONS.get(name, {}))


def gradient(model, x, target):
    """By autograd, one point at a time."""
    maps = []
    for point, y in zip(x, target.tolist(), strict=True):
        point = point.clone().requires_grad_()
        maps.append(torch.autograd.grad(model(point[None])[0, y], point)[0])
    return torch.stack(maps)


def test_linear_models_give_their_weights():
    """The gradient methods themselves; those with paths times the way from the start."""
    model, x = linear(), net(5)[1]
    y = model(x).argmax(1)
    w = model[1].weight.detach()[y].view_as(x)
    boundary = boundary_search(model, x)
    normal = w - model[1].weight.detach()[boundary.other].view_as(x)
    expected = {"SM": w, "IxG": x * w, "IG": x * w, "SG": w, "BSM": w, "BIG": (x - boundary.x_outside) * w}
    expected |= {"BNM": normal}
    assert list(expected) == list(NAMES)
    ours = {member.cls for member in ATTRIBUTIONS.members().values() if member.path.startswith("atoll.explain.")}
    assert {ATTRIBUTIONS.resolve(name).cls for name in NAMES} == ours
    for name, truth in expected.items():
        maps = build(name, model).attribute(x, boundary=boundary)
        torch.testing.assert_close(maps, truth, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("target", [None, 2, [0, 1, 2, 0, 1]], ids=str)
def test_gradients_are_those_of_autograd(target):
    model, x = net(5)
    y = model(x).argmax(1) if target is None else torch.as_tensor(target).expand(5)
    truth = gradient(model, x, y)
    torch.testing.assert_close(build("SM", model).attribute(x, target), truth)
    torch.testing.assert_close(build("IxG", model).attribute(x, target), x * truth)
    boundary = boundary_search(model, x)
    maps = BoundarySaliency(model).attribute(x, target, boundary=boundary)
    torch.testing.assert_close(maps, gradient(model, boundary.x_outside, y))
    logits = model(boundary.x_outside)
    rival = logits.scatter(1, y[:, None], -torch.inf).argmax(1)
    normal = gradient(model, boundary.x_outside, y) - gradient(model, boundary.x_outside, rival)
    torch.testing.assert_close(BoundaryNormal(model).attribute(x, target, boundary=boundary), normal)


def random_net(seed, activation, classes=5):
    """A net of 10 inputs and two hidden layers in float64, without bounds, and 40 points."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [nn.Linear(10, 32), activation, nn.Linear(32, 32), activation]
        return nn.Sequential(*hidden, nn.Linear(32, classes)).double(), torch.randn(40, 10, dtype=torch.float64)


def cosines(model, x, **search):
    """Of the normal and of BSM with the shortest way from the boundary to the input."""
    boundary = boundary_search(model, x, bounds=None, **search)
    assert boundary.success.all()
    maps = [method(model).attribute(x, boundary=boundary) for method in (BoundaryNormal, BoundarySaliency)]
    return [torch.cosine_similarity(part, x - boundary.x_outside) for part in maps]


@pytest.mark.parametrize("activation", [nn.Softplus(beta=5.0), nn.Tanh(), nn.SiLU()], ids=str)
def test_the_shortest_way_to_a_smooth_boundary_is_along_its_normal(activation):
    """The condition of Lagrange for the closest point; BSM does not meet it (thesis, definition 6)."""
    normal, saliency = cosines(*random_net(2, activation), tolerance=1e-5, budget=1000)
    assert normal.min() > 0.98
    assert normal.median() > 0.999
    assert saliency.mean() < 0.85


def test_the_shortest_way_to_a_boundary_with_kinks_is_nearly_along_its_normal():
    """The closest point of a ReLU net may be at a kink, where there is no normal."""
    pairs = [cosines(*random_net(seed, nn.ReLU(), classes)) for seed in range(3) for classes in (3, 10)]
    normal, saliency = (torch.cat(part) for part in zip(*pairs, strict=True))
    assert normal.mean() > 0.94
    assert saliency.mean() < 0.8


def test_what_is_added_to_all_logits_changes_bsm_and_not_the_normal():
    """No prediction changes, so neither does the boundary."""

    class Shifted(nn.Module):
        def __init__(self, model, extra):
            super().__init__()
            self.model, self.extra = model, extra

        def forward(self, x):
            return self.model(x) + self.extra(x)[:, :1]

    model, x = random_net(0, nn.ReLU())
    shifted = Shifted(model, random_net(1, nn.Tanh())[0])
    boundary = boundary_search(model, x, bounds=None)
    assert torch.equal(shifted(boundary.x_outside).argmax(1), boundary.other)
    for method, changes in ((BoundaryNormal, False), (BoundarySaliency, True)):
        before, after = (method(each).attribute(x, boundary=boundary) for each in (model, shifted))
        assert bool(((before - after).norm(dim=1) > 1e-6).all()) == changes
        assert bool(((before - after).norm(dim=1) > 1e-9).any()) == changes


def test_the_normal_points_to_the_side_of_its_class():
    """For the class across the boundary it is the opposite of that for the predicted class."""
    model, x = random_net(0, nn.Tanh())
    boundary = boundary_search(model, x, bounds=None, tolerance=1e-5)
    own, other = (BoundaryNormal(model).attribute(x, y, boundary=boundary) for y in (None, boundary.other))
    torch.testing.assert_close(own, -other)
    step = 1e-3 * own / own.norm(dim=1, keepdim=True)
    assert torch.equal(model(boundary.x_outside + step).argmax(1), boundary.prediction)
    assert torch.equal(model(boundary.x_outside - step).argmax(1), boundary.other)


@pytest.mark.parametrize("kind", MODELS)
def test_integrated_gradients_are_captums_with_weights_that_sum_to_one(kind):
    model, x = MODELS[kind](), net(5)[1]
    boundary = boundary_search(model, x)
    theirs = captum.attr.IntegratedGradients(model)
    for start, ours in (
        (torch.zeros_like(x), IntegratedGradients(model).attribute(x, 1)),
        (boundary.x_outside, BoundaryIntegratedGradients(model).attribute(x, 1, boundary=boundary)),
    ):
        reference = theirs.attribute(x, start, target=1, n_steps=20, method="riemann_trapezoid")
        torch.testing.assert_close(ours, reference * 20 / 19, rtol=1e-5, atol=1e-8)
    # With more and more points both come to the same integral.
    exact = theirs.attribute(x, target=1, n_steps=400, method="gausslegendre")
    fine = IntegratedGradients(model, steps=2000).attribute(x, 1)
    torch.testing.assert_close(fine, exact, rtol=1e-2, atol=2e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("kind", MODELS)
def test_paths_are_complete(name, kind):
    """To 1e-3 at 20 points; where the gradient jumps, the trapezoid rule needs more of them."""
    model, x = MODELS[kind](), net(8)[1]
    boundary = boundary_search(model, x, **BOUNDARY)
    start = boundary.x_outside if name == "BIG" else torch.zeros_like(x)
    y = model(x).argmax(1)
    change = (model(x) - model(start)).gather(1, y[:, None]).squeeze(1).detach()
    for steps in (20, 1000):
        method = attribution(name, model, steps=steps)
        maps, delta = method.attribute(x, return_convergence_delta=True, boundary=boundary)
        assert delta.shape == (8,)
        torch.testing.assert_close(maps.flatten(1).sum(1) - change, delta)
        if kind != "relu" or steps > 20:
            assert delta.abs().max() < 1e-3 * max(1, float(change.abs().max()))
        else:
            assert delta.abs().max() < 0.05 * float(change.abs().max())
    assert change.abs().max() > 0.05  # there was something to attribute


def test_smoothgrad_is_the_mean_gradient_under_noise():
    """Against the closed form: the gradient of |x|^2 / 2 is x, so the mean is x plus the mean of the noise."""

    class Squares(nn.Module):
        def forward(self, x):
            return torch.stack([x.flatten(1).square().sum(1) / 2, 0 * x.flatten(1).sum(1)], 1)

    x = net(5)[1]
    noise = SmoothGrad(Squares(), sigma=0.5, samples=400).attribute(x, 0) - x
    assert noise.mean().abs() < 4 * 0.5 / (400 * 320) ** 0.5
    assert float(noise.std()) == pytest.approx(0.5 / 20, rel=0.15)
    other = SmoothGrad(Squares(), sigma=0.5, samples=400, seed=1).attribute(x, 0) - x
    assert torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1].abs() < 0.25


def largest_change(w, sigma, distance):
    """Theorem 1 of the thesis with its constant: what moves Gaussian noise by a distance moves this much of it."""
    return w.norm(dim=1) * (2 * torch.special.ndtr(torch.as_tensor(distance)[..., None] / (2 * sigma)) - 1)


def test_smoothgrad_is_the_saliency_map_of_the_smoothed_model():
    """Against the closed form of a one-layer net, within five standard errors."""
    w, x = one_layer(0)
    x = x[:20]
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU()).double()
    model[0].weight.data = w
    for sigma in (0.1, 1.0):
        smoothed, samples = SmoothedReLU(w, sigma), 4000
        for y in range(4):
            truth = build("SM", smoothed).attribute(x, y)
            share = (truth @ w[y] / (w[y] @ w[y])).clamp(0, 1)[:, None]  # of the noise under which the unit is active
            error = (share * (1 - share) / samples).sqrt() + 1 / samples  # one draw, where hardly any is active
            sampled = SmoothGrad(model, sigma=sigma, samples=samples).attribute(x, y)
            assert ((sampled - truth).abs() <= 5 * error * w[y].abs()).all()


@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_bounds_the_change_of_smoothed_saliency(seed):
    """Thesis, Theorem 1: for all pairs of points of one smoothed class, at all levels of noise."""
    w, x = one_layer(seed)
    for sigma in (0.05, 0.25, 1.0, 4.0):
        model = SmoothedReLU(w, sigma)
        y = model(x).argmax(1)
        maps, bound = build("SM", model).attribute(x, y), largest_change(w, sigma, torch.cdist(x, x))
        pairs = (y[:, None] == y).nonzero().T
        change = (maps[pairs[0]] - maps[pairs[1]]).norm(dim=1)
        assert len(change) > 200
        assert (change <= bound[pairs[0], pairs[1], y[pairs[0]]] + 1e-12).all()


def test_the_bound_of_theorem_1_is_reached_and_falls_with_the_noise():
    """The largest change over all pairs at a distance, by brute force along the weights of a class."""
    w, _ = one_layer(0)
    steps, distance, highest = torch.linspace(-8, 8, 16001, dtype=torch.float64), 0.5, []
    line = steps[:, None] * w[0] / w[0].norm()
    for sigma in (0.05, 0.25, 1.0, 2.0):
        maps = build("SM", SmoothedReLU(w, sigma)).attribute(line, 0)
        highest.append(float((maps[500:] - maps[:-500]).norm(dim=1).max()))
        assert highest[-1] == pytest.approx(float(largest_change(w, sigma, distance)[0]), rel=1e-5)
    assert highest == sorted(highest, reverse=True)
    assert highest[-1] < highest[0] / 4


@pytest.mark.parametrize("seed", range(3))
def test_corollary_1_bounds_the_distance_to_the_saliency_at_the_boundary(seed):
    """Thesis, Corollary 1: SM and BSM of the smoothed model."""
    w, x = one_layer(seed)
    for sigma in (0.1, 1.0):
        model = SmoothedReLU(w, sigma)
        boundary = boundary_search(model, x, bounds=None, budget=100)
        y = boundary.prediction
        change = build("SM", model).attribute(x, y) - BoundarySaliency(model).attribute(x, y, boundary=boundary)
        bound = largest_change(w, sigma, boundary.distance).gather(1, y[:, None]).squeeze(1)
        assert (change.norm(dim=1) <= bound + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_batch_size_changes_anything(name):
    model, x = net(9)
    boundary = boundary_search(model, x, **BOUNDARY)
    method = build(name, model)
    whole = method.attribute(x, internal_batch_size=256, boundary=boundary)
    for size in (1, 7, None):
        parts = method.attribute(x, internal_batch_size=size, boundary=boundary)
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    some = [method.attribute(x[i : i + 4], boundary=boundary[i : i + 4]) for i in range(0, 9, 4)]
    torch.testing.assert_close(torch.cat(some), whole, rtol=1e-9, atol=1e-12)
    assert torch.equal(method.attribute(x, boundary=boundary), method.attribute(x, boundary=boundary))


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_by_the_internal_batch_size(name):
    model, x = net(6)
    boundary, sizes = boundary_search(model, x, **BOUNDARY), []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    build(name, model).attribute(x, internal_batch_size=4, boundary=boundary)
    assert max(sizes) == 4


@pytest.mark.parametrize("name", NAMES)
def test_modes_buffers_gradients_and_the_global_generator_are_left_alone(name):
    model, x = net(3)[0].float(), net(3)[1].float()
    model.train()
    model.body[0].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes, state, before_x = [module.training for module in model.modules()], torch.get_rng_state(), x.clone()
    maps = build(name, model).attribute(x)
    assert maps.shape == x.shape
    assert not maps.requires_grad
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, before_x)
    assert not x.requires_grad
    with torch.no_grad():
        assert torch.equal(build(name, model).attribute(x), maps)


def test_big_costs_its_twenty_gradients_and_the_search():
    model, x = net(6)
    boundary, tally = boundary_search(model, x), AttackCounts()
    with count_passes(model, tally):
        BoundaryIntegratedGradients(model).attribute(x, 0, boundary=boundary, internal_batch_size=64)
    assert (tally.forward, tally.backward) == (20 * 6 + 1, 20 * 6)  # one row tells how many classes there are


def test_they_are_captums_gradient_attributions():
    for name in NAMES:
        assert isinstance(build(name, linear()), captum.attr.GradientAttribution)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"inputs": torch.full((2, 1, 8, 8), float("nan"))}, "inputs: expected finite numbers"),
        ({"inputs": torch.rand(8)}, r"inputs: expected a tensor of floats, \(points, ...\), got \(8,\)"),
        ({"inputs": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}, "inputs: expected a tensor of floats"),
        ({"target": 4}, r"labels: expected classes in \[0, 3\], got \[4, 4\]"),
        ({"target": [0]}, "target: expected a class, or one for each of 2 inputs"),
        ({"target": [0.5, 1.0]}, "target: expected a class, or one for each of 2 inputs"),
        ({"internal_batch_size": 0}, "internal_batch_size: expected at least 1, got 0"),
    ],
)
def test_nonsense_is_one_sentence(name, given, sentence):
    model = linear().float()
    with pytest.raises(InputError, match=sentence):
        build(name, model).attribute(**{"inputs": torch.rand(2, 1, 8, 8)} | given)


def test_other_nonsense_is_one_sentence():
    model, x, _ = plane(4, torch.float64)
    for call, sentence in (
        (
            lambda: attribution("XX", model),
            "expected an attribution, got 'XX'; expected one of BIG, .*, SM",
        ),
        (lambda: build("SM", model).attribute(x, return_convergence_delta=True), "not supported by"),
        (lambda: build("BSM", model).attribute(x, return_convergence_delta=True), "not supported by"),
        (lambda: build("BNM", model).attribute(x, return_convergence_delta=True), "not supported by"),
        (lambda: build("BIG", model).attribute(x, boundary=boundary_search(model, x[:3])), "got those of other inputs"),
        (lambda: IntegratedGradients(model, steps=1).attribute(x), "steps: expected at least 2, got 1"),
        (lambda: SmoothGrad(model, sigma=0.0), "sigma, samples: expected sigma > 0 and samples >= 1, got 0.0, 20"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
    constant = nn.Linear(2, 3).double()
    constant.weight.data.zero_()
    with pytest.raises(InputError, match="no other prediction was found for 4 of 4 inputs"):
        BoundarySaliency(constant).attribute(x)
