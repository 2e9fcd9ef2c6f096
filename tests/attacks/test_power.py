"""The power of attacks: planted adversarial inputs exist, healthy attacks find them, and defects show."""

from functools import partial

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, FAB, FGSM, PGD, RayS, Square
from atoll.attacks.power import (
    BinarizedModel,
    Power,
    diagnose_power,
    extreme_points,
    find_layer,
    measure_power,
    plant,
)
from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.models import MLP, CentroidNet
from atoll.rng import PointRNG
from atoll.stats import Accuracy
from atoll.threat import ThreatModel

LINF = ThreatModel("linf", 0.1)
THREATS = [LINF, ThreatModel("l2", 0.5), ThreatModel("l1", 3.0), ThreatModel("linf", 0.1, None)]


class Layer(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Rounding(torch.autograd.Function):
    """Rounds, with the gradient of a constant."""

    @staticmethod
    def forward(ctx, x, levels):
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient), None


def winners(z, keep=4):
    return z * (z >= z.topk(keep, dim=1).values[:, -1:])


def network(before=None, after=None, middle=None, hidden=64):
    """A net with one hidden layer on images of 1x8x8, with extra steps."""
    steps = [nn.Flatten(), before, nn.Linear(64, hidden), middle or nn.ReLU(), nn.Linear(hidden, 5), after]
    return nn.Sequential(*(step for step in steps if step is not None)).eval()


def points(count=12):
    x = torch.rand(count, 1, 8, 8)
    return MemorySplit(x, torch.zeros(count).long())


def power(model, attacks, count=12, **options):
    attacks = attacks if isinstance(attacks, dict) else {"attack": attacks}
    return measure_power(model, points(count), attacks, points=count, **options)


# --- the witness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: f"{threat.norm} {threat.bounds}")
@pytest.mark.parametrize("make", [network, partial(network, after=nn.Softmax(1)), MLP, CentroidNet])
def test_the_witness_is_an_adversarial_input(make, threat):
    model = make((1, 8, 8), 4) if make in (MLP, CentroidNet) else make()
    x = torch.rand(2, 1, 8, 8)
    x[0] = x[0].round()  # at the bounds
    _, layer = find_layer(model.eval(), x)
    for place, row in enumerate(x[:, None]):
        test = plant(model, layer, threat, row, torch.tensor(place))
        logits = BinarizedModel(model, layer, test.readout)(torch.cat([row, test.witness]))
        assert logits.shape == (2, 2)
        assert logits[0, 0] > logits[0, 1]
        assert logits[1, 1] > logits[1, 0]
        delta = (test.witness - row).flatten()
        order = {"linf": torch.inf, "l2": 2, "l1": 1}[threat.norm]
        assert 0.5 * threat.radius < delta.norm(order) <= threat.radius * (1 + 1e-5)
        assert threat.bounds is None or (test.witness.min() >= 0 and test.witness.max() <= 1)


def test_the_readout_has_the_margin_of_the_model():
    model, x = network(), torch.rand(1, 1, 8, 8)
    model[-1].weight.data *= 100
    test = plant(model, model[-1], LINF, x, torch.tensor(0))
    torch.testing.assert_close(test.logits[0], model(x)[0].topk(2).values.detach(), rtol=1e-3, atol=1e-3)


def test_a_tie_of_the_two_largest_logits_becomes_a_margin_of_one():
    model, x = network(), torch.rand(1, 1, 8, 8)
    for parameter in model[-1].parameters():
        parameter.data[1:] = parameter.data[0]
    (logits,) = plant(model, model[-1], LINF, x, torch.tensor(0)).logits
    torch.testing.assert_close(logits, model(x)[0, 0].detach() + torch.tensor([0.5, -0.5]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_size", [7, 500])
def test_planting_costs_a_pass_for_each_random_point(batch_size):
    """The point and 64 others determine the readout, and 100 more try to solve the test."""
    model, rows = network(), []
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    test = plant(model, model[-1], LINF, torch.rand(1, 1, 8, 8), torch.tensor(0), batch_size=batch_size)
    assert not test.trivial
    assert sum(rows) == 65 + 2 + 100
    assert max(rows) <= batch_size


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: f"{threat.norm} {threat.bounds}")
def test_extreme_points_maximize_a_random_direction(threat):
    """No other point of the ball is farther in the direction in which the noise points, in float64."""
    x = torch.rand(1, 20, dtype=torch.float64)
    extreme = extreme_points(threat, x, PointRNG(0, index=torch.tensor([0])))
    noise = PointRNG(0, index=torch.tensor([0])).normal(20, dtype=torch.float64)
    assert threat.contains(extreme, x).all()
    uniform = torch.cat([threat.random_start(x, PointRNG(1, index=torch.tensor([i]))) for i in range(500)])
    assert ((uniform - x) @ noise.T).max() < (extreme - x) @ noise.T


def test_nothing_can_be_planted_in_constant_features():
    result = power(network(Layer(lambda x: 0 * x)), APGD(LINF, steps=2), count=4)
    assert (result.failed, result.share.total, result.random.total) == (4, 0, 0)
    assert str(result) == "not measured: no adversarial input could be planted at 4 points"
    assert not [*diagnose_power(result)]


# --- layers -----------------------------------------------------------------------------------------------------------


def test_the_replaced_layer():
    x = torch.rand(2, 1, 8, 8)
    mlp = MLP((1, 8, 8), 4)
    assert find_layer(mlp, x) == ("head", mlp.head)
    wrapped = nn.Sequential(Layer(lambda x: x / 2), CentroidNet((1, 8, 8), 3))
    assert find_layer(wrapped, x) == ("1.head", wrapped[1].head)
    scaled = network(after=Layer(lambda g: g.relu() * 9))
    assert find_layer(scaled, x)[0] == "3"
    mixed = network(after=Layer(lambda g: g @ torch.ones(5, 5)))  # needs five classes
    convolutional = nn.Sequential(nn.Conv2d(1, 5, 8), nn.Flatten())
    assert find_layer(mixed, x) == find_layer(convolutional, x) == ("logits", None)
    for model in (mixed, convolutional):
        assert power(model, APGD(LINF), count=4).layer == "logits"
    shared = nn.Linear(5, 5)
    twice = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), shared, nn.ReLU(), shared)
    assert find_layer(twice, x) == ("logits", None)  # a readout would replace both
    assert find_layer(twice[:3], x) == ("2", shared)
    linear = nn.Linear(64, 5)
    assert find_layer(linear, x.flatten(1)) == ("model", linear)


def test_what_follows_the_layer_stays():
    model = network(after=Layer(lambda g: 7 * g))
    test = plant(model, model[3], LINF, torch.rand(1, 1, 8, 8), torch.tensor(0))
    x = torch.rand(5, 1, 8, 8)
    expected = 7 * test.readout(model[:3](x))
    torch.testing.assert_close(BinarizedModel(model, model[3], test.readout)(x), expected)
    assert model(x).shape == (5, 5)
    assert not model[3]._forward_hooks


# --- healthy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threat", THREATS[:3], ids=lambda threat: threat.norm)
def test_a_linear_model_has_no_secrets(threat):
    """The optimum over the ball is at least as good as the witness, and a good attack on a linear model reaches it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 5))
    result = power(model, APGD(threat))
    assert result.share.correct == result.share.total >= 6
    assert result.random.correct + result.share.total == result.random.total == 12
    assert not [*diagnose_power(result)]


@pytest.mark.parametrize("attack", [APGD(LINF), APGD(LINF, targets=9), FAB(LINF, targets=9), FAB(LINF), PGD(LINF)])
def test_healthy_networks(attack):
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 5),
    )  # fmt: skip
    result = power(net, attack)
    assert result.share.total >= 9
    assert result.share.correct >= result.share.total - 1


def test_attacks_that_select_rows_run_one_point_at_a_time():
    result = power(network(), {"RayS": RayS(LINF, queries=20), "FGSM": FGSM(LINF)}, count=4)
    assert result.share.total == 4


# --- defects ----------------------------------------------------------------------------------------------------------

CE, SHORT = APGD(LINF, steps=20), PGD(LINF, steps=1, step_size=1e-4, start="clean")
DEFECTS = {
    "rounded inputs": (lambda: network(Layer(lambda x: Rounding.apply(x, 12))), CE),
    "rounded features": (lambda: network(middle=Layer(lambda z: Rounding.apply(z, 20))), CE),
    "saturated softmax": (lambda: network(after=Layer(lambda g: 1e6 * g)), CE),
    "detached": (lambda: network(Layer(lambda x: x.detach() + 0 * x)), CE),
    "dead relu on logits": (lambda: network(after=Layer(lambda g: (g - 100).relu() + 1e-9 * g.detach())), CE),
    "shattered": (lambda: network(Layer(lambda x: x + 0.01 * torch.sin(1e4 * x))), CE),
    "short attack": (network, SHORT),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_show(name):
    make, attack = DEFECTS[name]
    result = power(make(), attack)
    assert result.share.total >= 6
    assert result.share.value < 0.7
    (warning,) = diagnose_power(result)
    assert warning.kind == "low power"
    assert f"{result.share.correct} of {result.share.total}" in warning.message


def test_winners_take_all_is_harder_than_relu():
    """With k winners of many, the loss is discontinuous: APGD misses inputs that it finds in the same net with ReLU."""
    torch.manual_seed(0)
    healthy, masked = (power(network(middle=middle, hidden=256), CE) for middle in (None, Layer(winners)))
    assert masked.share.value < healthy.share.value == 1


def test_an_attack_without_gradients_restores_power():
    model, attacks = DEFECTS["rounded inputs"][0](), {"CE": CE, "Square": Square(LINF, queries=300, horizon=None)}
    with torch.random.fork_rng():
        white_box = power(model, CE, count=6)
    assert power(model, attacks, count=6).share.value > white_box.share.value + 0.2


def test_models_without_gradients_are_refused():
    model = network(Layer(torch.Tensor.detach))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="expected logits with a gradient"):
        power(model, CE, count=2)
    assert power(model, Square(LINF, queries=2), count=2).share.total == 2


# --- random points ----------------------------------------------------------------------------------------------------


def test_tests_that_random_points_solve_do_not_count():
    """In the plane, a threshold close to one of many random points does not keep others out."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    split = MemorySplit(torch.full((10, 1, 1, 2), 0.5), torch.zeros(10).long())
    result = measure_power(model, split, {"CE": APGD(ThreatModel("l2", 0.1))}, points=10)
    assert result.random.total == 10
    assert result.random.correct >= 5
    assert result.random.correct + result.share.total == result.random.total


def test_random_models_use_several_passes():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + 0.01 * torch.randn_like(x)

    result = power(network(Noisy()), APGD(LINF, steps=10, eot=4), count=6)
    assert result.share.total >= 4
    assert result.share.correct >= result.share.total - 1


# --- the result -------------------------------------------------------------------------------------------------------


def test_results_depend_on_the_seed_not_on_batches():
    model, split = network(middle=Layer(winners)), points(12)
    model, split = model.double(), MemorySplit(split.images.double(), split.labels)
    attacks = {"CE": APGD(LINF, steps=3), "Square": Square(LINF, queries=5)}

    def run(**options):
        result = measure_power(model, split, attacks, points=8, **options)
        return result.share, result.random, result.forward, result.backward

    assert run(batch_size=64) == run(batch_size=64) == run(batch_size=3)
    assert run(batch_size=64) != run(batch_size=64, seed=1)


def test_progress_is_reported():
    reports = []
    result = power(network(), CE, count=3, on_progress=lambda *report: reports.append(report))
    assert reports[:3] == [("planting", 1, 3), ("planting", 2, 3), ("planting", 3, 3)]
    assert reports[-1] == ("power", result.share.correct, result.share.total)


def test_a_single_point_is_enough():
    result = power(network(), CE, count=1)
    assert (result.share.correct, result.share.total, result.random.total) == (1, 1, 1)


def test_passes_are_counted_and_the_model_stays_as_it_was():
    model = network().train()
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    result = power(model, APGD(LINF, steps=2), count=3)
    assert result.forward == sum(calls) > 3 * 164
    assert 0 < result.backward < result.forward
    assert model.training
    assert not any(module._forward_hooks for module in model)


def test_warnings_need_significance():
    def warns(correct, total):
        power = Power(share=Accuracy(correct, total), random=Accuracy(0, total), failed=0, layer="", forward=0,
                      backward=0, seconds=0.0)  # fmt: skip
        return bool([*diagnose_power(power)])

    assert [warns(*counts) for counts in ((50, 50), (45, 50), (44, 50), (4, 5), (1, 5))] == [
        False, False, True, False, True
    ]  # fmt: skip


def test_no_attacks_and_no_points_are_refused():
    with pytest.raises(InputError, match="at least one attack"):
        measure_power(network(), points(2), {})
    with pytest.raises(InputError, match="at least one point"):
        measure_power(network(), points(2), {"CE": CE}, torch.tensor([], dtype=torch.long))
