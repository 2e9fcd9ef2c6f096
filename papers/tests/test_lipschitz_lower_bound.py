"""Lower bounds of Lipschitz constants: exact for linear models, close to brute force in the plane, never too high."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.certify import certifier_for
from atoll.errors import InputError
from atoll.models import MLP, LiResNet, SmallConvNet
from atoll_papers.lipschitz_lower_bound import CLOSEST, global_lower, local_lower, slopes, tightness


def net(seed, hidden=(6,), activation="relu", inputs=2, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP((inputs,), classes, hidden=hidden, activation=activation).double()


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
    x = torch.rand(8, inputs, dtype=torch.float64)
    w = model.head.weight.detach()
    truth = torch.cdist(w, w)
    assert global_lower(model, x).largest == pytest.approx(float(truth.max()), rel=1e-3)
    found = local_lower(model, x, 0.1)
    top = model(x).argmax(1)
    torch.testing.assert_close(found.values, truth[top].amax(1), rtol=1e-2, atol=0)
    assert (found.values <= truth[top].amax(1) * (1 + 1e-9)).all()


@pytest.mark.parametrize("activation", ["relu", "minmax"])
@pytest.mark.parametrize("seed", [0, 2])
def test_the_plane_has_been_searched_through(seed, activation):
    """Between pairs of points a difference of logits cannot be steeper than its gradient at some point."""
    model = net(seed, activation=activation)
    x = torch.rand(24, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    truth = float(gradients(model, grid((0, 0), (1, 1), 200)).max())
    assert 0.97 * truth < global_lower(model, x).largest <= truth * (1 + 1e-9)
    eps = 0.2
    found, top = local_lower(model, x, eps), model(x).argmax(1)
    shares = []
    for row in range(6):
        around = grid(x[row] - eps, x[row] + eps, 120).clamp(0, 1)
        around = around[(around - x[row]).norm(dim=1) <= eps]
        shares.append(float(found.values[row]) / float(gradients(model, around)[:, top[row]].max()))
    assert max(shares) <= 1 + 1e-9
    # One ascent may end below the top: a region that only touches the ball shows no way into it.
    assert sum(share > 0.9 for share in shares) >= 5


@pytest.mark.parametrize("which", ["global", "local"])
def test_pairs_are_witnesses(which):
    """They lie where they should, are not too close, and give the value when it is computed once more."""
    model, eps = net(3, inputs=4), 0.3
    x = torch.rand(10, 4, dtype=torch.float64)
    found = global_lower(model, x, steps=50) if which == "global" else local_lower(model, x, eps, steps=50)
    a, b = found.a, found.b
    assert (torch.stack([a, b]) >= 0).all()
    assert (torch.stack([a, b]) <= 1).all()
    distance = (a - b).norm(dim=1)
    assert (distance >= CLOSEST).all()
    change = (model(a) - model(b)).detach()
    pairs = (change[:, :, None] - change[:, None]).abs()
    if which == "local":
        assert (torch.stack([a - x, b - x]).norm(dim=2) <= eps).all()
        pairs = pairs[torch.arange(10), model(x).argmax(1)][:, None]
    torch.testing.assert_close(found.values, pairs.amax((1, 2)) / distance)


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), activation=st.sampled_from(["relu", "minmax", "softplus"]), eps=st.floats(0.01, 1))
def test_lower_is_below_upper(seed, activation, eps):
    model = net(seed, hidden=(4, 4), activation=activation, inputs=3)
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    upper = certifier_for(model).constants.lipschitz
    assert global_lower(model, x, steps=15).largest <= float(upper.max())
    top = model(x).argmax(1)
    assert (local_lower(model, x, eps, steps=15).values <= upper[top].amax(1)).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: SmallConvNet((1, 8, 8), 3, widths=(4, 4), hidden=8, batch_norm=True),
        lambda: LiResNet((1, 8, 8), 3, depth=1, width=4, features=8),
    ],
)
def test_a_row_of_table_5_3(build):
    found = tightness(build().double(), torch.rand(6, 1, 8, 8, dtype=torch.float64), 0.3, steps=60)
    assert 0 < found.local <= found.lower * 1.5
    assert 0.02 * found.upper < found.lower <= found.upper


def test_rows_do_not_depend_on_each_other_and_nothing_is_left_behind():
    model = net(0).train()
    x = torch.rand(5, 2, dtype=torch.float64)
    whole = local_lower(model, x, 0.1, steps=20)
    torch.testing.assert_close(local_lower(model, x[:2], 0.1, steps=20).values, whole.values[:2])
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_nonsense_is_refused():
    model, x = nn.Linear(2, 2), torch.rand(1, 2)
    with pytest.raises(InputError, match="expected at least two inputs"):
        global_lower(model, x)
    with pytest.raises(InputError, match="eps: expected a number >"):
        local_lower(model, x, 0.0)
    assert slopes(model, x, x).tolist() == [0]
