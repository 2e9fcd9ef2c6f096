"""What the strategies of boundary search share: what they have found and spent, and bisection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.attacks.iterative import Points, where_rows
from atoll.threat import per_point

NONE = "none"  # the method of points for which nothing was found


@dataclass
class Found:
    """What a search has found for some points (their own place where it has not), how, and at which cost."""

    adv: Tensor
    method: list[str]
    forward: Tensor
    backward: Tensor

    @staticmethod
    def nothing(points: Points) -> Found:
        zeros = torch.zeros_like(points.y)
        return Found(points.x.clone(), [NONE] * len(points), zeros, zeros.clone())

    def take(self, rows: Tensor, adv: Tensor, method: str | Sequence[str]) -> None:
        """Note what was found for some of the points."""
        self.adv[rows] = adv
        for number, row in enumerate(rows.tolist()):
            self.method[row] = method if isinstance(method, str) else method[number]

    def spend(self, rows: Tensor, forward: int | Tensor, backward: int = 0) -> None:
        """Note what that cost."""
        self.forward[rows] += forward
        self.backward[rows] += backward


def bisect(
    model: nn.Module, x: Tensor, y: Tensor, ends: Tensor, classes: Tensor, halvings: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides of the boundary on the way from each point to an end of another class, and the class across.

    Every point that is returned has gone through the model as it is; costs ``halvings`` forward passes.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[0.0], [1.0]]))  # the boundary is at 0
    >>> bisect(model, torch.tensor([[-1.0]]), torch.tensor([0]), torch.tensor([[2.0]]), torch.tensor([1]), 2)
    (tensor([[-0.2500]]), tensor([[0.5000]]), tensor([1]))
    """
    inside, across = x, ends
    low = x.new_zeros(len(x))
    high = torch.ones_like(low)
    for _ in range(halvings):
        middle = (low + high) / 2
        candidate = x + per_point(middle, x) * (ends - x)
        with torch.no_grad():
            predicted = model(candidate).argmax(1)
        over = predicted != y
        inside, across = where_rows(over, inside, candidate), where_rows(over, candidate, across)
        classes = torch.where(over, predicted, classes)
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    return inside, across, classes
