"""Prototypes of Centroid Nets, and the training examples closest to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.data.base import Split, batches, in_order, to_float
from atoll.models.centroid import CentroidNet
from atoll.modules import evaluation_mode


@dataclass(frozen=True)
class Prototypes:
    """Prototypes of inputs."""

    inputs: Tensor  # one prototype for each input
    centroid: Tensor  # the nearest centroid, in feature space
    distance: Tensor  # distance of the features of the prototype from the centroid


def prototypes(model: CentroidNet, x: Tensor, *, steps: int = 300, lr: float = 0.02) -> Prototypes:
    r"""Find the valid inputs whose features are closest to the nearest centroid of x (thesis, Definition 23).

    .. math:: \arg\min_{x'} \|f(x') - c\|, \quad c = \arg\min_c \|f(x) - c\|

    Without an encoder this is the centroid itself, clipped to the bounds of inputs.  Otherwise Adam searches for it,
    starting at x with the model in evaluation mode, and the best input of the search is returned.

    >>> model = CentroidNet((2,), 2, per_class=1)
    >>> _ = model.head.centroids.data.copy_(torch.tensor([[[0.2, 0.2]], [[0.9, 1.4]]]))
    >>> prototypes(model, torch.tensor([[0.8, 0.8]])).inputs  # 1.4 is not a valid input
    tensor([[0.9000, 1.0000]])
    """
    low, high = model.bounds or (-math.inf, math.inf)
    flat = model.head.centroids.detach().flatten(0, 1)
    with evaluation_mode(model):
        with torch.no_grad():
            centroid = flat[model.head.squares(model.features(x)).flatten(1).argmin(1)]
            best = x.detach().clone()
            if model.is_nearest_prototype:
                stretch = model.head.stretch
                best = (centroid if stretch is None else stretch.inverse(centroid)).view(x.shape).clamp(low, high)
            distance = (model.head.stretched(model.features(best)) - centroid).norm(dim=1)
        if model.is_nearest_prototype:
            return Prototypes(best, centroid, distance)
        moving = best.clone().requires_grad_()
        optimizer = torch.optim.Adam([moving], lr=lr)
        for _ in range(steps + 1):
            gap = (model.features(moving) - centroid).norm(dim=1)
            closer = gap.detach() < distance
            best[closer], distance[closer] = moving.detach()[closer], gap.detach()[closer]
            (moving.grad,) = torch.autograd.grad(gap.square().sum(), moving)
            optimizer.step()
            with torch.no_grad():
                moving.clamp_(low, high)
    return Prototypes(best, centroid, distance)


@torch.no_grad()
def nearest_examples(model: CentroidNet, features: Tensor, split: Split, count: int = 5) -> Tensor:
    """Return the indices of the points of a split with the closest features, ``(batch, count)``, nearest first.

    >>> from atoll.data import MemorySplit
    >>> split = MemorySplit(torch.tensor([[0.0], [0.7], [0.4]]), torch.tensor([0, 1, 0]))
    >>> nearest_examples(CentroidNet((1,), 2), torch.tensor([[0.6]]), split, 2)
    tensor([[1, 2]])
    """
    parts = []
    with evaluation_mode(model):
        for batch in batches(split, in_order(len(split), 512), device=features.device):
            parts.append(torch.cdist(features, model.head.stretched(model.features(batch.x.to(features.dtype)))))
    return torch.cat(parts, 1).topk(min(count, len(split)), largest=False).indices


def prototypes_with_examples(model: CentroidNet, x: Tensor, split: Split, count: int = 5) -> tuple[Prototypes, Tensor]:
    """Return prototypes and the nearest training examples, for ``plots.plot_prototypes``."""
    result = prototypes(model, x)
    rows = nearest_examples(model, result.centroid, split, count)
    examples = to_float(split.fetch(rows.flatten().cpu()))
    return result, examples.view(*rows.shape, *x.shape[1:])
