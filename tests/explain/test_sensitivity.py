"""Lower bounds of Lipschitz constants of attributions against dense singular values."""

import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.explain.attributions import Saliency
from atoll.explain.sensitivity import attribution_lipschitz
from explain_cases import linear, net


class Quadratic(nn.Module):
    """f_0 = x' H x / 2 and f_1 = 0: the saliency map is H x, and its Lipschitz constant the norm of H."""

    def __init__(self, size=5):
        super().__init__()
        h = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.h = nn.Parameter(h + h.T)

    def forward(self, x):
        return torch.stack([(x @ self.h * x).sum(1) / 2, 0 * x.sum(1)], 1)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_lipschitz_estimates_are_below_the_truth_and_close(norm):
    model = Quadratic()
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    h = model.h.detach()
    truth = float(torch.linalg.matrix_norm(h, 2) if norm == "l2" else h.abs().sum(1).max())
    result = attribution_lipschitz(Saliency(model), x, 0, eps=0.2, norm=norm, bounds=None, starts=3, steps=60)
    assert result.value.max() <= truth * (1 + 1e-9)
    assert result.value.min() >= 0.8 * truth
    change = (result.at - x) @ h
    p = 2 if norm == "l2" else torch.inf
    torch.testing.assert_close(result.value, change.norm(p, dim=1) / (result.at - x).norm(p, dim=1))
    assert (result.at - x).norm(p, dim=1).max() <= 0.2 * (1 + 1e-9)


def test_lipschitz_estimates_of_linear_models_are_zero_and_points_do_not_notice_each_other():
    model, x = linear(), net(3)[1]
    assert attribution_lipschitz(Saliency(model), x, eps=0.1, starts=1, steps=2).value.max() < 1e-9
    model, x = net(3)
    whole = attribution_lipschitz(Saliency(model), x, eps=0.1, starts=2, steps=3)
    alone = attribution_lipschitz(Saliency(model), x[1:2], eps=0.1, starts=2, steps=3)
    torch.testing.assert_close(alone.value, whole.value[1:2])
    assert whole.value.max() > 0
    assert whole.at.min() >= 0


def test_nonsense_is_one_sentence():
    model, x = net(2)
    with pytest.raises(InputError, match="eps, starts, steps: expected more than 0"):
        attribution_lipschitz(Saliency(model), x, eps=0)
