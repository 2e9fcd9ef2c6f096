"""FAB-T, the targeted fast adaptive boundary attack (Croce & Hein, 2020): the closest point across a boundary."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.rows import Points, RowAttack, Rows, choose
from atoll.errors import InputError
from atoll.streams import Streams
from atoll.threat import ThreatModel, per_point

ALPHA_MAX = 0.1  # how far the next iterate is drawn to the clean point
ETA = 1.05  # overshoot across the linearised boundary
BETA = 0.9  # step back towards the clean point from an adversarial iterate


class FAB(RowAttack):
    r"""Linearises the boundary to one class after another and steps onto it, from the iterate and from the clean point.

    With :math:`f = g_t - g_y` and its gradient w at the iterate, both points are projected (in the norm, within the
    bounds) onto :math:`f + w \cdot (\cdot - x_k) = 0`, overshot by 1.05 and mixed.  The closest adversarial point ever
    seen counts; a point is given up as soon as that is within eps.

    Costs ``steps + 1`` forward and backward passes per target for a point that stands.

    Args:
        threat: linf, l2 or l1.
        steps: iterations per target.
        targets: classes tried in turn, those with the largest clean logits first.
    """

    def __init__(self, threat: ThreatModel, *, steps: int = 100, targets: int = 9) -> None:
        super().__init__(threat)
        if steps < 1 or targets < 1:
            raise InputError(f"steps, targets: expected at least 1, got {steps}, {targets}")
        self.steps = steps
        self.targets = targets

    def length(self, classes: int) -> int:
        return min(self.targets, classes - 1) * (self.steps + 1)

    def begin(self, points: Points, streams: Streams) -> tuple[Tensor, dict[str, Tensor]]:
        others = points.logits.scatter(1, points.y[:, None], -math.inf)
        count = min(self.targets, points.logits.shape[1] - 1)
        return points.x.clone(), {
            "order": others.argsort(dim=1, descending=True)[:, :count],
            "closest": torch.full((len(points),), math.inf, dtype=points.x.dtype, device=points.x.device),
            "iterate": points.x.clone(),
        }

    def advance(self, model: nn.Module, rows: Rows) -> None:
        s, threat, x = rows.state, self.threat, rows.x
        iterate = s["iterate"].detach().requires_grad_()
        turn = (rows.clock // (self.steps + 1)).clamp_max(s["order"].shape[1] - 1)
        target = s["order"].gather(1, turn[:, None])
        with torch.enable_grad():
            logits = model(iterate)
            difference = (logits.gather(1, target) - logits.gather(1, rows.y[:, None])).squeeze(1)
            (w,) = torch.autograd.grad(difference.sum(), iterate)
        iterate, difference = iterate.detach(), difference.detach()

        adversarial = logits.detach().argmax(1) != rows.y
        distance = threat.distance(iterate, x)
        closer = adversarial & (distance < s["closest"])
        s["closest"] = torch.where(closer, distance, s["closest"])
        # Rows that have succeeded keep their point; the others show the closest so far, which is of use to callers.
        rows.adv = choose(closer & ~rows.success, iterate, rows.adv)
        rows.success |= s["closest"] <= threat.radius

        point = choose(adversarial, x + BETA * (iterate - x), iterate)
        # The plane through the iterate's linearisation, seen from the (possibly pulled back) point and from x.
        rise_point = -difference - (w * (point - iterate)).flatten(1).sum(1)
        rise_x = -difference - (w * (x - iterate)).flatten(1).sum(1)
        d_point, d_x = threat.to_hyperplane(point, w, rise_point), threat.to_hyperplane(x, w, rise_x)
        zero = torch.zeros_like(x)
        far, near = threat.distance(d_point, zero), threat.distance(d_x, zero)
        alpha = per_point((far / (far + near).clamp_min(1e-12)).clamp_max(ALPHA_MAX), x)
        following = (1 - alpha) * (point + ETA * d_point) + alpha * (x + ETA * d_x)
        s["iterate"] = threat.clamp(following)
        rows.clock += 1
        # The next target starts from the clean point again.
        s["iterate"] = choose(rows.clock % (self.steps + 1) == 0, x, s["iterate"])
