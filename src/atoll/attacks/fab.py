"""FAB, the fast adaptive boundary attack (Croce & Hein, 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import (
    AttackState,
    MinimumNormAttack,
    Points,
    assign_rows,
    current_target,
    draw_rows,
    ranked_targets,
)
from atoll.errors import LARGEST_STEPS, check_count
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, dot, per_point

ALPHA_MAX = 0.1  # largest weight of the clean point in the next iterate
ETA = 1.05  # overshoot across the linearized boundary
BETA = 0.9  # pulls an adversarial iterate back toward the clean point


@ATTACKS.register()
class FAB(MinimumNormAttack):
    r"""FAB: finds a close adversarial point by repeated projection onto the linearized decision boundary.

    With :math:`f = g_t - g_y` and its gradient w at the iterate :math:`x_k`, both the iterate and the clean point are
    projected (in the norm, within the bounds) onto :math:`f + w \cdot (\cdot - x_k) = 0`.  The next iterate is a
    mixture of both projections, each overshot by 1.05.

    Costs ``steps + 1`` forward and backward passes per run for a robust point.  The untargeted attack has K - 1
    backward passes per step for K classes, one for each boundary.

    Args:
        threat: linf, l2 or l1.
        steps: iterations per run.
        targets: number of classes to try in turn, largest clean logit first (FAB-T); 0 for the untargeted attack,
            which steps onto the closest of all linearized boundaries.
        restarts: number of runs (per target).  The first starts at the clean point; later ones start at random points,
            at most half as far away as eps or the closest adversarial point so far.
        minimum_norm: see ``MinimumNormAttack``.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> FAB(ThreatModel("linf", 0.2))(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    tensor([[0.4950, 0.5050]])
    """

    def __init__(
        self, threat: ThreatModel, *, steps: int = 100, targets: int = 0, restarts: int = 1, minimum_norm: bool = False
    ) -> None:
        super().__init__(threat, minimum_norm=minimum_norm)
        check_count(1, LARGEST_STEPS, steps=steps, restarts=restarts)
        check_count(0, targets=targets)
        self.steps = steps
        self.targets = targets
        self.restarts = restarts

    def num_steps(self, classes: int) -> int:
        return max(1, min(self.targets, classes - 1)) * self.restarts * (self.steps + 1)

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        closest = points.x.new_full((len(points),), math.inf)
        order = ranked_targets(points, self.targets)
        return points.x.clone(), {"order": order, "closest": closest, "iterate": points.x}

    def step(self, model: nn.Module, rows: AttackState) -> None:
        f, w, adversarial = self._linearize(model, rows)
        s, threat, x, iterate = rows.state, self.threat, rows.x, rows.state["iterate"]
        delta = iterate - x
        self.keep_closest(rows, iterate, adversarial, distance=threat.size(delta))

        # Project the clean point and the (possibly pulled back) iterate onto the linearized boundary.
        slope = dot(w, delta)
        pull = torch.where(adversarial, BETA, 1.0).to(x.dtype)
        point = delta.mul_(per_point(pull, x)).add_(x)
        d_point, d_x = self._to_hyperplane((point, x), w, ((1 - pull) * slope - f, slope - f))
        far, near = threat.size(d_point), threat.size(d_x)
        alpha = per_point((far / (far + near).clamp_min(1e-12)).clamp_max(ALPHA_MAX), x)
        for start, d in ((point, d_point), (x, d_x)):
            torch.add(start, d, alpha=ETA, out=d)
        s["iterate"] = threat.clamp(d_point.lerp_(d_x, alpha))
        rows.iteration += 1
        if self.num_steps(s["order"].shape[1] + 1) > self.steps + 1:
            self._restart(rows)

    def _to_hyperplane(
        self, points: tuple[Tensor, Tensor], w: Tensor, rises: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Project two points per row onto the hyperplane of this row; on an accelerator both at once."""
        if w.device.type == "cpu":  # where copying costs more than it saves
            first, second = (self.threat.to_hyperplane(x, w, rise) for x, rise in zip(points, rises, strict=True))
        else:
            both = self.threat.to_hyperplane(torch.cat(points), torch.cat([w, w]), torch.cat(rises))
            first, second = both.chunk(2)
        return first, second

    def _linearize(self, model: nn.Module, rows: AttackState) -> tuple[Tensor, Tensor, Tensor]:
        """Return value and gradient of the relevant logit difference, and whether the iterates are adversarial."""
        iterate, y = rows.state["iterate"].detach().requires_grad_(), rows.y[:, None]
        with torch.enable_grad():
            logits = model(iterate)
        values = logits.detach()
        own, adversarial = values.gather(1, y), values.argmax(1) != rows.y
        if self.targets:
            target = current_target(rows, (self.steps + 1) * self.restarts)
            (w,) = torch.autograd.grad(logits, iterate, _difference(values, target, y)[:, 0])
            return (values.gather(1, target) - own).squeeze(1), w, adversarial
        # The closest of all linearized boundaries, one class after the other to save memory.
        dual = {"linf": 1, "l2": 2, "l1": math.inf}[self.threat.norm]
        classes = values.shape[1]
        targets = (y + torch.arange(1, classes, device=y.device)) % classes
        rises = values.gather(1, targets) - own
        lengths, differences = rises.abs(), _difference(values, targets, y)
        f, w = values.new_zeros(len(y)), torch.zeros_like(rows.x)
        nearest = torch.full_like(f, math.inf)
        for k in range(classes - 1):
            (other_w,) = torch.autograd.grad(logits, iterate, differences[:, k], retain_graph=k < classes - 2)
            distance = lengths[:, k] / torch.linalg.vector_norm(other_w.flatten(1), dual, dim=1).clamp_min_(1e-12)
            closer = distance < nearest
            assign_rows(w, closer, other_w)
            f, nearest = torch.where(closer, rises[:, k], f), torch.minimum(distance, nearest)
        return f, w, adversarial

    def _restart(self, rows: AttackState) -> None:
        """Start the next run in rows that have finished one."""
        s, run = rows.state, rows.iteration // (self.steps + 1)
        finished = rows.iteration % (self.steps + 1) == 0
        assign_rows(s["iterate"], finished, rows.x)
        if self.restarts > 1:
            draw_rows(s["iterate"], finished & (run % self.restarts > 0), rows, self._start, s["closest"])

    def _start(self, x: Tensor, streams: PointRNG, closest: Tensor) -> Tensor:
        share = (closest / max(self.threat.radius, 1e-30)).clamp_max(1) / 2
        start = self.threat.random_start(x, streams)
        return x + per_point(share, x) * (start - x)


def _difference(logits: Tensor, targets: Tensor, y: Tensor) -> Tensor:
    """Return derivatives of target logits minus the logit of the true class with respect to all logits, per target."""
    zeros = logits.new_zeros(*targets.shape, logits.shape[1])
    return zeros.scatter_(2, targets[:, :, None], 1.0).scatter_(2, y[:, :, None].expand(-1, targets.shape[1], 1), -1.0)


ATTACKS.add("FAB-T", FAB, targets=9)
