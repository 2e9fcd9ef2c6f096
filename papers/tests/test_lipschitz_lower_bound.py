"""Lower bounds of Lipschitz constants: exact for linear models, close to grid search in the plane, never too high."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify import certifier_for
from atoll.errors import InputError
from atoll.models import MLP, LiResNet, SmallConvNet
from atoll_papers.lipschitz_lower_bound import CLOSEST, difference_quotients, global_lower_bound, local_lower_bound


def net(seed, hidden=(6,), activation="relu", inputs=2, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP((inputs,), classes, hidden=hidden, activation=activation).double()


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model, x):
    """The norms of the gradients of all differences of logits, ``(points, classes, classes)``."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda point: model(point[None])[0]))(x).flatten(2)
    return (jacobian[:, :, None] - jacobian[:, None]).norm(dim=3).detach()


def grid(low, high, count):
    return torch.cartesian_prod(
        *(torch.linspace(a, b, count, dtype=torch.float64) for a, b in zip(low, high, strict=True))
    )


@pytest.mark.parametrize("inputs", [2, 5])
def test_linear_models_are_exact(inputs):
    model = net(0, hidden=(), inputs=inputs, classes=4)
    x = rand(8, inputs)
    w = model.head.weight.detach()
    truth = torch.cdist(w, w)
    assert global_lower_bound(model, x).largest == pytest.approx(float(truth.max()), rel=1e-3)
    local = local_lower_bound(model, x, 0.1)
    top = model(x).argmax(1)
    torch.testing.assert_close(local.values, truth[top].amax(1), rtol=1e-2, atol=0)
    assert (local.values <= truth[top].amax(1) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("activation", "seed"), [("relu", 0), ("minmax", 2)])
def test_close_to_a_grid_search_in_the_plane(seed, activation):
    """Between pairs of points a difference of logits cannot be steeper than its gradient at some point."""
    model = net(seed, activation=activation)
    x = rand(24, 2, seed=seed)
    truth = float(gradients(model, grid((0, 0), (1, 1), 200)).max())
    assert 0.97 * truth < global_lower_bound(model, x).largest <= truth * (1 + 1e-9)
    eps = 0.2
    local, top = local_lower_bound(model, x, eps), model(x).argmax(1)
    shares = []
    for row in range(6):
        around = grid(x[row] - eps, x[row] + eps, 120).clamp(0, 1)
        around = around[(around - x[row]).norm(dim=1) <= eps]
        shares.append(float(local.values[row]) / float(gradients(model, around)[:, top[row]].max()))
    assert max(shares) <= 1 + 1e-9
    # An ascent may miss the maximum in a region that only touches the ball.
    assert sum(share > 0.9 for share in shares) >= 5


@pytest.mark.parametrize("which", ["global", "local"])
def test_pairs_are_witnesses(which):
    """They lie in the region, are not too close, and have the reported difference quotient."""
    model, eps = net(3, inputs=4), 0.3
    x = rand(10, 4)
    witnesses = (
        global_lower_bound(model, x, steps=50) if which == "global" else local_lower_bound(model, x, eps, steps=50)
    )
    a, b = witnesses.a, witnesses.b
    assert (torch.stack([a, b]) >= 0).all()
    assert (torch.stack([a, b]) <= 1).all()
    distance = (a - b).norm(dim=1)
    assert (distance >= CLOSEST).all()
    change = (model(a) - model(b)).detach()
    pairs = (change[:, :, None] - change[:, None]).abs()
    if which == "local":
        assert (torch.stack([a - x, b - x]).norm(dim=2) <= eps).all()
        pairs = pairs[torch.arange(10), model(x).argmax(1)][:, None]
    torch.testing.assert_close(witnesses.values, pairs.amax((1, 2)) / distance)


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), activation=st.sampled_from(["relu", "minmax", "softplus"]), eps=st.floats(0.01, 1))
def test_lower_is_below_upper(seed, activation, eps):
    model = net(seed, hidden=(4, 4), activation=activation, inputs=3)
    x = rand(4, 3, seed=seed)
    upper = certifier_for(model).constants.lipschitz
    assert global_lower_bound(model, x, steps=15).largest <= float(upper.max())
    top = model(x).argmax(1)
    assert (local_lower_bound(model, x, eps, steps=15).values <= upper[top].amax(1)).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: SmallConvNet((1, 8, 8), 3, widths=(4, 4), hidden=8, batch_norm=True),
        pytest.param(lambda: LiResNet((1, 8, 8), 3, depth=1, width=4, features=8), marks=pytest.mark.slow),
    ],
)
def test_bounds_of_convolutional_networks(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = build().double(), rand(6, 1, 8, 8)
    upper, lower = certifier_for(model).lipschitz, global_lower_bound(model, x, steps=60).largest
    assert 0 < local_lower_bound(model, x, 0.3, steps=60).mean <= lower * 1.5
    assert 0.02 * upper < lower <= upper


def test_rows_are_independent_and_the_model_is_restored():
    model = net(0).train()
    x = rand(5, 2)
    whole = local_lower_bound(model, x, 0.1, steps=20)
    torch.testing.assert_close(local_lower_bound(model, x[:2], 0.1, steps=20).values, whole.values[:2])
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_invalid_arguments():
    model, x = net(0), rand(1, 2)
    with pytest.raises(InputError, match="expected at least two inputs"):
        global_lower_bound(model, x)
    with pytest.raises(InputError, match="eps: expected a number >"):
        local_lower_bound(model, x, 0.0)
    assert difference_quotients(model, x, x).tolist() == [0]
