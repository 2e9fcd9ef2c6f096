"""Auto-PGD (Croce & Hein, 2020): PGD with momentum that finds its own step size."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.attacks.objectives import OBJECTIVES, dlr_targeted
from atoll.attacks.rows import Points, RowAttack, Rows, choose
from atoll.errors import InputError
from atoll.streams import Streams
from atoll.threat import ThreatModel, per_point

MOMENTUM = 0.75
RHO = 0.75  # a window is healthy if the objective rose in more than this share of its steps


def checkpoints(steps: int) -> list[int]:
    """Steps at which the step size may be halved: after 22 % of the run, then in windows 3 % shorter, down to 6 %.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    window, shrink, floor = (max(1, int(share * steps)) for share in (0.22, 0.03, 0.06))
    found = []
    at = window
    while at <= steps:
        found.append(at)
        window = max(window - shrink, floor)
        at += window
    return found


class APGD(RowAttack):
    r"""APGD-CE, APGD-DLR and, with targets, APGD-T.

    :math:`x_{k+1} = \Pi(x_k + 0.75 (\Pi(x_k + \eta\, s_k) - x_k) + 0.25 (x_k - x_{k-1}))`, s the steepest direction.
    At each checkpoint the step is halved, and the search goes back to the best point, if the objective rose too rarely
    since the last one, or neither step nor best value have changed.  A point is given up at its first success.

    Costs ``steps + 1`` forward and backward passes for a point that stands.

    Args:
        threat: linf or l2 (l1 has an attack of its own, ``APGDL1``).
        objective: ``ce`` or ``dlr``.
        steps: gradient steps per target.
        targets: 0 for untargeted; otherwise so many classes are tried in turn with the targeted DLR objective, those
            with the largest clean logits first.
    """

    def __init__(
        self,
        threat: ThreatModel,
        objective: Literal["ce", "dlr"] = "ce",
        *,
        steps: int = 100,
        targets: int = 0,
    ) -> None:
        super().__init__(threat)
        if threat.norm == "l1":
            raise InputError("APGD: expected linf or l2; l1 has an attack of its own")
        if objective not in ("ce", "dlr"):
            raise InputError(f"objective: expected ce or dlr, got {objective!r}")
        if steps < 1 or targets < 0:
            raise InputError(f"steps, targets: expected steps >= 1 and targets >= 0, got {steps}, {targets}")
        self.objective = objective
        self.steps = steps
        self.targets = targets

    @cached_property
    def windows(self) -> Tensor:
        """For each number of steps done: the length of the window that ends there, 0 if none does."""
        ends = [0, *checkpoints(self.steps)]
        table = torch.zeros(self.steps + 1)
        for before, end in itertools.pairwise(ends):
            table[end] = end - before
        return table

    def begin(self, points: Points, streams: Streams) -> tuple[Tensor, dict[str, Tensor]]:
        x = points.x
        none = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)
        state = {
            "previous": x,
            "best": x,
            "best_gradient": torch.zeros_like(x),
            "best_value": none,
            "checked_value": none,
            "last_value": none,
            "rises": torch.zeros_like(none),
            "step": torch.full_like(none, 2 * self.threat.radius),
            "reduced": torch.ones_like(none),
        }
        if self.targets:
            others = points.logits.scatter(1, points.y[:, None], -math.inf)
            state["order"] = others.argsort(dim=1, descending=True)[:, : self._targets(points.logits.shape[1])]
        return self.threat.random_start(x, streams), state

    def _targets(self, classes: int) -> int:
        return min(self.targets, classes - 1)

    def length(self, classes: int) -> int:
        return max(1, self._targets(classes)) * (self.steps + 1)

    def advance(self, model: nn.Module, rows: Rows) -> None:
        s, threat = rows.state, self.threat
        done = rows.clock % (self.steps + 1)  # steps done in this run (of one target)
        value, gradient, success = self._look(model, rows)
        rows.success |= success
        better = value > s["best_value"]
        s["best"] = choose(better, rows.adv, s["best"])
        s["best_gradient"] = choose(better, gradient, s["best_gradient"])
        s["best_value"] = torch.where(better, value, s["best_value"])
        s["rises"] = s["rises"] + (value > s["last_value"]) * (done > 0)
        s["last_value"] = value

        window = self.windows.to(value.device)[done]
        ends = window > 0
        stuck = (s["rises"] <= RHO * window) | ((s["reduced"] == 0) & (s["checked_value"] >= s["best_value"]))
        halve = ends & stuck
        s["step"] = torch.where(halve, s["step"] / 2, s["step"])
        s["reduced"] = torch.where(ends, halve.to(value.dtype), s["reduced"])
        s["checked_value"] = torch.where(ends | (done == 0), s["best_value"], s["checked_value"])
        s["rises"] = torch.where(ends, 0.0, s["rises"])
        current = choose(halve, s["best"], rows.adv)
        gradient = choose(halve, s["best_gradient"], gradient)

        plain = threat.project(current + threat.steepest(gradient) * per_point(s["step"], current), rows.x)
        keep = per_point(torch.where(done > 0, MOMENTUM, 1.0).to(current.dtype), current)
        following = threat.project(current + keep * (plain - current) + (1 - keep) * (current - s["previous"]), rows.x)
        s["previous"] = current
        rows.adv = choose(rows.success, rows.adv, following)
        rows.clock += 1
        if self.targets:
            self._next_target(rows)

    def _look(self, model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Objective, gradient and success at the candidates: the one forward and backward pass of an iteration."""
        candidates = rows.adv.detach().requires_grad_()
        with torch.enable_grad():
            logits = model(candidates)
            if self.targets:
                turn = (rows.clock // (self.steps + 1)).clamp_max(rows.state["order"].shape[1] - 1)
                target = rows.state["order"].gather(1, turn[:, None]).squeeze(1)
                value = dlr_targeted(logits, rows.y, target)
            else:
                value = OBJECTIVES[self.objective](logits, rows.y, None)
            (gradient,) = torch.autograd.grad(value.sum(), candidates)
        return value.detach(), gradient, logits.detach().argmax(1) != rows.y

    def _next_target(self, rows: Rows) -> None:
        """Rows that are through with a target start afresh on the next one."""
        fresh = ((rows.clock % (self.steps + 1) == 0) & ~rows.success).nonzero().squeeze(1)
        if not len(fresh):
            return
        streams = rows.streams[fresh]
        start = self.threat.random_start(rows.x[fresh], streams)
        rows.streams.put(fresh, streams)
        rows.adv = rows.adv.index_copy(0, fresh, start)
        reset = {
            "best_value": -math.inf,
            "last_value": -math.inf,
            "rises": 0.0,
            "reduced": 1.0,
            "step": 2 * self.threat.radius,
        }
        for name, value in reset.items():
            rows.state[name] = rows.state[name].index_fill(0, fresh, value)
