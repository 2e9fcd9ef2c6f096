"""FAB, the fast adaptive boundary attack (Croce & Hein, 2020): the closest point across a boundary."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, current_target, ranked_targets
from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, dot, per_point

ALPHA_MAX = 0.1  # how far the next iterate is drawn to the clean point
ETA = 1.05  # overshoot across the linearized boundary
BETA = 0.9  # step back towards the clean point from an adversarial iterate


@ATTACKS.register()
class FAB(MinimumNormAttack):
    r"""Linearizes the boundary to another class and steps onto it, from the iterate and from the clean point.

    With :math:`f = g_t - g_y` and its gradient w at the iterate, both points are projected (in the norm, within the
    bounds) onto :math:`f + w \cdot (\cdot - x_k) = 0`, overshot by 1.05 and mixed.

    Costs ``steps + 1`` forward and backward passes per run for a robust point; untargeted, with K classes, each of
    them has K - 1 backward passes, one for every boundary there is.

    Args:
        threat: linf, l2 or l1.
        steps: iterations per run.
        targets: classes tried in turn, those with the largest clean logits first (FAB-T); 0 for the untargeted attack,
            which steps onto the closest of all linearized boundaries.
        restarts: runs (per target); the first begins at the clean point, later ones at random, half as far away as eps
            or the closest adversarial point so far.
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
        if min(steps, restarts) < 1 or targets < 0:
            raise InputError(
                f"steps, restarts, targets: expected at least 1 (targets: 0), got {steps}, {restarts}, {targets}"
            )
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

        # By how much w has to rise to the plane, from the clean point and from the (possibly pulled back) iterate.
        slope = dot(w, delta)
        pull = torch.where(adversarial, BETA, 1.0).to(x.dtype)
        point = delta.mul_(per_point(pull, x)).add_(x)
        d_point = threat.to_hyperplane(point, w, (1 - pull) * slope - f)
        d_x = threat.to_hyperplane(x, w, slope - f)
        far, near = threat.size(d_point), threat.size(d_x)
        alpha = per_point((far / (far + near).clamp_min(1e-12)).clamp_max(ALPHA_MAX), x)
        for start, d in ((point, d_point), (x, d_x)):
            torch.add(start, d, alpha=ETA, out=d)
        s["iterate"] = threat.clamp(d_point.lerp_(d_x, alpha))
        rows.iteration += 1
        self._restart(rows)

    def _linearize(self, model: nn.Module, rows: AttackState) -> tuple[Tensor, Tensor, Tensor]:
        """Value and gradient of the difference that counts, and whether the iterates are adversarial."""
        iterate, y = rows.state["iterate"].detach().requires_grad_(), rows.y[:, None]
        with torch.enable_grad():
            logits = model(iterate)
        if self.targets:
            f, w = _difference(logits, current_target(rows, (self.steps + 1) * self.restarts), y, iterate)
        else:
            dual = {"linf": 1, "l2": 2, "l1": math.inf}[self.threat.norm]
            f, w = logits.new_zeros(len(y)), torch.zeros_like(rows.x)
            nearest = torch.full_like(f, math.inf)
            for shift in range(1, logits.shape[1]):
                other_f, other_w = _difference(logits, (y + shift) % logits.shape[1], y, iterate)
                distance = other_f.abs() / torch.linalg.vector_norm(other_w.flatten(1), dual, dim=1).clamp_min(1e-12)
                closer = distance < nearest
                f[closer], w[closer], nearest[closer] = other_f[closer], other_w[closer], distance[closer]
        return f, w, logits.detach().argmax(1) != rows.y

    def _restart(self, rows: AttackState) -> None:
        """Start the next run of rows that have finished one."""
        s, run = rows.state, rows.iteration // (self.steps + 1)
        through = rows.iteration % (self.steps + 1) == 0
        s["iterate"][through] = rows.x[through]
        again = (through & (run % self.restarts > 0)).nonzero().squeeze(1)
        if len(again):
            x, streams = rows.x[again], rows.streams[again]
            share = (s["closest"][again] / max(self.threat.radius, 1e-30)).clamp_max(1) / 2
            start = self.threat.random_start(x, streams)
            rows.streams.put(again, streams)
            s["iterate"][again] = x + per_point(share, x) * (start - x)


def _difference(logits: Tensor, target: Tensor, y: Tensor, iterate: Tensor) -> tuple[Tensor, Tensor]:
    """Logit of a target minus that of the true class, and its gradient."""
    with torch.enable_grad():
        f = (logits.gather(1, target) - logits.gather(1, y)).squeeze(1)
        (w,) = torch.autograd.grad(f.sum(), iterate, retain_graph=True)
    return f.detach(), w


ATTACKS.add("FAB-T", FAB, targets=9)
