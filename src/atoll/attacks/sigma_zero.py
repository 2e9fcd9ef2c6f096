"""Sigma-zero, an attack that changes as few components as possible (Cinà et al., 2024)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, adam, anneal
from atoll.errors import LARGEST_STEPS, check_count, check_range
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

STEP_END = 0.1  # last step size as a share of the first
THRESHOLD = 0.3  # first threshold below which a change is set to zero
THRESHOLD_STEP = 0.01  # change of the threshold in a step, as a share of the step size


@ATTACKS.register()
class SigmaZero(MinimumNormAttack):
    r"""Sigma-zero: Adam on the margin plus a smooth approximation of l0, and a threshold that removes small changes.

    .. math:: \max\big(g_y(x + \delta) - \max_{j \ne y} g_j(x + \delta),\ 0\big)
        + \frac{1}{d} \sum_{i=1}^d \frac{\delta_i^2}{\delta_i^2 + \sigma}

    The gradient is divided by its largest component.  After each step, all :math:`|\delta_i|` below a threshold become
    0.  The threshold rises by a hundredth of the step size if the iterate was adversarial and falls otherwise.  l0
    counts components as in the paper: a pixel of a color image has three.

    Costs ``steps`` forward and backward passes for a point that is robust within eps.

    Args:
        threat: l0.
        steps: number of iterations.
        step_size: the first step size of Adam; the last one is a tenth of it.
        sigma: smoothness of the approximation of l0.
        minimum_norm: see ``MinimumNormAttack``.

    >>> model = nn.Linear(3, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.1]]))
    >>> x = torch.tensor([[0.6, 0.4, 0.5]])
    >>> (SigmaZero(ThreatModel("l0", 1))(model, x, torch.tensor([0])) != x).sum()
    tensor(1)
    """

    norms = ("l0",)

    def __init__(
        self,
        threat: ThreatModel,
        *,
        steps: int = 1000,
        step_size: float = 1.0,
        sigma: float = 1e-3,
        minimum_norm: bool = False,
    ) -> None:
        super().__init__(threat, minimum_norm=minimum_norm)
        check_count(1, LARGEST_STEPS, steps=steps)
        check_range("(0, inf)", step_size=step_size, sigma=sigma)
        self.steps = steps
        self.step_size = step_size
        self.sigma = sigma

    def num_steps(self, classes: int) -> int:
        return self.steps

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        infinity = points.x.new_full((len(points),), math.inf)
        zeros = torch.zeros_like(points.x)
        threshold = torch.full_like(infinity, THRESHOLD)
        state = {"closest": infinity, "delta": zeros, "mean": zeros, "square": zeros, "threshold": threshold}
        return points.x.clone(), {name: value.clone() for name, value in state.items()}

    def step(self, model: nn.Module, rows: AttackState) -> None:
        s, x = rows.state, rows.x
        delta = s["delta"]
        point = (x + delta).requires_grad_()
        with torch.enable_grad():
            value = margin(model(point), rows.y)
            (gradient,) = torch.autograd.grad(value.clamp_max(0).sum(), point)
        point, adversarial = point.detach(), value.detach() > 0
        self.keep_closest(rows, point, adversarial)

        # The derivative of the approximation of l0 is 2 sigma delta / (delta^2 + sigma)^2 / d.
        smooth = 2 * self.sigma / x[0].numel() * delta / (delta.square() + self.sigma).square()
        gradient = smooth - gradient
        gradient = gradient / per_point(gradient.flatten(1).abs().amax(1).clamp_min(1e-12), x)
        done = rows.iteration.to(x.dtype)
        mean, scale = adam(s, gradient, done + 1)
        size = anneal(done / self.steps, self.step_size, STEP_END * self.step_size)
        delta = self.threat.clamp(x + delta - per_point(size, x) * mean / scale) - x

        change = THRESHOLD_STEP * torch.where(adversarial, size, -size)
        s["threshold"] = (s["threshold"] + change).clamp(0, 1)
        s["delta"] = torch.where(delta.abs() < per_point(s["threshold"], x), 0.0, delta)
        rows.iteration += 1
