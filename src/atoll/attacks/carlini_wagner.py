"""The l2 attack of Carlini & Wagner (2017), which searches for the closest misclassified point."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import AttackState, MinimumNormAttack, Points, adam, where_rows
from atoll.errors import LARGEST_STEPS, check_count, check_range
from atoll.losses.objectives import margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

STRETCH = 1.1  # tanh reaches this far beyond the bounds, so that black and white pixels have a gradient
PROGRESS = 0.9999  # the loss has improved if it is below this share of the lowest so far
LARGEST = 1e10  # largest constant, as in the authors' code

# State that is reset for each constant.
RESET = {"move": 0, "mean": 0, "square": 0, "successful": 0, "lowest": math.inf, "waited": 0}


@ATTACKS.register("Carlini-Wagner")
class CarliniWagner(MinimumNormAttack):
    r"""Carlini-Wagner attack: minimizes the squared l2 distance plus c times the margin, with Adam.

    .. math:: \|x' - x\|_2^2 + c \max\big(g_y(x') - \max_{j \ne y} g_j(x') + \kappa,\ 0\big)

    Each point has its own constant c.  It is multiplied or divided by ten until one constant succeeds and another
    fails, and then bisected; every attempt starts at the clean point.  If the inputs have bounds, :math:`x'` is a tanh
    of the variables that Adam optimizes.  It reaches a little beyond the bounds and is clipped, so that black and white
    pixels can change.

    Costs at most ``steps * binary_search_steps`` forward and backward passes per point.

    Args:
        threat: l2.
        steps: iterations for each constant.
        binary_search_steps: number of constants to try.
        learning_rate: learning rate of Adam.
        initial_const: the first constant (1e-3 in the authors' code); None for a good one if the model were linear,
            :math:`4 m / \|\nabla m\|^2` with m the max above at the clean point.
        confidence: :math:`\kappa`, by how much another logit must exceed the logit of ``y``.
        abort_early: continue with the next constant when the loss has not improved for a tenth of the steps.
        minimum_norm: see ``MinimumNormAttack``.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> attack = CarliniWagner(ThreatModel("l2", 0.5), steps=100, minimum_norm=True)
    >>> attack(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0])).round(decimals=3)
    tensor([[0.5000, 0.5000]])
    """

    norms = ("l2",)

    def __init__(
        self,
        threat: ThreatModel,
        *,
        steps: int = 1000,
        binary_search_steps: int = 9,
        learning_rate: float = 0.01,
        initial_const: float | None = None,
        confidence: float = 0.0,
        abort_early: bool = True,
        minimum_norm: bool = False,
    ) -> None:
        super().__init__(threat, minimum_norm=minimum_norm)
        check_count(1, LARGEST_STEPS, steps=steps, binary_search_steps=binary_search_steps)
        check_range("(0, inf)", learning_rate=learning_rate)
        check_range(f"(0, {LARGEST:g}]", initial_const=initial_const)
        check_range("[0, inf)", confidence=confidence)
        self.steps = steps
        self.binary_search_steps = binary_search_steps
        self.learning_rate = learning_rate
        self.initial_const = initial_const
        self.confidence = confidence
        self.abort_early = abort_early

    def num_steps(self, classes: int) -> int:
        return self.steps * self.binary_search_steps

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        x = points.x
        zero, infinity = x.new_zeros(len(x)), x.new_full((len(x),), math.inf)
        _, adversarial = self._judge(points.logits, points.y)
        return x.clone(), {
            "closest": torch.where(adversarial, zero, infinity),
            "move": torch.zeros_like(x),  # Adam's variables, relative to the clean point
            "mean": torch.zeros_like(x),
            "square": torch.zeros_like(x),
            "const": torch.full_like(zero, self.initial_const or 0.0),
            "low": zero,  # the largest constant that failed
            "high": infinity,  # the smallest constant that succeeded
            "successful": torch.zeros_like(adversarial),
            "lowest": infinity,
            "waited": zero,
        }

    def step(self, model: nn.Module, rows: AttackState) -> None:
        s, x = rows.state, rows.x
        # Finished rows may stay in the batch for a while; they must not change.
        active = (s["closest"] > self.stop_distance) & (rows.iteration < self.num_steps(0))
        point, slope = self._point(x, s["move"])
        point.requires_grad_()
        with torch.enable_grad():
            logits = model(point)
            missing, adversarial = self._judge(logits, rows.y)
            (gradient,) = torch.autograd.grad(missing.sum(), point)
        point, missing = point.detach(), missing.detach()

        distance = self.threat.distance(point, x)
        self.keep_closest(rows, point, active & adversarial)

        if self.initial_const is None:
            # Twice the constant that moves the point of a linear model to the boundary, where the optimum stays for
            # any larger constant.
            guess = 4 * missing / gradient.flatten(1).square().sum(1).clamp_min(1e-30)
            s["const"] = torch.where(rows.iteration == 0, guess.clamp(1 / LARGEST, LARGEST), s["const"])
        loss = distance**2 + s["const"] * missing
        improved = loss < PROGRESS * s["lowest"]
        s["lowest"] = torch.where(improved, loss, s["lowest"])
        s["waited"] = torch.where(improved, 0.0, s["waited"] + 1)
        s["successful"] = s["successful"] | adversarial

        done = (rows.iteration % self.steps + 1).to(x.dtype)  # iterations with this constant
        mean, scale = adam(s, (2 * (point - x) + per_point(s["const"], x) * gradient) * slope, done)
        s["move"].addcdiv_(mean, scale, value=-self.learning_rate)
        due = done == self.steps
        if self.abort_early:
            due |= s["waited"] >= self.steps / 10
        following = torch.where(due, (rows.iteration // self.steps + 1) * self.steps, rows.iteration + 1)
        rows.iteration = torch.where(active, following, rows.iteration)
        if due.device.type != "cpu" or due.any():  # the answer of an accelerator takes longer than the call
            self._next_const(s, due)

    def _judge(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much is missing for a misclassification with the required confidence, and whether it is one."""
        handicapped = logits.scatter_add(1, y[:, None], torch.full_like(logits[:, :1], self.confidence))
        return (-margin(handicapped, y)).clamp_min(0), handicapped.argmax(1) != y

    def _point(self, x: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input that Adam's variables represent, and its derivative with respect to them."""
        if self.threat.bounds is None:
            return x + move, x.new_ones(())
        low, high = self.threat.bounds
        reach = STRETCH * (high - low) / 2
        start = (x - (low + high) / 2) / reach
        moved = torch.tanh(torch.atanh(start) + move)
        # Clipping gets slope 1, otherwise pixels that are pushed out of the bounds could not come back.
        return self.threat.clamp(x + reach * (moved - start)), reach * (1 - moved**2)

    def _next_const(self, s: dict[str, Tensor], due: Tensor) -> None:
        """Restart rows that are finished with a constant from the clean point, with the next constant."""
        s["high"] = torch.where(due & s["successful"], s["const"], s["high"])
        s["low"] = torch.where(due & ~s["successful"], s["const"], s["low"])
        between = torch.where(s["low"] > 0, (s["low"] + s["high"]) / 2, s["high"] / 10)
        following = torch.where(s["high"] < math.inf, between, (10 * s["low"]).clamp_max(LARGEST))
        s["const"] = torch.where(due, following, s["const"])
        for name, value in RESET.items():
            s[name] = where_rows(due, torch.full_like(s[name], value), s[name])
