"""Power iteration: from below, to the truth, with the truth's gradient."""

import pytest
import torch
import torch.nn.functional as F

from atoll.certify.gloro import GloRo
from atoll.certify.power import LipschitzEstimator, pair_distances
from atoll.errors import InputError
from atoll.models import MLP, LiResNet, PreActResNet, SmallConvNet, ViT


def model(kind="small"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "small":
            return SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=8, activation="minmax").double()
        net = LiResNet((1, 8, 8), 3, depth=2, width=4, features=8, block=kind).double()
        for parameter in net.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        return net


@pytest.mark.parametrize("kind", ["small", "linear", "conventional", "plain"])
def test_estimates_rise_to_the_proven_bound_and_stay_below_it(kind):
    net = model(kind)
    proven = GloRo.proven(net).constants.lipschitz
    estimate = LipschitzEstimator(net, iterations=1)
    off = ~torch.eye(3, dtype=torch.bool)
    ratios = [(estimate()[0].detach() / proven)[off] for _ in range(150)]
    assert all((ratio <= 1).all() for ratio in ratios)
    assert ratios[0].max() < 0.9  # a certificate built on a few steps would be false
    assert ratios[-1].min() > 0.995


def dense(conv, shape):
    n = torch.Size(shape).numel()
    return F.conv2d(torch.eye(n).double().view(n, *shape), conv.weight, None, conv.stride, conv.padding).flatten(1)


def test_gradient_is_that_of_dense_singular_values():
    net = model()
    pairs, whole = LipschitzEstimator(net, iterations=3000)()
    body = net.body
    norms = [dense(body[0], (1, 8, 8)), dense(body[2], (4, 4, 4)), body[5].weight]
    product = torch.stack([torch.linalg.matrix_norm(m, 2) for m in norms]).prod()
    truth = torch.cdist(net.head.weight, net.head.weight) * product
    torch.testing.assert_close(pairs, truth, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole, torch.linalg.matrix_norm(net.head.weight, 2) * product, rtol=1e-6, atol=1e-9)
    parameters = [body[0].weight, body[2].weight, body[5].weight, net.head.weight]
    for ours, theirs in ((pairs[0, 1], truth[0, 1]), (pairs.sum(), 2 * truth[[0, 0, 1], [1, 2, 2]].sum())):
        gradients = [torch.autograd.grad(value, parameters, retain_graph=True) for value in (ours, theirs)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_vectors_stay_from_call_to_call_and_outside_the_model():
    net = model()
    before = set(net.state_dict())
    estimate = LipschitzEstimator(net)
    assert set(net.state_dict()) == before
    assert len(list(estimate.parameters())) == 0
    start = {name: v.clone() for name, v in estimate.state_dict().items()}
    estimate(update=False)
    assert all(torch.equal(v, start[name]) for name, v in estimate.state_dict().items())
    converged = estimate.converged(50)
    assert all(torch.equal(v, start[name]) for name, v in estimate.state_dict().items())
    twice = estimate.converged(2)
    first, second = estimate()[0], estimate()[0]
    assert torch.equal(twice, second)
    assert (first < second)[0, 1]
    assert (second < converged)[0, 1]
    again = LipschitzEstimator(net)
    again.load_state_dict(estimate.state_dict())
    assert torch.equal(again()[0], estimate()[0])


def test_a_layer_that_is_used_again_has_other_vectors():
    """Their names are part of checkpoints."""

    class Again(MLP):
        def features(self, x):
            return self.body[1](self.body[1](x).relu())

    estimate = LipschitzEstimator(Again((4,), 3, hidden=(4,)))
    assert list(estimate.state_dict()) == ["v_body_1", "v_body_1_2", "v_head"]


def test_distances_between_equal_rows_have_a_gradient():
    weight = torch.zeros(3, 2, requires_grad=True)
    pair_distances(weight).sum().backward()
    assert weight.grad.isfinite().all()


def test_models_without_constants_are_refused():
    model = ViT((3, 8, 8), 3, patch_size=4, width=8, depth=1, heads=2)
    with pytest.raises(InputError, match="cannot be trained with a Lipschitz bound: native_layer_norm cannot"):
        LipschitzEstimator(model)


@pytest.mark.parametrize("kind", [pytest.param("preact", marks=pytest.mark.slow), "shared", "parametrized", "tanh"])
def test_estimates_follow_the_graph(kind):
    """Residual blocks, shared and parametrized layers, and a head that is not linear: at most the proven constant."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = PreActResNet((3, 8, 8), 3, width=4) if kind == "preact" else MLP((4,), 3, hidden=(4, 4))
    if kind == "shared":
        net.body = torch.nn.Sequential(*[net.body[1], torch.nn.ReLU()] * 3)
    if kind == "parametrized":
        torch.nn.utils.parametrizations.spectral_norm(net.body[1])
    if kind == "tanh":
        net.head = torch.nn.Sequential(net.head, torch.nn.Tanh())
    net = net.double().eval()
    proven = GloRo.proven(net).constants.lipschitz
    estimate = LipschitzEstimator(net).converged(100)
    off = ~torch.eye(3, dtype=torch.bool)
    assert (estimate <= proven)[off].all()
    assert (estimate >= 0.99 * proven)[off].all()
