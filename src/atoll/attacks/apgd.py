"""Auto-PGD (Croce & Hein, 2020): PGD with momentum and an adaptive step size."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS
from atoll.attacks.iterative import (
    AttackState,
    IterativeAttack,
    Points,
    assign_rows,
    current_target,
    draw_rows,
    ranked_targets,
)
from atoll.errors import LARGEST_STEPS, InputError, check_count
from atoll.losses.objectives import OBJECTIVES, TARGETED, dlr_targeted
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

MOMENTUM = 0.75
RHO = 0.75  # keep the step size if the objective rose in more than this share of the steps of a window

# Constants for l1.
FEWER = 0.95  # a perturbation counts as sparser if it has less than this share of the earlier coordinates
THINNING = 1.5  # number of coordinates of the best perturbation, divided by those of a step
SHRINK, FLOOR = 1.5, 0.1  # divisor of the step size if nothing became sparser; smallest step in units of the radius


@ATTACKS.register()
class APGD(IterativeAttack):
    r"""Auto-PGD: PGD with momentum and an adaptive step size (APGD-CE, APGD-DLR and, with targets, APGD-T).

    For linf and l2, with s the steepest direction,
    :math:`x_{k+1} = \Pi(x_k + 0.75 (\Pi(x_k + \eta\, s_k) - x_k) + 0.25 (x_k - x_{k-1}))`.  At a few checkpoints the
    attack halves the step size and returns to the best point, if the objective rose too rarely since the last
    checkpoint or if neither the step size nor the best value has changed.  For l1 see ``SparseSteps``.  The search
    for a point stops at its first success.  For robust points the attack returns the best point of the last run.

    Costs ``eot * (steps + 1)`` forward and backward passes per run (l1: ``steps + 3``) for a robust point.

    Args:
        threat: linf, l2 or l1.
        objective: ``ce``, ``dlr``, ``margin`` or ``pm`` (probability margin).  With targets, the last two compare with
            the target's logit or probability, and the others mean the targeted DLR.
        steps: gradient steps per run.
        targets: number of classes to try, largest clean logit first; 0 for the untargeted attack.
        restarts: number of runs (per target), each from a random start.
        patience: stop a run at a checkpoint if ``patience`` times its gain so far would not reach the boundary; None to
            never stop early.  Requires linf or l2, and ``dlr`` or targets, whose objective is positive only for
            adversarial points.
        eot: number of passes over which to average objective, gradient and prediction, for randomized models.  A single
            pass may be wrong by chance, so the mean of the predicted probabilities decides success.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
    >>> [int(model(APGD(ThreatModel(norm, 0.25))(model, x, y)).argmax(1)) for norm in ("linf", "l2", "l1")]
    [1, 1, 1]
    """

    def __init__(
        self,
        threat: ThreatModel,
        objective: Literal["ce", "dlr", "margin", "pm"] = "ce",
        *,
        steps: int = 100,
        targets: int = 0,
        restarts: int = 1,
        patience: float | None = None,
        eot: int = 1,
    ) -> None:
        super().__init__(threat)
        if objective not in ("ce", "dlr", "margin", "pm"):
            raise InputError(f"objective: expected ce, dlr, margin or pm, got {objective!r}")
        check_count(1, LARGEST_STEPS, steps=steps, restarts=restarts, eot=eot)
        check_count(0, targets=targets)
        if patience is not None and (
            not 0 <= patience < math.inf or threat.norm == "l1" or (objective == "ce" and not targets)
        ):
            raise InputError(f"patience: expected a number >= 0, linf or l2, and dlr or targets, got {patience}")
        self.objective = objective
        self.steps = steps
        self.targets = targets
        self.restarts = restarts
        self.patience = patience
        self.eot = eot
        self.rule = SparseSteps(threat, steps) if threat.norm == "l1" else MomentumSteps(threat, steps, patience)

    def num_steps(self, classes: int) -> int:
        return max(1, min(self.targets, classes - 1)) * self.restarts * self.rule.run_length

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        x = points.x
        unknown = x.new_full((len(x),), -math.inf)
        state = {"best": x.clone(), "best_gradient": torch.zeros_like(x), "best_value": unknown, **self.rule.state(x)}
        if self.targets:
            state["order"] = ranked_targets(points, self.targets)
        return self.rule.start(x, streams), state

    def step(self, model: nn.Module, rows: AttackState) -> None:
        value, gradient, wrong = self._evaluate(model, rows)
        s, position = rows.state, rows.iteration % self.rule.run_length
        rows.success |= self.rule.successes(wrong, position)
        first = self.rule.starts_phase(position)
        better = (value > s["best_value"]) | first
        assign_rows(s["best"], better, rows.x_adv)
        assign_rows(s["best_gradient"], better, gradient)
        s["best_value"] = torch.where(better, value, s["best_value"])
        # Finished rows may stay in the batch for a while; they must not change.
        final = rows.success
        if self.patience is not None:
            final = final | (rows.iteration >= self._num_steps(rows))
        following = self.rule.step(rows, position, first, value, gradient)
        assign_rows(following, final, rows.x_adv)
        rows.x_adv = following
        rows.iteration += 1
        if self.patience is not None:
            remaining = self.rule.run_length - 1 - position
            rows.iteration += torch.where(s["hopeless"] & ~final, remaining, 0)
        if self._num_steps(rows) > self.rule.run_length:
            self._restart(rows)

    def _evaluate(self, model: nn.Module, rows: AttackState) -> tuple[Tensor, Tensor, Tensor]:
        """Return objective and gradient at the candidates (up to a factor), and whether they are misclassified."""
        value, gradient, votes = self._pass(model, rows)
        for _ in range(self.eot - 1):
            for total, more in zip((value, gradient, votes), self._pass(model, rows), strict=True):
                total += more
        return value, gradient, votes.argmax(1) != rows.y

    def _pass(self, model: nn.Module, rows: AttackState) -> tuple[Tensor, Tensor, Tensor]:
        candidates = rows.x_adv.detach().requires_grad_()
        with torch.enable_grad():
            logits = model(candidates)
            if self.targets:
                target = current_target(rows, self.rule.run_length * self.restarts)
                value = TARGETED.get(self.objective, dlr_targeted)(logits, rows.y, target.squeeze(1))
            else:
                value = OBJECTIVES[self.objective](logits, rows.y, None)
            (gradient,) = torch.autograd.grad(value.sum(), candidates)
        votes = logits.detach()
        # Autograd may return an expanded tensor, but the steps modify the gradient in place.
        return value.detach(), gradient.contiguous(), votes if self.eot == 1 else votes.softmax(1)

    def _num_steps(self, rows: AttackState) -> int:
        turns = rows.state["order"].shape[1] if self.targets else 1
        return turns * self.restarts * self.rule.run_length

    def _restart(self, rows: AttackState) -> None:
        """Start the next run at a random point in rows that have finished one."""
        more = (rows.iteration < self._num_steps(rows)) & ~rows.success
        draw_rows(rows.x_adv, more & (rows.iteration % self.rule.run_length == 0), rows, self.rule.start)


class MomentumSteps:
    """Steps of APGD for linf and l2, with momentum and a step size that starts at 2 eps and is halved at checkpoints.

    ``run_length`` is the number of iterations of a run: each evaluates one candidate, and the last takes no step.
    """

    def __init__(self, threat: ThreatModel, steps: int, patience: float | None = None) -> None:
        self.threat = threat
        self.patience = math.inf if patience is None else patience
        self.run_length = steps + 1
        # For each iteration, the number of rises up to which the step size is too large, or -1 if no window ends there,
        # and the weights of the new and (negative) of the previous step.  The table moves to the device of the points.
        self.schedule = torch.tensor([-1.0, MOMENTUM, MOMENTUM - 1]).repeat(self.run_length, 1)
        self.schedule[0, 1:] = torch.tensor([1.0, 0.0])
        for before, end in itertools.pairwise([0, *checkpoints(steps)]):
            self.schedule[end, 0] = RHO * (end - before)

    def start(self, x: Tensor, streams: PointRNG) -> Tensor:
        return self.threat.random_start(x, streams)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        zeros = x.new_zeros(len(x))
        names = ("step", "rises", "first_value", "last_value", "checked_value")
        flags = {name: zeros.bool() for name in ("reduced", "hopeless")}
        return {"previous": x.clone(), **flags, **{name: zeros.clone() for name in names}}

    def starts_phase(self, position: Tensor) -> Tensor:
        """Whether to forget the best point at this iteration of the run."""
        return position == 0

    def successes(self, wrong: Tensor, position: Tensor) -> Tensor:
        """Return which misclassified candidates count; all, because they are inside the ball."""
        return wrong

    def step(self, rows: AttackState, position: Tensor, first: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the next candidates, given objective and gradient at the current ones."""
        s = rows.state
        self.schedule = self.schedule.to(value.device, non_blocking=True)
        most, weight, lag = self.schedule[position].unbind(1)
        ends = most >= 0
        rises = (s["rises"] + (value > s["last_value"])).masked_fill_(first, 0.0)
        stuck = (rises <= most) | (~s["reduced"] & (s["checked_value"] >= s["best_value"]))
        halve = ends & stuck & ~rows.success
        s["step"] = torch.where(halve, s["step"] / 2, s["step"]).masked_fill_(first, 2 * self.threat.radius)
        s["reduced"] = torch.where(ends, halve, s["reduced"] | first)
        if self.patience < math.inf:
            s["first_value"] = torch.where(first, value, s["first_value"])
            s["hopeless"] = ends & (s["best_value"] + self.patience * (s["best_value"] - s["first_value"]) < 0)
        s["checked_value"] = torch.where(ends | first, s["best_value"], s["checked_value"])
        s["rises"], s["last_value"] = rises.masked_fill_(ends, 0.0), value
        assign_rows(rows.x_adv, halve, s["best"])
        assign_rows(gradient, halve, s["best_gradient"])

        current, x = rows.x_adv, rows.x
        step = self.threat.steepest(gradient).mul_(per_point(s["step"], x))
        plain = self.threat.project(step.add_(current), x)
        keep = per_point(weight.to(x.dtype), x)
        momentum = s["previous"].sub_(current).mul_(per_point(lag.to(x.dtype), x))
        following = self.threat.project(plain.sub_(current).mul_(keep).add_(momentum).add_(current), x)
        s["previous"] = current
        last = position == self.run_length - 1
        assign_rows(following, last | s["hopeless"] if self.patience < math.inf else last, s["best"])
        return following


def checkpoints(steps: int) -> list[int]:
    """Return the steps at which the step size may be halved.

    The first window is 22 % of the run.  Each following window is 3 % of the run shorter, but at least 6 % long.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    window, shrink, floor = (max(1, int(share * steps)) for share in (0.22, 0.03, 0.06))
    result = []
    step = window
    while step <= steps:
        result.append(step)
        window = max(window - shrink, floor)
        step += window
    return result


class SparseSteps:
    r"""Steps of APGD for l1 (Croce & Hein, 2021, "Mind the box"): sparse, with radii that shrink to eps.

    A step of l1 norm :math:`\eta` is spread over the k largest coordinates of the gradient and projected exactly:
    :math:`x_{j+1} = \Pi(x_j + \eta\, \mathrm{sign}(g) 1_{top k} / k)`, where k is two thirds of the number of
    coordinates in which the best point differs from the clean one.  Checkpoints (every 4 % of a phase) update k.  If
    the best point has become sparser, the search returns to it with the full step :math:`\eta` = radius; otherwise the
    step size is divided by 1.5, down to a tenth of the radius.

    Three phases of 30, 30 and 40 % of the steps have radii 3 eps, 2 eps and eps.  Each starts at the projection of the
    best point of the previous phase.  Only candidates of the last phase count as successes.

    >>> SparseSteps(ThreatModel("l1", 12.0), 100).times.bincount()  # evaluations at radius 0, 12, 24, 36
    tensor([ 0, 41, 31, 31])
    """

    def __init__(self, threat: ThreatModel, steps: int) -> None:
        short = 3 * steps // 10  # 0 in very short runs, which have only the last phase
        phases = [(times, count) for times, count in ((3, short), (2, short), (1, steps - 2 * short)) if count]
        # For each iteration of a run (a phase has one more than steps): the radius in units of eps, the position in the
        # phase, whether it is a checkpoint, and the radius of the next candidate.
        self.times = torch.cat([torch.full((count + 1,), times) for times, count in phases])
        self.place = torch.cat([torch.arange(count + 1) for _, count in phases])
        self.check = torch.cat([torch.arange(count + 1) % max(1, int(0.04 * count)) == 0 for _, count in phases])
        self.next_times = torch.cat([self.times[1:], self.times[-1:]])
        self.threats = {times: ThreatModel("l1", times * threat.radius, threat.bounds) for times, _ in phases}
        self.threat = threat
        self.radius = threat.radius
        self.run_length = len(self.times)

    def start(self, x: Tensor, streams: PointRNG) -> Tensor:
        """Return projected Gaussian noise, which is sparse, unlike a uniform draw from the ball."""
        threat = self.threats[int(self.times[0])]
        return threat.project(x + streams.normal(*x.shape[1:], dtype=x.dtype), x)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        zeros = x.new_zeros(len(x))
        return {"step": zeros, "sparsity": zeros.clone()}

    def starts_phase(self, position: Tensor) -> Tensor:
        """Whether to forget the best point at this iteration of the run, because it belongs to another radius."""
        return self._at(self.place, position) == 0

    def successes(self, wrong: Tensor, position: Tensor) -> Tensor:
        """Return which misclassified candidates count; those of the last phase, which are inside the ball."""
        return wrong & (self._at(self.times, position) == 1)

    @staticmethod
    def _at(table: Tensor, position: Tensor) -> Tensor:
        """Return the entries of a table for the iterations of the rows."""
        return table.to(position.device, non_blocking=True)[position]

    def step(self, rows: AttackState, position: Tensor, first: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the next candidates, given the gradient at the current ones."""
        s, x = rows.state, rows.x
        times, next_times = self._at(self.times, position), self._at(self.next_times, position)
        radius, check = times * self.radius, self._at(self.check, position)
        sparsity = (s["best"] != x).flatten(1).sum(1).to(x.dtype)
        fewer = check & ~first & (sparsity < FEWER * s["sparsity"])
        shrunk = torch.maximum(s["step"] / SHRINK, FLOOR * radius)
        s["step"] = torch.where(first | fewer, radius, torch.where(check, shrunk, s["step"])).to(x.dtype)
        s["sparsity"] = torch.where(check, sparsity, s["sparsity"])
        back = fewer & ~rows.success
        assign_rows(rows.x_adv, back, s["best"])
        assign_rows(gradient, back, s["best_gradient"])

        following = self._sparse(gradient, s["sparsity"]).mul_(per_point(s["step"], x)).add_(rows.x_adv)
        assign_rows(following, (next_times != times) | (position == self.run_length - 1), s["best"])
        if x.device.type != "cpu":  # to select rows, the program would have to wait for the device
            return self.threat.project(following, x, next_times.double() * self.radius)
        for number, threat in self.threats.items():
            here = next_times == number
            if here.any():
                following[here] = threat.project(following[here], x[here])
        return following

    @staticmethod
    def _sparse(gradient: Tensor, sparsity: Tensor) -> Tensor:
        """Return the signs of the largest coordinates, divided by their number."""
        flat = gradient.flatten(1)
        keep = (sparsity / THINNING).round().clamp_(1, flat.shape[1]).long()
        size = flat.abs()
        largest = int(keep.max()) if flat.device.type == "cpu" else flat.shape[1]  # without waiting for the device
        least = size.topk(largest, dim=1).values.gather(1, keep[:, None] - 1)
        signs = flat.sign().mul_(size >= least)
        return signs.div_(signs.abs().sum(1, keepdim=True).clamp_min_(1)).view_as(gradient)


# These names fix the objective, so that the attacks keep it when they train with a loss that has another one.
ATTACKS.add("APGD-CE", APGD, objective="ce")
ATTACKS.add("APGD-DLR", APGD, objective="dlr")
ATTACKS.add("APGD-T", APGD, objective="dlr", targets=9)
