"""MinMax sorts pairs, and its derivatives of any order and mode are those of PyTorch's minimum and maximum."""

import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.models import MinMax


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
