"""Radii against brute force in the plane, and against exact distances of linear models."""

import copy
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import nn

from atoll.certify import GloRo
from atoll.certify.gloro import PairwiseLipschitz, radius
from atoll.errors import InputError
from atoll.graph import capture
from atoll.losses.certified import abstain_logit
from atoll.models import MLP, LiResNet, PreActResNet, ViT


def plane(activation="minmax", seed=0, scale=3.0):
    """A net on the plane with a crooked boundary."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MLP((2,), 3, hidden=(8, 8), activation=activation, bounds=None).double()
        for layer in model.body:
            if isinstance(layer, nn.Linear):
                layer.weight.data *= scale
                layer.bias.data *= scale
        x = 4 * torch.rand(30, 2, dtype=torch.float64) - 2
    return model, x


@torch.no_grad()
def nearest_change(model, x, limit, rings=200, directions=360):
    """The distance of the closest point with another prediction on a fine polar grid; infinity if there is none."""
    angle = torch.arange(directions, dtype=torch.float64) * (2 * math.pi / directions)
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    top, nearest = model(x).argmax(1), torch.full((len(x),), math.inf, dtype=torch.float64)
    for distance in torch.linspace(0, limit, rings + 1, dtype=torch.float64)[1:]:
        (rows,) = nearest.isinf().nonzero(as_tuple=True)  # those without a change so far
        around = (x[rows, None] + distance * circle).flatten(0, 1)
        changed = (model(around).argmax(1).view(-1, directions) != top[rows, None]).any(1)
        nearest[rows[changed]] = distance
    return nearest


@pytest.mark.parametrize("activation", ["minmax", "relu", "softplus"])
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_changes_within_the_radius(activation, seed):
    model, x = plane(activation, seed)
    certificate = GloRo.proven(model)(x)
    nearest = nearest_change(model, x, 2.0)
    assert nearest.isfinite().any()  # the search does find changes
    assert (certificate.radius > 0).all()
    assert (certificate.radius <= nearest).all()


def test_a_linear_model_is_certified_to_its_exact_distance():
    model = MLP((3,), 4, hidden=()).double()
    x = torch.rand(50, 3, dtype=torch.float64)
    double = GloRo.proven(model)(x)
    w, f = model.head.weight.detach(), model(x).detach()
    for point in range(50):
        j = int(f[point].argmax())
        truth = min(float((f[point, j] - f[point, i]) / (w[j] - w[i]).norm()) for i in range(4) if i != j)
        assert double.radius[point] == pytest.approx(truth, rel=1e-9)
        assert double.radius[point] < truth  # rounding is on the safe side
    single = GloRo.proven(model.float())(x.float())
    assert (single.radius <= double.radius).all()
    assert (single.radius > double.radius - 1e-4).all()


logits = st.lists(st.floats(-5, 5), min_size=2, max_size=5)


@given(f=logits, eps=st.floats(0.01, 2), seed=st.integers(0, 100))
def test_definition_17(f, eps, seed):
    """The prediction stands against the abstain logit exactly where the radius reaches eps."""
    f = torch.tensor([f], dtype=torch.float64)
    w = torch.randn(f.shape[1], 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    k = torch.cdist(w, w)
    certified = float(radius(f, torch.ones(1), PairwiseLipschitz.estimated(k)))
    gap = float(f.max() - abstain_logit(f, eps * k))
    if abs(gap) > 1e-9:
        assert (gap > 0) == (certified > eps)


def test_ties_and_constant_differences():
    k = PairwiseLipschitz.estimated(torch.tensor([[0.0, 0.0], [0.0, 0.0]]))
    assert radius(torch.tensor([[1.0, 1.0]]), torch.ones(1), k).tolist() == [0]
    assert radius(torch.tensor([[1.0, 0.5]]), torch.ones(1), k).tolist() == [math.inf]
    answer = GloRo(nn.Linear(2, 2), PairwiseLipschitz.estimated(torch.ones(2, 2)))(torch.zeros(1, 2)).answer(1e9)
    assert answer.tolist() == [-1]


def test_models_that_cannot_be_certified_say_why():
    for model, sentence in (
        (ViT((3, 8, 8), 3, patch_size=4, width=8, depth=1, heads=2), "native_layer_norm cannot be certified"),
        (nn.Linear(2, 3), "shape: Linear has no input_shape"),
        (MLP((2,), 3).bfloat16(), "certificates require float32 or float64, got torch.bfloat16"),
    ):
        with pytest.raises(InputError) as info:
            GloRo.proven(model)
        assert sentence in str(info.value)


def test_any_module_is_certified_as_it_runs():
    class Twice(MLP):
        def features(self, x):
            return 2 * super().features(x)

    plain, twice = MLP((2,), 3), Twice((2,), 3)
    twice.load_state_dict(plain.state_dict())
    torch.testing.assert_close(GloRo.proven(twice).constants.lipschitz, 2 * GloRo.proven(plain).constants.lipschitz)
    plain.head = nn.Sequential(plain.head, nn.Tanh())
    assert GloRo.proven(plain).lipschitz > 0
    assert GloRo.proven(PreActResNet((3, 8, 8), 3, width=4)).lipschitz > 0


def test_a_certificate_carries_the_digest_of_its_function():
    model, x = MLP((2,), 3), torch.rand(4, 2)
    certifier = GloRo.proven(model)
    before = certifier(x)
    assert before.function == certifier.model.digest != ""
    model.head.weight.data *= -1  # a change of the model changes neither the captured function nor its certificates
    assert torch.equal(certifier(x).radius, before.radius)
    assert GloRo.proven(model)(x).function != before.function
    certifier.model.graph_module.constant_0.mul_(2)
    with pytest.raises(InputError, match="captured model was modified"):
        certifier(x)


def test_infinite_margins_and_inputs_that_may_overflow_prove_nothing():
    k = PairwiseLipschitz.estimated(torch.ones(2, 2))
    logits = torch.tensor([[math.inf, 0.0], [math.nan, 0.0], [1.0, 0.0], [1.0, 0.0]])
    size = torch.tensor([1.0, 1.0, 5.0, 20.0])
    assert radius(logits, size, k, 5.5).tolist() == [0, 0, 0.5, 0]


def test_float32_needs_all_of_float32():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(InputError, match="otherwise use float64"):
            GloRo.proven(MLP((2,), 3))
        GloRo.proven(MLP((2,), 3).double())
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_normalized_head_counts_as_it_is_used():
    model = LiResNet((1, 8, 8), 3, depth=1, width=4, features=8)
    before = GloRo.proven(model).constants.lipschitz
    model.head.weight.data *= 10
    torch.testing.assert_close(GloRo.proven(model).constants.lipschitz, before, rtol=1e-6, atol=0)


def test_layers_have_a_table():
    certifier = GloRo.proven(LiResNet((1, 8, 8), 3, depth=1, width=4, features=8))
    assert [layer.name for layer in certifier.layers][:3] == ["body.0", "body.2", "body.4"]
    assert {layer.method for layer in certifier.layers} == {"exact"}


# --- rounding errors


def worst_network(constants, centre):
    """Two logits whose difference falls as fast as allowed, computed with the largest error in either direction.

    The difference of exact logits at an input x is ``K x + centre``, so the class changes where x is small.
    """
    k, a, b = (float(matrix[0, 1]) for matrix in (constants.lipschitz, constants.relative, constants.absolute))

    def computed(x, sign):
        difference = k * (x - centre) + sign * (a * abs(x) + b)
        return torch.tensor([[difference, 0.0]], dtype=torch.float64)

    return computed


@pytest.mark.parametrize("relative", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("absolute", [0.0, 0.2])
def test_the_radius_is_right_up_to_the_worst_rounding(relative, absolute):
    """Errors much larger than those of a computer: the certificate holds, and is exact on the line away from zero."""

    def pair(value):
        return torch.tensor([[0.0, value], [value, 0.0]], dtype=torch.float64)

    constants = PairwiseLipschitz(pair(2.0), pair(relative), pair(absolute))
    network = worst_network(constants, -5.0)
    for x in (-1.0, -2.0, -3.0):
        logits = network(x, +1)  # the margin is computed too large here, and too small at the neighbor
        certified = float(radius(logits, torch.tensor([abs(x)]), constants))
        nearest = brentq(lambda r, x=x: float(network(x - r, -1)[0, 0]), 0, 100)
        assert certified == pytest.approx(nearest, rel=1e-9)


def test_errors_of_differences_of_logits_cover_float32_and_are_those_of_the_textbook():
    """Long sums in float32 against the same in float64, and against their worst case."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = MLP((400,), 3, hidden=(50,), bounds=None), torch.randn(100, 400)
    constants, exact = GloRo.proven(net).constants, copy.deepcopy(net).double()
    with torch.no_grad():
        f, truth = net(x).double(), exact(x.double())
    error = ((f[:, :, None] - f[:, None]) - (truth[:, :, None] - truth[:, None])).abs()
    assert (error <= constants.relative * x.double().norm(dim=1)[:, None, None] + constants.absolute).all()
    # A sum of n terms has an error of at most n u |w| |x| (Higham, 2002); a difference of two has root 2 times that.
    linear = MLP((400,), 2, hidden=(), bounds=None)
    linear.head.weight.data = torch.full((2, 400), 0.5)
    textbook = 400 * 2.0**-24 * (2**0.5 * 0.5 * 800**0.5)
    assert textbook <= float(GloRo.proven(linear).constants.relative[0, 1]) <= 1.1 * textbook


def test_errors_of_large_biases_count():
    """Logits of about 1e6 in float32 are off by up to 1/32."""
    net, x = MLP((4,), 2, hidden=(), bounds=None), torch.linspace(0, 1, 400).view(100, 4)
    net.head.bias.data = torch.tensor([1e6, 1e6 - 3])
    constants, exact = GloRo.proven(net).constants, copy.deepcopy(net).double()
    with torch.no_grad():
        error = (net(x).double() - exact(x.double())).diff(dim=1).abs()[:, 0]
    assert 0.01 < float(error.max()) <= float(constants.absolute[0, 1])


def test_weights_that_cancel_keep_their_rounding_error():
    """A head times 0.1 plus a head that cancels it in float64, but not exactly."""
    a, b = torch.tensor([[0.3], [0.7]], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)

    class Cancel(nn.Module):
        def forward(self, x):
            return F.linear(x, a) * b + F.linear(x, -(a * b))

    rows = [Fraction(float(each)) * Fraction(float(b)) - Fraction(float(each * b)) for each in a]
    exact = abs(rows[0] - rows[1])
    assert exact > 0
    net = capture(Cancel(), (1,), dtype=torch.float64)
    assert exact <= Fraction(float(GloRo.proven(net).constants.lipschitz[0, 1])) <= exact + Fraction(1, 10**14)


@pytest.mark.parametrize("scale", [1e-100, 1e-170, 1e-200])
def test_rounding_counts_for_inputs_whose_squares_underflow(scale):
    """Logits that differ only by rounding prove nothing, whatever the size of the input."""
    layer = nn.Linear(3, 2, bias=False).double()
    layer.weight.data = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1 + 2.0**-52, 1 - 2.0**-52]], dtype=torch.float64)
    x = scale * torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    certifier = GloRo.proven(nn.Sequential(layer).eval(), (3,))
    assert not (certifier(x).radius > 0).any()
