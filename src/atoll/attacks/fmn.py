"""FMN, the fast minimum-norm attack (Pintor et al., 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, anneal, where_rows
from atoll.errors import LARGEST_STEPS, check_count, check_range
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

GAMMA, GAMMA_END = 0.05, 0.001  # relative change of the radius, in the first and in the last step
STEP_END = 0.01  # last step size as a share of the first
START, GROWTH = 0.05, 1.1  # steps to the first adversarial iterate: share of the range of inputs, and how it grows


@ATTACKS.register()
class FMN(MinimumNormAttack):
    r"""FMN: gradient steps on the margin inside a ball whose radius follows the decision boundary.

    If the iterate is adversarial, the radius shrinks by a factor :math:`1 - \gamma`, and at least to the smallest
    distance so far; otherwise it grows by :math:`1 + \gamma`.  The step size and :math:`\gamma` are annealed with a
    cosine.

    Two things differ from the paper, because they find much closer points on robust models.  The attack reaches its
    first adversarial iterate with steps along the sign of the gradient for all norms, since gradient steps in l2 and l1
    change few pixels and often get stuck.  These steps grow by a tenth each, and the radius is unlimited until then;
    the paper estimates it from the gradient.  For linf, all later steps also follow the sign, and their size is a share
    of the radius.

    Costs ``steps`` forward and backward passes for a point that is robust within eps.

    Args:
        threat: linf, l2 or l1.
        steps: number of iterations.
        step_size: size of the first step (linf: as a share of the radius; otherwise: in l2); the last one is a
            hundredth of it.
        minimum_norm: see ``MinimumNormAttack``.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> attack = FMN(ThreatModel("l2", 0.5), minimum_norm=True)
    >>> attack(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0])).round(decimals=2)
    tensor([[0.5000, 0.5000]])
    """

    def __init__(
        self, threat: ThreatModel, *, steps: int = 200, step_size: float = 1.0, minimum_norm: bool = False
    ) -> None:
        super().__init__(threat, minimum_norm=minimum_norm)
        check_count(1, LARGEST_STEPS, steps=steps)
        check_range("(0, inf)", step_size=step_size)
        self.steps = steps
        self.step_size = step_size

    def num_steps(self, classes: int) -> int:
        return self.steps

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        infinity = points.x.new_full((len(points),), math.inf)
        return points.x.clone(), {"closest": infinity, "radius": infinity, "iterate": points.x}

    def step(self, model: nn.Module, rows: AttackState) -> None:
        s, x, threat = rows.state, rows.x, self.threat
        iterate = s["iterate"].detach().requires_grad_()
        with torch.enable_grad():
            value = margin(model(iterate), rows.y)
            (gradient,) = torch.autograd.grad(value.sum(), iterate)
        iterate, adversarial = iterate.detach(), value.detach() > 0
        self.keep_closest(rows, iterate, adversarial)

        progress = rows.iteration.to(x.dtype) / self.steps
        gamma = anneal(progress, GAMMA, GAMMA_END)
        smaller = torch.minimum(s["radius"] * (1 - gamma), s["closest"])
        s["radius"] = torch.where(adversarial, smaller, s["radius"] * (1 + gamma))

        width = 1.0 if threat.bounds is None else threat.bounds[1] - threat.bounds[0]
        start = START * width * GROWTH ** rows.iteration.clamp_max(100).to(x.dtype)
        size = anneal(progress, self.step_size, STEP_END * self.step_size)
        if threat.norm == "linf":
            size = torch.where(s["closest"] < math.inf, size * s["radius"], start)
            move = per_point(size, x) * gradient.sign()
        else:
            length = torch.linalg.vector_norm(gradient.flatten(1), dim=1).clamp_min(1e-12)
            move = per_point(size / length, x) * gradient
            move = where_rows(s["closest"] < math.inf, move, per_point(start, x) * gradient.sign())
        s["iterate"] = threat.project(iterate + move, x, s["radius"])
        rows.iteration += 1
