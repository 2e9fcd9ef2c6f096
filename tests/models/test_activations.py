"""Activations that keep the norms of gradients, against plain formulas; derivatives of any order and mode."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.graph import capture
from atoll.models import GroupSort, Householder, MinMax


def plain(x):
    pairs = x.unflatten(1, (-1, 2))
    return pairs.sort(2).values.flatten(1, 2)


@pytest.mark.parametrize("shape", [(3, 4), (2, 6, 3, 5)])
def test_values_and_derivatives(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.equal(MinMax()(x), plain(x))
    torch.autograd.gradcheck(MinMax(), x, check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda x: MinMax()(x).sin(), x)
    ours, theirs = (torch.func.jacrev(lambda x, f=f: f(x).pow(3))(x.detach()) for f in (MinMax(), plain))
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (
        torch.func.vmap(torch.func.grad(lambda x, f=f: f(x[None]).exp().sum()))(x.detach()) for f in (MinMax(), plain)
    )
    torch.testing.assert_close(ours, theirs)


def test_gradients_keep_their_norm():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    (back,) = torch.autograd.grad(MinMax()(x), x, gradient)
    assert torch.equal(back.sort(1).values, gradient.sort(1).values)


def test_without_gradients_the_same():
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert torch.equal(MinMax()(x), plain(x))


def test_odd_widths_are_refused():
    with pytest.raises(InputError, match="MinMax: expected an even number of channels, got 3"):
        nn.Sequential(MinMax())(torch.zeros(2, 3))


def textbook_householder(z, angle):
    """z if v.z > 0, else z - 2 v (v.z), one pair of channels at a time."""
    out = z.clone()
    for pair, theta in enumerate(angle):
        v = torch.stack([(theta / 2).sin(), -(theta / 2).cos()])
        first, second = z[:, 2 * pair], z[:, 2 * pair + 1]
        dot = v[0] * first + v[1] * second
        out[:, 2 * pair] = torch.where(dot > 0, first, first - 2 * v[0] * dot)
        out[:, 2 * pair + 1] = torch.where(dot > 0, second, second - 2 * v[1] * dot)
    return out


def householder(channels, dtype=torch.float64):
    layer = Householder(channels).to(dtype)
    nn.init.uniform_(layer.angle, -4, 4, generator=torch.Generator().manual_seed(5))
    return layer


@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 3, 5)])
def test_householder_is_the_textbook_reflection(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    layer = householder(shape[1])
    expected = textbook_householder(x, layer.angle)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), (x, layer.angle)) for out in (layer(x), expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[0].norm(), weight.norm())  # an isometry wherever it is smooth


def test_householder_starts_as_the_sorted_pair():
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    expected = x.unflatten(1, (-1, 2)).sort(2, descending=True).values.flatten(1, 2)
    torch.testing.assert_close(Householder(6)(x), expected)


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 12), (2, 12, 2, 3)])
def test_groupsort_sorts_each_group(shape, group):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    y = GroupSort(group)(x)
    for start in range(0, 12, group):
        columns = x.detach()[:, start : start + group].numpy()
        assert (y.detach()[:, start : start + group].numpy() == np.sort(columns, axis=1)).all()
    torch.autograd.gradcheck(GroupSort(group), x)
    gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (back,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(back.flatten().sort().values, gradient.flatten().sort().values)


@pytest.mark.parametrize(
    ("layer", "operations"),
    [
        (householder(4, torch.float32), {"convolution": 2, "abs": 1, "slice": 2, "cat": 1}),
        (GroupSort(), {"sort": 1}),
    ],
    ids=["householder", "groupsort"],
)
def test_captured_graphs_have_operations_that_can_be_certified(layer, operations):
    model = capture(nn.Sequential(layer, nn.Flatten()), (4, 3, 3))
    counts = {name.split(".")[1]: count for name, count in model.operations().items() if name.startswith("aten.")}
    assert {name: counts.get(name) for name in operations} == operations
    assert counts.keys() <= operations.keys() | {"view", "unsqueeze", "sym_size"}


def test_wrong_numbers_of_channels_are_refused():
    with pytest.raises(InputError, match="Householder: expected an even number of channels, got 3"):
        Householder(3)
    with pytest.raises(InputError, match="Householder: expected 4 channels, got 6"):
        Householder(4)(torch.zeros(2, 6))
    with pytest.raises(InputError, match="GroupSort: expected channels divisible by 4, got 6"):
        GroupSort()(torch.zeros(2, 6))
