"""Square Attack (Andriushchenko et al., 2020): random search without gradients."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, IterativeAttack, Points, assign_rows, draw_rows
from atoll.errors import LARGEST_STEPS, check_count, check_range
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

# Numbers of queries, out of 10,000, after which the area of the squares is halved.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@ATTACKS.register()
class Square(IterativeAttack):
    """Square Attack: changes a random square and keeps the change if it reduces the margin.

    For linf, each channel of the square is shifted by +-eps; for l2 and l1 see ``move_mass``.  The squares get smaller
    on a fixed schedule.  The attack uses no gradients, so masked gradients cannot fool it.  For robust points it
    returns the best candidate of the last run.  Costs one forward pass per query.  Inputs that are not images, such as
    points of the plane, are treated as images with one row.

    Args:
        threat: linf, l2 or l1.
        queries: forward passes per run.
        p_init: share of the image that the first squares cover.
        horizon: number of queries that the size schedule is designed for; ``queries`` if None.  The paper uses 10,000,
            and AutoAttack runs the first 5,000 of them.
        restarts: number of runs, each from a random start.
    """

    needs_gradients = False

    def __init__(
        self,
        threat: ThreatModel,
        *,
        queries: int = 5000,
        p_init: float = 0.8,
        horizon: int | None = 10_000,
        restarts: int = 1,
    ) -> None:
        super().__init__(threat)
        check_range("(0, 1]", p_init=p_init)
        check_count(1, LARGEST_STEPS, queries=queries, horizon=horizon, restarts=restarts)
        self.queries = queries
        self.p_init = p_init
        self.horizon = horizon
        self.restarts = restarts

    def num_steps(self, classes: int) -> int:
        return self.restarts * self.queries

    def share(self, done: Tensor) -> Tensor:
        """Return the share of the image that a square covers after a number of queries.

        >>> Square(ThreatModel(), queries=10_000).share(torch.tensor([10, 11, 51, 8001]))
        tensor([0.8000, 0.4000, 0.2000, 0.0016])
        """
        return _on_device(self._shares, done.device)[self._stage(done)]

    @property
    def _shares(self) -> tuple[float, ...]:
        return tuple(self.p_init * 0.5**n for n in range(len(HALVINGS) + 1))

    def _stage(self, done: Tensor) -> Tensor:
        """Return how often the squares have shrunk."""
        starts = tuple(-(-(share + 1) * (self.horizon or self.queries) // 10_000) for share in HALVINGS)
        return torch.bucketize(done, _on_device(starts, done.device), right=True)

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        unknown = points.x.new_full((len(points),), -math.inf)
        return self._start(points.x, streams), {"best": points.x.clone(), "best_value": unknown}

    def _start(self, inputs: Tensor, streams: PointRNG) -> Tensor:
        x = as_images(inputs).contiguous()  # candidates change in place, which needs contiguous memory
        if self.threat.norm == "linf":
            # Start with vertical stripes, to which convolutional filters are most sensitive (section 3.2).
            stripes = streams.rademacher(x.shape[1], 1, x.shape[3], dtype=x.dtype)
            start = self.threat.clamp(x + self.threat.radius * stripes)
        else:
            start = tiles(self.threat, x, streams)
        return start.view_as(inputs)

    @torch.no_grad()
    def step(self, model: nn.Module, rows: AttackState) -> None:
        logits = model(rows.x_adv)
        s, value, wrong = rows.state, margin(logits, rows.y), logits.argmax(1) != rows.y
        better = (value > s["best_value"]) | wrong
        assign_rows(s["best"], better, rows.x_adv)
        s["best_value"] = torch.where(better, value, s["best_value"])
        rows.success |= wrong
        rows.iteration += 1
        proposal = self._propose(rows)
        # Finished rows end at their best candidate; a success is the best one.
        last = rows.iteration >= self.restarts * self.queries
        assign_rows(proposal, rows.success | last, s["best"])
        rows.x_adv = proposal
        if self.restarts > 1:
            self._restart(rows, (rows.iteration % self.queries == 0) & ~rows.success & ~last)

    def _restart(self, rows: AttackState, finished: Tensor) -> None:
        """Start the next run in rows that have finished one."""
        draw_rows(rows.x_adv, finished, rows, self._start)
        assign_rows(rows.state["best"], finished, rows.x)
        rows.state["best_value"].masked_fill_(finished, -math.inf)

    def _propose(self, rows: AttackState) -> Tensor:
        x, best = as_images(rows.x), as_images(rows.state["best"])
        _, channels, height, width = x.shape
        done = rows.iteration % self.queries if self.restarts > 1 else rows.iteration
        if self.threat.norm != "linf":
            return move_mass(self.threat, x, best, self.share(done), rows.streams).view_as(rows.x)
        draw = rows.streams.uniform(2 + channels, dtype=x.dtype)
        largest = width if height == 1 else max(1, min(height, width) - 1)
        sides = _side(torch.tensor(self._shares), height, width).clamp(1, largest)
        side = _on_device(tuple(sides.tolist()), x.device)[self._stage(done)]
        # Squares are usually small, so touch only their pixels.  The size of the largest one is known only on the CPU,
        # because the program would have to wait for an accelerator.
        longest = int(side.max()) if x.device.type == "cpu" else largest
        square = _windows(height, width, side, draw[:, :2], longest).expand(-1, channels, -1)
        sign = (draw[:, 2:, None] - 0.5).sign()
        moved = self.threat.clamp(x.flatten(2).gather(2, square).add_(sign, alpha=self.threat.radius))
        # Overwrite the last candidate, because allocating memory costs several times as much as the copy.
        rows.x_adv.copy_(rows.state["best"]).view(len(x), channels, -1).scatter_(2, square, moved)
        return rows.x_adv


@lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, which moves to the device only once."""
    return torch.tensor(values).to(device, non_blocking=True)


def _side(share: Tensor, height: int, width: int) -> Tensor:
    """Return the side of a square that covers a share of the image (for images with one row, the width)."""
    return (share * width if height == 1 else (share * height * width).sqrt()).round()


def _windows(height: int, width: int, side: Tensor, u: Tensor, longest: int) -> Tensor:
    """Return flat indices of random windows, ``(batch, 1, pixels)``; small windows repeat their last pixels."""
    length, steps = _on_device((float(height), float(width)), u.device), torch.arange(longest, device=u.device)
    side = torch.minimum(side[:, None], length)
    places = (u * (length - side + 1)).floor()[:, :, None] + torch.minimum(steps, side[:, :, None] - 1)
    down, across = places.long().unbind(1)
    return (down[:, :height, None] * width + across[:, None]).flatten(1)[:, None]


def as_images(x: Tensor) -> Tensor:
    """Return images unchanged, and other inputs as images with one row."""
    return x if x.dim() == 4 else x.flatten(1)[:, None, None, :]


@lru_cache(maxsize=256)
def bump(height: int, width: int, norm: str) -> Tensor:
    """Return two hills of opposite sign, one above the other, with unit norm in total.

    A hill is a sum of squares around its center; the k-th square is 2k - 1 pixels wide and k^-2 (for l1: k^-4) high.

    >>> bump(4, 3, "l1").sign()
    tensor([[ 1.,  1.,  1.],
            [ 1.,  1.,  1.],
            [-1., -1., -1.],
            [-1., -1., -1.]])
    """
    power, order = (2, 2) if norm == "l2" else (4, 1)
    hills = []
    for rows in (height // 2, height - height // 2):
        down, across = ((torch.arange(length) - length // 2).abs() for length in (rows, width))
        ring = torch.maximum(down[:, None], across)
        heights = torch.arange(1, max(rows, width) // 2 + 2, dtype=torch.float64) ** -power
        hill = heights.flip(0).cumsum(0).flip(0)[ring]  # a pixel is covered by the squares of its ring and beyond
        hills.append(hill / torch.linalg.vector_norm(hill, order).clamp_min(1e-30))
    both = torch.cat([hills[0], -hills[1]])
    both /= torch.linalg.vector_norm(both, order)
    return both.float()


def tiles(threat: ThreatModel, x: Tensor, streams: PointRNG) -> Tensor:
    """Return the starting point: a grid of bumps, randomly rotated, with random signs per channel.

    The side of a bump is a fifth of the shorter side of the image, rounded down.  The grid is in the middle and has as
    many bumps as fit.
    """
    _, channels, height, width = x.shape
    side = max(1, (min(height, width) if height > 1 else width) // 5)
    rows, columns = min(side, height), side
    down, across = height // rows, width // columns
    shapes = torch.stack([bump(rows, columns, threat.norm), bump(columns, rows, threat.norm).T]).to(x)
    sign = streams.rademacher(channels, down, across, dtype=x.dtype)[..., None, None]
    delta = shapes[streams.integers(2, down, across)][:, None] * sign
    delta = delta.transpose(3, 4).reshape(len(x), channels, down * rows, across * columns)
    top, left = (height - down * rows) // 2, (width - across * columns) // 2
    delta = F.pad(delta, (left, width - across * columns - left, top, height - down * rows - top))
    return _at_full_length(threat, x, delta)


def move_mass(threat: ThreatModel, x: Tensor, best: Tensor, share: Tensor, streams: PointRNG) -> Tensor:
    r"""Move the mass of the perturbation from two random windows into the first one, adding a bump.

    With :math:`\nu = \pm \eta + \delta_1 / \|\delta_1\|` in each channel of the first window (:math:`\eta` the bump),
    its new content is :math:`\nu / \|\nu\|` times the mass of both windows plus the unused part of eps.  For l1 with c
    channels it is c times that, because the projection follows.  ``share`` is the share of the image that a window
    covers.
    """
    _, channels, height, width = x.shape
    side = _side(share, height, width).clamp_min(3)
    side = (side + (side % 2 == 0)).clamp_max(width if height == 1 else min(height, width)).long()
    draw = streams.uniform(5 + channels, dtype=x.dtype)
    proposal = torch.empty_like(x)
    for columns in sorted(set(side.tolist())):  # few, because rows are in few stages of the schedule
        here = side == columns
        rows, u = min(columns, height), draw[here]
        first, second = (_windows(height, width, side[here], u[:, start : start + 2], columns) for start in (0, 2))
        upright, lying = bump(rows, columns, threat.norm), bump(columns, rows, threat.norm).T
        shape = torch.where(u[:, 4:5, None] < 0.5, upright.flatten().to(x), lying.flatten().to(x))
        sign = (u[:, 5:, None] - 0.5).sign()
        proposal[here] = _move(threat, x[here], best[here], first, second, sign * shape)
    return proposal


def _move(threat: ThreatModel, x: Tensor, best: Tensor, first: Tensor, second: Tensor, shape: Tensor) -> Tensor:
    power, channels = 2 if threat.norm == "l2" else 1, x.shape[1]
    delta = (best - x).flatten(2)
    first, second = first.expand(-1, channels, -1), second.expand(-1, channels, -1)
    mass, old = _norm(delta, power) ** power, delta.gather(2, first)
    delta.scatter_(2, second, 0.0).scatter_(2, first, 0.0)
    freed = (mass - _norm(delta, power) ** power).clamp_min_(0)
    spare = (threat.radius**power - mass.sum(1, keepdim=True)).clamp_min_(0) / channels
    length = (freed + spare).sqrt() if power == 2 else channels * (freed + spare)
    new = shape + old / _norm(old, power).clamp_min(1e-12)
    delta.scatter_(2, first, new * (length / _norm(new, power).clamp_min(1e-12)))
    return _at_full_length(threat, x, delta.view_as(x))


def _norm(delta: Tensor, power: int) -> Tensor:
    """Return the norm of each channel."""
    norm: Tensor = torch.linalg.vector_norm(delta, power, dim=2, keepdim=True)
    return norm


def _at_full_length(threat: ThreatModel, x: Tensor, delta: Tensor) -> Tensor:
    """Scale perturbations to norm eps (minus a few ulps) for l2, and project them for l1."""
    if threat.norm == "l1":
        return threat.project(x + delta, x)
    scale = threat.radius * (1 - 1e-6) / threat.size(delta).clamp_min_(1e-12)
    return threat.clamp(torch.addcmul(x, delta, per_point(scale, x)))
