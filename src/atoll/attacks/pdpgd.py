"""PDPGD, primal-dual proximal gradient descent (Matyasko & Chau, 2021)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, adam
from atoll.errors import LARGEST_STEPS, check_count, check_range
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

STEP_END = 0.01  # last step size as a share of the first
DUAL_STEP, DUAL_STEP_END = 0.1, 0.01  # step size of the multiplier, in the first and in the last step
DUAL_AVERAGE = 0.9  # decay of the moving average of the weights
FIRST_RATIO = 0.01  # weight of the distance relative to that of the margin, at first
FLOOR = 0.2  # smallest scale of a component in the proximal step, as a share of the largest one
LARGEST_LOG = math.log(1e6)  # of the ratio of the weights


@ATTACKS.register()
class PDPGD(MinimumNormAttack):
    r"""PDPGD: seeks a saddle point of the Lagrangian of the smallest perturbation that changes the class.

    The primal player takes steps of Adam on the softplus of the negative margin, with gradient 0 at adversarial
    iterates.  Each step is followed by the proximal operator of :math:`\mu \|\delta\|_1`, which moves every component
    toward 0 by a threshold and sets small ones to 0.  The threshold of a component is :math:`\mu` times its step size
    in Adam, but at most five times the smallest one.  The dual player lowers :math:`\mu` while the iterate is
    classified correctly and raises it otherwise.

    Costs ``steps`` forward and backward passes for a point that is robust within eps.

    Args:
        threat: l1.
        steps: number of iterations.
        step_size: the first step size of Adam; the last one is a hundredth of it.
        minimum_norm: see ``MinimumNormAttack``.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    >>> attack = PDPGD(ThreatModel("l1", 0.5), minimum_norm=True)
    >>> attack(model, torch.tensor([[0.9, 0.4]]), torch.tensor([0])).round(decimals=2)
    tensor([[0.9000, 0.4500]])
    """

    norms = ("l1",)

    def __init__(
        self, threat: ThreatModel, *, steps: int = 500, step_size: float = 0.1, minimum_norm: bool = False
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
        ratio = torch.full_like(infinity, -math.log(FIRST_RATIO))
        return points.x.clone(), {
            "closest": infinity,
            "iterate": points.x,
            "mean": torch.zeros_like(points.x),
            "square": torch.zeros_like(points.x),
            "multiplier": ratio,  # logarithm of the weight of the margin relative to that of the distance
            "weight": ratio.sigmoid(),  # moving average of the weight of the margin; both weights add up to 1
        }

    def step(self, model: nn.Module, rows: AttackState) -> None:
        s, x = rows.state, rows.x
        iterate = s["iterate"].detach().requires_grad_()
        with torch.enable_grad():
            value = margin(model(iterate), rows.y)
            (gradient,) = torch.autograd.grad(F.softplus((-value).clamp_min(0)).sum(), iterate)
        iterate, adversarial = iterate.detach(), value.detach() > 0
        self.keep_closest(rows, iterate, adversarial)

        done = rows.iteration.to(x.dtype)
        progress = done / self.steps
        size = self.step_size * STEP_END**progress
        mean, scale = adam(s, gradient, done + 1)
        delta = self.threat.clamp(iterate - per_point(size, x) * mean / scale) - x
        # Adam's scale is a diagonal metric, in which the proximal operator has a threshold for each component.  The
        # paper approaches it in a few iterations, so that small scales count as a share of the largest one.
        scale = torch.maximum(scale, per_point(FLOOR * scale.flatten(1).amax(1), x))
        threshold = per_point(size * (1 - s["weight"]) / s["weight"], x) / scale
        s["iterate"] = self.threat.clamp(x + F.relu(delta.abs() - threshold).copysign(delta))

        dual_size = DUAL_STEP + (DUAL_STEP_END - DUAL_STEP) * progress
        change = torch.where(adversarial, -dual_size, dual_size)
        s["multiplier"] = (s["multiplier"] + change).clamp(-LARGEST_LOG, LARGEST_LOG)
        s["weight"] = s["weight"].lerp(s["multiplier"].sigmoid(), 1 - DUAL_AVERAGE)
        rows.iteration += 1
