"""Which class threatens a prediction most, and how often that changes (thesis, figure 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.certify.gloro import GloRo, PairwiseLipschitz, radius_per_class
from atoll.modules import evaluation_mode


@torch.no_grad()
def threatening(certifier: GloRo, x: Tensor) -> Tensor:
    """The class that ends the certified radius of each input: the i that minimises :math:`(f_j - f_i) / K_{ji}`.

    >>> model = nn.Linear(1, 3)
    >>> _ = model.weight.data.zero_(), model.bias.data.copy_(torch.tensor([3.0, 2.0, 1.0]))
    >>> threatening(runner_up(model, 3), torch.zeros(1, 1))
    tensor([1])
    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]]))
    >>> threatening(GloRo(model, constants), torch.zeros(1, 1))  # its logit is further away, but moves faster
    tensor([2])
    """
    x = x.to(next(certifier.model.parameters()))
    with evaluation_mode(certifier.model):
        logits = certifier.model(x)
    size = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return radius_per_class(logits, size, certifier.constants).argmin(1)


def runner_up(model: nn.Module, num_classes: int) -> GloRo:
    """All differences of logits taken for equally steep, so that the second-highest logit threatens most: no proof."""
    return GloRo(model, PairwiseLipschitz.estimated(torch.ones(num_classes, num_classes)))


def switching(before: GloRo, after: GloRo, x: Tensor) -> float:
    """The share of inputs whose threatening class is another one in another model, such as an epoch later.

    >>> model, other = nn.Linear(1, 3), nn.Linear(1, 3)
    >>> for net, bias in ((model, [3.0, 2.0, 1.0]), (other, [3.0, 1.0, 2.0])):
    ...     _ = net.weight.data.zero_(), net.bias.data.copy_(torch.tensor(bias))
    >>> switching(runner_up(model, 3), runner_up(other, 3), torch.zeros(4, 1))
    1.0
    """
    return share_changed(threatening(before, x), threatening(after, x))


def share_changed(before: Tensor, after: Tensor) -> float:
    """The share of entries that differ.

    >>> share_changed(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]))
    0.25
    """
    return float((before != after).double().mean())
