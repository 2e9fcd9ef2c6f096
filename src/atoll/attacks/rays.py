"""RayS (Chen & Gu, 2020): the distance to the decision boundary from predicted labels only."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, where_rows
from atoll.errors import LARGEST_STEPS, check_count
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import Bounds, ThreatModel, per_point

TOLERANCE = 1e-3  # relative tolerance of radii
FAR = 2.0**20  # largest radius for inputs without bounds


@ATTACKS.register()
class RayS(MinimumNormAttack):
    r"""RayS: searches for the direction of signs in which the decision boundary is closest, from labels only.

    This is the vector :math:`d \in \{-1, 1\}^n` whose ray :math:`x + r d` leaves the class at the smallest r.  The
    search flips the signs of one block of coordinates after another, from all coordinates down to single ones, and then
    starts over.  Each flip costs one query at the best radius so far.  If that point is misclassified, the search keeps
    the flip and looks for its radius: inward in doubling steps, because most flips gain little, then by bisection,
    up to a thousandth of the radius.
    RayS uses only predicted labels, so masked gradients or logits cannot fool it, and draws no random numbers.

    A point whose boundary is beyond eps costs ``queries`` forward passes, or fewer if no flip of a whole round helps.

    Args:
        threat: linf; points on a ray are clipped to its bounds, and distances are measured to the clipped points.
        queries: forward passes per point.
        minimum_norm: see ``MinimumNormAttack``; ``boundary_distance`` sets it.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> x_adv = RayS(ThreatModel("linf", 0.11))(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    >>> bool(model(x_adv).argmax() == 1), bool((x_adv - torch.tensor([0.6, 0.4])).abs().max() <= 0.11)
    (True, True)
    """

    needs_gradients = False
    norms = ("linf",)

    def __init__(self, threat: ThreatModel, *, queries: int = 10_000, minimum_norm: bool = False) -> None:
        super().__init__(threat, minimum_norm=minimum_norm)
        check_count(1, LARGEST_STEPS, queries=queries)
        self.queries = queries

    def num_steps(self, classes: int) -> int:
        return self.queries

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        x, bounds = points.x, self.threat.bounds
        zero = x.new_zeros(len(x))
        wrong = points.logits.argmax(1) != points.y
        return x.clone(), {
            "closest": torch.where(wrong, zero, math.inf),
            "direction": torch.ones_like(x),
            "attempt": torch.ones_like(x),  # the direction, or the direction with a block flipped
            "searching": torch.zeros_like(wrong),  # the radius of the attempt, between low and high
            "low": zero,
            # The best radius.  The width of the bounds reaches their corners; without bounds, any initial guess works.
            "high": torch.full_like(zero, 1.0 if bounds is None else bounds[1] - bounds[0]),
            "step": zero,
            # The block to flip.  It starts past the end, because the first attempt is the direction itself.
            "first": torch.full_like(points.index, x[0].numel()),
            "size": torch.ones_like(points.index),
            "helped": torch.ones_like(wrong),  # whether any flip of this round helped
        }

    @torch.no_grad()
    def step(self, model: nn.Module, rows: AttackState) -> None:
        s, x = rows.state, rows.x
        # Finished rows may stay in the batch for a while; they must not change.
        active = (s["closest"] > self.stop_distance) & (rows.iteration < self.queries)
        inward = torch.maximum((s["low"] + s["high"]) / 2, s["high"] - s["step"])
        radius = torch.where(s["searching"], inward, s["high"])
        point = self.threat.clamp(x + per_point(radius, x) * s["attempt"])
        if x.device.type != "cpu":  # to query only the active rows, the program would have to wait for the device
            broken = active & (model(point).argmax(1) != rows.y)
        else:
            broken = torch.zeros_like(active)
            if active.any():
                broken[active] = model(point[active]).argmax(1) != rows.y[active]
        rows.iteration = rows.iteration + active

        distance = self.threat.distance(point, x)
        # The first radius may be far off, so it is bisected at once.
        first_step = torch.where(s["closest"].isinf(), math.inf, TOLERANCE * s["high"])
        closer = self.keep_closest(rows, point, broken)
        s["direction"] = where_rows(broken, s["attempt"], s["direction"])
        s["helped"] = s["helped"] | closer

        begins = broken & ~s["searching"]
        s["high"] = torch.where(broken, radius.minimum(distance), s["high"])
        s["low"] = torch.where(begins, 0.0, torch.where(broken, s["low"], radius))
        s["step"] = torch.where(begins, first_step, torch.where(broken, 2 * s["step"], s["step"]))
        s["searching"] = (s["searching"] | begins) & (s["high"] - s["low"] > TOLERANCE * s["high"])
        self._next_block(rows, active & ~s["searching"])

    def _next_block(self, rows: AttackState, due: Tensor) -> None:
        """Flip the next block in rows whose attempt is finished; stop rows after a round in which no flip helped."""
        s, size = rows.state, rows.x[0].numel()
        first, width, over = next_block(s["first"], s["size"], size)
        s["first"], s["size"] = torch.where(due, first, s["first"]), torch.where(due, width, s["size"])
        place = torch.arange(size, device=first.device)
        block = (place >= s["first"][:, None]) & (place < (s["first"] + s["size"])[:, None])
        flipped = torch.where(block.view_as(rows.x), -s["direction"], s["direction"])
        s["attempt"] = where_rows(due, flipped, s["attempt"])
        stop = due & over & ~s["helped"]
        s["helped"] = s["helped"] & ~(due & over)
        if self.threat.bounds is None:  # the boundary may be farther away than the initial radius
            farther = stop & s["closest"].isinf()
            s["high"] = torch.where(farther, (2 * s["high"]).clamp_max(FAR), s["high"])
            stop &= ~farther
        rows.iteration = torch.where(stop, self.queries, rows.iteration)


def next_block(first: Tensor, width: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start and width of the next block of coordinates, and whether it begins a new round.

    >>> first, width, blocks = torch.tensor(4), torch.tensor(1), []
    >>> for _ in range(8):
    ...     first, width, over = next_block(first, width, 4)
    ...     blocks.append((int(first), int(width)))
    >>> blocks
    [(0, 4), (0, 2), (2, 2), (0, 1), (1, 1), (2, 1), (3, 1), (0, 4)]
    """
    following = first + width
    end = following >= size
    over = end & (width == 1)
    halved = torch.where(over, size, (width + 1) // 2)
    return torch.where(end, 0, following), torch.where(end, halved, width), over


def boundary_distance(
    model: nn.Module, x: Tensor, y: Tensor, *, bounds: Bounds | None = (0.0, 1.0), queries: int = 10_000
) -> Tensor:
    """Return the linf distance of each point to the closest adversarial point that RayS finds, an upper bound.

    The distance is 0 for misclassified points and infinite if RayS finds no adversarial point.  Its mean over the
    correctly classified points is the average decision boundary distance (ADBD) of the paper.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> distance = boundary_distance(model, torch.tensor([[0.6, 0.4], [0.3, 0.4]]), torch.tensor([0, 0]))
    >>> [f"{d:.3f}" for d in distance]
    ['0.100', '0.000']
    """
    threat = ThreatModel("linf", 0.0, bounds)
    x_adv = RayS(threat, queries=queries, minimum_norm=True)(model, x, y)
    if not len(x):
        return x.new_zeros(0)
    with evaluation_mode(model), torch.no_grad():
        broken = model(x_adv).argmax(1) != y
    return torch.where(broken, threat.distance(x_adv, x), math.inf)
