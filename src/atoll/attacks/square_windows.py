"""How Square perturbs for l2 (Andriushchenko et al., 2020) and l1 (Croce & Hein, 2021): mass moves between windows."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point


@lru_cache(maxsize=256)
def bump(height: int, width: int, norm: str) -> Tensor:
    """Two hills of opposite sign, one above the other, of unit norm together.

    A hill is a sum of squares around its centre, the k-th of them 2k - 1 pixels wide and k^-2 (for l1: k^-4) high.

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
        hill = heights.flip(0).cumsum(0).flip(0)[ring]  # every square from this ring on outwards lies here too
        hills.append(hill / torch.linalg.vector_norm(hill, order).clamp_min(1e-30))
    both = torch.cat([hills[0], -hills[1]])
    both /= torch.linalg.vector_norm(both, order)
    return both.float()


def tiles(threat: ThreatModel, x: Tensor, streams: PointRNG) -> Tensor:
    """The start: a grid of bumps, five to a side, upright or lying, of random sign in every channel."""
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
    r"""Takes the perturbation's mass out of two random windows and gives it, changed by a bump, to the first.

    With :math:`\nu = \pm \eta + \delta_1 / \|\delta_1\|` in each channel of the first window (:math:`\eta` the bump),
    its new content is :math:`\nu / \|\nu\|` times the mass of both windows and what was left to eps (for l1: c times
    that for c channels, since the projection takes care of it).

    Args:
        threat: l2 or l1.
        x: clean images.
        best: the best candidates so far.
        share: which part of the image a window covers, for each row.
        streams: of the rows.
    """
    _, channels, height, width = x.shape
    side = (share * width if height == 1 else (share * height * width).sqrt()).round().clamp_min(3)
    side = (side + (side % 2 == 0)).clamp_max(width if height == 1 else min(height, width)).long()
    draw = streams.uniform(5 + channels, dtype=x.dtype)
    proposal = torch.empty_like(x)
    for columns in sorted(set(side.tolist())):  # few: the clocks are in few stages of the schedule
        here = side == columns
        rows, u = min(columns, height), draw[here]
        first = _places(height, width, rows, columns, u[:, 0], u[:, 1])
        second = _places(height, width, rows, columns, u[:, 2], u[:, 3])
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
    """Norm of each channel."""
    norm: Tensor = torch.linalg.vector_norm(delta, power, dim=2, keepdim=True)
    return norm


def _at_full_length(threat: ThreatModel, x: Tensor, delta: Tensor) -> Tensor:
    """Candidates at the distance eps (less a few ulps) in l2, projected in l1."""
    if threat.norm == "l1":
        return threat.project(x + delta, x)
    scale = threat.radius * (1 - 1e-6) / threat.size(delta).clamp_min_(1e-12)
    return threat.clamp(torch.addcmul(x, delta, per_point(scale, x)))


def _places(height: int, width: int, rows: int, columns: int, u: Tensor, v: Tensor) -> Tensor:
    """Flat indices of a window at a random position, ``(batch, 1, rows * columns)``."""
    top, left = (u * (height - rows + 1)).long()[:, None], (v * (width - columns + 1)).long()[:, None]
    down, across = top + torch.arange(rows, device=u.device), left + torch.arange(columns, device=u.device)
    return (down[:, :, None] * width + across[:, None, :]).flatten(1)[:, None]
