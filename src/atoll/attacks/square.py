"""Square Attack (Andriushchenko et al., 2020): random search with squares, no gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.objectives import margin
from atoll.attacks.rows import Points, RowAttack, Rows, choose
from atoll.errors import InputError
from atoll.streams import Streams
from atoll.threat import ThreatModel

# Share of the queries (in ten thousandths) from which the squares cover half as much as before.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


class Square(RowAttack):
    """Proposes a square of +-eps at a random place; keeps it if the margin shrinks.

    The squares get smaller on a fixed schedule.  Being blind to gradients, it cannot be fooled by masking them.  Costs
    one forward pass per query.  Inputs that are not images (points of the plane) are taken as an image of one row.

    Args:
        threat: linf.
        queries: forward passes per point.
        p_init: share of the image that the first squares cover.
    """

    def __init__(self, threat: ThreatModel, *, queries: int = 5000, p_init: float = 0.8) -> None:
        super().__init__(threat)
        if threat.norm != "linf":
            raise InputError(f"Square: expected linf, got {threat.norm}")
        if queries < 1 or not 0 < p_init <= 1:
            raise InputError(f"queries, p_init: expected queries >= 1 and p_init in (0, 1], got {queries}, {p_init}")
        self.queries = queries
        self.p_init = p_init

    def length(self, classes: int) -> int:
        return self.queries

    def share(self, done: Tensor) -> Tensor:
        """Share of the image that a square covers after so many queries.

        >>> Square(ThreatModel(), queries=10_000).share(torch.tensor([10, 11, 51, 8001]))
        tensor([0.8000, 0.4000, 0.2000, 0.0016])
        """
        scaled = done * 10_000 // self.queries
        halved = (scaled[:, None] > torch.tensor(HALVINGS, device=done.device)).sum(1)
        return self.p_init * 0.5**halved

    def begin(self, points: Points, streams: Streams) -> tuple[Tensor, dict[str, Tensor]]:
        """Vertical stripes: the start that filters of convolutions are most sensitive to (section 3.2)."""
        x = _as_images(points.x)
        stripes = streams.rademacher(x.shape[1], 1, x.shape[3], dtype=x.dtype)
        start = self.threat.clamp(x + self.threat.radius * stripes).view_as(points.x)
        return start, {
            "best": points.x,
            "best_value": torch.full((len(points),), -math.inf, dtype=x.dtype, device=x.device),
        }

    @torch.no_grad()
    def advance(self, model: nn.Module, rows: Rows) -> None:
        s = rows.state
        logits = model(rows.adv)
        value = margin(logits, rows.y)
        better = value > s["best_value"]
        s["best"], s["best_value"] = choose(better, rows.adv, s["best"]), torch.where(better, value, s["best_value"])
        rows.success |= logits.argmax(1) != rows.y
        rows.clock += 1
        rows.adv = choose(rows.success, rows.adv, self._propose(rows))

    def _propose(self, rows: Rows) -> Tensor:
        x, best = _as_images(rows.x), _as_images(rows.state["best"])
        _, channels, height, width = x.shape
        draw = rows.streams.uniform(2 + channels, dtype=x.dtype)
        share = self.share(rows.clock)
        if height == 1:
            sides = torch.ones_like(share), (share * width).round().clamp(1, width)
        else:
            side = (share * height * width).sqrt().round().clamp(1, min(height, width) - 1)
            sides = side, side
        rows_in, columns_in = _stretch(height, sides[0], draw[:, 0]), _stretch(width, sides[1], draw[:, 1])
        square = (rows_in[:, :, None] & columns_in[:, None, :])[:, None]
        sign = torch.where(draw[:, 2:] < 0.5, -1.0, 1.0).to(x.dtype)[:, :, None, None]
        proposal = self.threat.clamp(torch.where(square, x + self.threat.radius * sign, best))
        return self.threat.project(proposal, x).view_as(rows.x)


def _stretch(length: int, side: Tensor, u: Tensor) -> Tensor:
    """Which of ``length`` places lie in a stretch of ``side`` at a random position, for each row."""
    first = (u * (length - side + 1)).floor()[:, None]
    place = torch.arange(length, device=u.device)
    return (place >= first) & (place < first + side[:, None])


def _as_images(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.flatten(1)[:, None, None, :]
