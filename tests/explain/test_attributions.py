"""Attributions: closed forms, autograd, Captum, completeness, and nothing left changed."""

import captum.attr
import pytest
import torch
from torch import nn

from atoll.attacks.progress import AttackCounts
from atoll.errors import InputError
from atoll.explain import (
    STANDARD,
    BoundaryIntegratedGradients,
    BoundarySaliency,
    IntegratedGradients,
    SmoothGrad,
    attribution,
    boundary_search,
)
from atoll.modules import count_passes
from attack_cases import plane
from explain_cases import linear, net, smooth

BOUNDARY = {"budget": 60}
# Arguments that keep the tests short; a new attribution needs none.
OPTIONS = {"BSM": BOUNDARY, "BIG": BOUNDARY, "SG": {"samples": 4}}
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
    expected = {"SM": w, "IxG": x * w, "IG": x * w, "SG": w, "BSM": w, "BIG": (x - boundary.x_outside) * w}
    assert list(expected) == list(STANDARD)
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


@pytest.mark.parametrize("name", STANDARD)
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


@pytest.mark.parametrize("name", STANDARD)
def test_memory_is_bounded_by_the_internal_batch_size(name):
    model, x = net(6)
    boundary, sizes = boundary_search(model, x, **BOUNDARY), []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    build(name, model).attribute(x, internal_batch_size=4, boundary=boundary)
    assert max(sizes) == 4


@pytest.mark.parametrize("name", STANDARD)
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
    for name in STANDARD:
        assert isinstance(build(name, linear()), captum.attr.GradientAttribution)


@pytest.mark.parametrize("name", STANDARD)
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
        (lambda: build("SM", model).attribute(x, return_convergence_delta=True), "not meant to be complete"),
        (lambda: build("BSM", model).attribute(x, return_convergence_delta=True), "not meant to be complete"),
        (lambda: build("BIG", model).attribute(x, boundary=boundary_search(model, x[:3])), "got those of others"),
        (lambda: IntegratedGradients(model, steps=1).attribute(x), "steps: expected at least 2, got 1"),
        (lambda: SmoothGrad(model, sigma=0.0), "sigma, samples: expected more than 0 and at least 1, got 0.0, 20"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
    constant = nn.Linear(2, 3).double()
    constant.weight.data.zero_()
    with pytest.raises(InputError, match="no other prediction was found for 4 of 4 inputs"):
        BoundarySaliency(constant).attribute(x)
