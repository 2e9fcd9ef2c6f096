"""Square Attack (Andriushchenko et al., 2020): random search with squares, no gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import IterativeAttack, Points, Rows, put
from atoll.attacks.square_windows import move_mass, tiles
from atoll.errors import InputError
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

# Share of the queries (in ten thousandths) from which the squares cover half as much as before.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@ATTACKS.register()
class Square(IterativeAttack):
    """Changes a square at a random place; keeps the change if the margin shrinks.

    For linf a square is set to +-eps in each channel; for l2 and l1 see ``move_mass``.  The squares get smaller on a
    fixed schedule.  Being blind to gradients, it cannot be fooled by masking them.  A point that stands ends at the
    best candidate seen.  Costs one forward pass per query.  Inputs that are not images (points of the plane) are taken
    as an image of one row.

    Args:
        threat: linf, l2 or l1.
        queries: forward passes per point.
        p_init: share of the image that the first squares cover.
        horizon: queries for which the schedule of sizes is laid out, ``queries`` if None.  The paper's is for 10,000,
            and AutoAttack runs the first 5,000 of it.
    """

    needs_gradients = False

    def __init__(
        self, threat: ThreatModel, *, queries: int = 5000, p_init: float = 0.8, horizon: int | None = 10_000
    ) -> None:
        super().__init__(threat)
        if queries < 1 or not 0 < p_init <= 1:
            raise InputError(f"queries, p_init: expected queries >= 1 and p_init in (0, 1], got {queries}, {p_init}")
        if horizon is not None and horizon < 1:
            raise InputError(f"horizon: expected at least 1, got {horizon}")
        self.queries = queries
        self.p_init = p_init
        self.horizon = horizon

    def length(self, classes: int) -> int:
        return self.queries

    def share(self, done: Tensor) -> Tensor:
        """Share of the image that a square covers after so many queries.

        >>> Square(ThreatModel(), queries=10_000).share(torch.tensor([10, 11, 51, 8001]))
        tensor([0.8000, 0.4000, 0.2000, 0.0016])
        """
        starts = [-(-(share + 1) * (self.horizon or self.queries) // 10_000) for share in HALVINGS]
        halved = torch.bucketize(done, torch.tensor(starts, device=done.device), right=True)
        return torch.tensor([self.p_init * 0.5**n for n in range(len(HALVINGS) + 1)], device=done.device)[halved]

    def begin(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        x = as_images(points.x).contiguous()  # candidates are changed in place, whose memory has to be in order
        if self.threat.norm == "linf":
            # Vertical stripes: what filters of convolutions are most sensitive to (section 3.2).
            stripes = streams.rademacher(x.shape[1], 1, x.shape[3], dtype=x.dtype)
            start = self.threat.clamp(x + self.threat.radius * stripes)
        else:
            start = tiles(self.threat, x, streams)
        return start.view_as(points.x), {
            "best": points.x.clone(),
            "best_value": torch.full((len(points),), -math.inf, dtype=x.dtype, device=x.device),
        }

    @torch.no_grad()
    def advance(self, model: nn.Module, rows: Rows) -> None:
        logits = model(rows.adv)
        s, value, wrong = rows.state, margin(logits, rows.y), logits.argmax(1) != rows.y
        better = (value > s["best_value"]) | wrong
        put(s["best"], better, rows.adv)
        s["best_value"] = torch.where(better, value, s["best_value"])
        rows.success |= wrong
        rows.clock += 1
        proposal = self._propose(rows)
        # Rows that are done keep the best they have seen; a success is the best there is.
        put(proposal, rows.success | (rows.clock >= self.queries), s["best"])
        rows.adv = proposal

    def _propose(self, rows: Rows) -> Tensor:
        x, best = as_images(rows.x), as_images(rows.state["best"])
        _, channels, height, width = x.shape
        share = self.share(rows.clock)
        if self.threat.norm != "linf":
            return move_mass(self.threat, x, best, share, rows.streams).view_as(rows.x)
        draw = rows.streams.uniform(2 + channels, dtype=x.dtype)
        if height == 1:
            side = (share * width).round().clamp(1, width)
        else:
            side = (share * height * width).sqrt().round().clamp(1, max(1, min(height, width) - 1))
        down, across = _stretches((height, width), side, draw[:, :2]).unbind(1)
        # Squares are small most of the time: only their pixels are looked at.
        square = (down[:, :height, None] * width + across[:, None]).flatten(1)[:, None].expand(-1, channels, -1)
        sign = (draw[:, 2:, None] - 0.5).sign()
        moved = self.threat.clamp(x.flatten(2).gather(2, square).add_(sign, alpha=self.threat.radius))
        # In the place of the last candidate: fresh memory costs several times as much as the copy.
        rows.adv.copy_(rows.state["best"]).view(len(x), channels, -1).scatter_(2, square, moved)
        return rows.adv


def _stretches(lengths: tuple[int, ...], side: Tensor, u: Tensor) -> Tensor:
    """The places of stretches of ``side`` at a random position in each of some lengths, ``(batch, lengths, places)``.

    There are as many places as in the longest stretch of all rows: shorter ones repeat their last.
    """
    length, steps = u.new_tensor(lengths), torch.arange(int(side.max()), device=u.device)
    side = torch.minimum(side[:, None], length)
    return ((u * (length - side + 1)).floor()[:, :, None] + torch.minimum(steps, side[:, :, None] - 1)).long()


def as_images(x: Tensor) -> Tensor:
    """Images as they are, other points as images of one row."""
    return x if x.dim() == 4 else x.flatten(1)[:, None, None, :]
