"""Several runs of FAB for each point, from its own side and from the other one, that compete for the model passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.attacks.fab import FAB
from atoll.attacks.iterative import AttackState, Points
from atoll.attacks.rays import FAR, RayS
from atoll.explain.search import Found, bisect
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

# Runs that are left in each round, by how many begin; every round gets about an equal share of the iterations.
ROUNDS = {9: (9, 3, 1), 3: (3, 1), 1: (1,)}
CLEAN = {9: 2, 3: 1, 1: 0}  # how many of them begin at the clean point if there are enough examples
COARSE = 3  # halvings of the way to an example before FAB starts there: it only has to be roughly on the boundary


@dataclass(frozen=True)
class Plan:
    """How the model calls for a point are spent.

    Args:
        rounds: for each round how many runs there are, and how many iterations each of them makes.
        examples: how many of the runs begin at examples; the others begin at the clean point.
    """

    rounds: tuple[tuple[int, int], ...]
    examples: int

    @property
    def runs(self) -> int:
        return self.rounds[0][0]

    @property
    def iterations(self) -> int:
        """Of all runs together; each is a forward and a backward pass."""
        return sum(runs * length for runs, length in self.rounds)

    @property
    def forward(self) -> int:
        return COARSE * self.examples + self.iterations


def plan(calls: int, examples: int, others: int) -> Plan:
    """The race for so many calls, given how many examples and how many other classes there are.

    >>> plan(388, 1000, 9)
    Plan(rounds=((9, 6), (3, 20), (1, 69)), examples=7)
    >>> plan(60, 1000, 9)
    Plan(rounds=((3, 4), (1, 15)), examples=2)
    >>> plan(388, 0, 1)  # two classes and no example: there is one run
    Plan(rounds=((1, 194),), examples=0)
    """
    for most, shape in ROUNDS.items():
        starts = min(examples, most - min(CLEAN[most], others))
        iterations = (calls - COARSE * starts) // 2
        if iterations >= 2 * most * len(shape):  # with less than two steps a round would choose blindly
            break
    runs = min(most, starts + others)
    counts = sorted({min(runs, count) for count in shape}, reverse=True)
    lengths = [iterations // len(counts) // count for count in counts[:-1]]
    left = iterations - sum(count * length for count, length in zip(counts, lengths, strict=False))
    return Plan(tuple(zip(counts, [*lengths, left // counts[-1]], strict=True)), starts)


@dataclass(frozen=True)
class Examples:
    """Inputs with the model's predictions, to start from."""

    x: Tensor
    classes: Tensor


def race(
    model: nn.Module,
    threat: ThreatModel,
    points: Points,
    examples: Examples,
    calls: int,
    *,
    batch_size: int,
) -> Found:
    """The closest points with another prediction that FAB finds from several starts, the best runs longest.

    FAB from the clean point follows the gradients it meets there, and on robust models these mislead.  A run that
    starts across the boundary, at an example of another prediction, has found something before it begins, and leads to
    parts of the boundary that the gradient does not point to (Brendel et al., 2019, start there, too).  After each
    round the runs with the closest points go on with all their state (successive halving, Jamieson & Talwalkar, 2016).

    Where no example has another prediction, half of the calls are kept for RayS, which needs no gradient.

    Args:
        model: in evaluation mode.
        threat: norm and bounds.
        points: with the model's predictions as labels.
        examples: the nearest of another prediction are used, seven if there are more than two classes.
        calls: for each point.
        batch_size: rows at a time.
    """
    found = Found.nothing(points)
    logits, y = points.logits, points.y
    apart = _distances(threat, points.x, examples.x).masked_fill(examples.classes[None] == y[:, None], math.inf)
    order = logits.scatter(1, y[:, None], -math.inf).argsort(dim=1, descending=True)
    available = apart.isfinite().sum(1).clamp_max(max(ROUNDS))
    # Points with as many examples have the same plan, and no point has another one because of its company.
    for count in sorted(set(available.tolist())):
        rows = (available == count).nonzero().squeeze(1)
        schedule = plan(calls if count else calls // 2, count, logits.shape[1] - 1)
        part, clean = points[rows], schedule.runs - schedule.examples
        near = apart[rows].topk(schedule.examples, dim=1, largest=False).indices
        starts = [
            bisect(model, part.x, part.y, examples.x[column], examples.classes[column], COARSE)[1]
            for column in near.unbind(1)
        ]
        targets = torch.cat([examples.classes[near], order[rows, :clean]], 1)
        begin = torch.stack([*starts, *[part.x] * clean], 1)
        adv, distance, run = _compete(model, threat, part, begin, targets, schedule, batch_size)
        found.spend(rows, schedule.forward, schedule.iterations)
        hit = distance.isfinite()
        still = torch.eq(adv, begin[torch.arange(len(run), device=run.device), run]).flatten(1).all(1)
        names = [
            "FAB from clean" if number >= schedule.examples else "example" if same else "FAB from examples"
            for number, same in zip(run[hit].tolist(), still[hit].tolist(), strict=True)
        ]
        found.take(rows[hit], adv[hit], names)
        if not count and not hit.all():
            _rays(model, threat, points, found, rows[~hit], calls - 2 * schedule.iterations)
    return found


def _distances(threat: ThreatModel, x: Tensor, examples: Tensor) -> Tensor:
    # The quick way to l2 distances, by a matrix product, rounds by the size of the batch.
    p = {"linf": math.inf, "l2": 2.0, "l1": 1.0}[threat.norm]
    return torch.cdist(x.flatten(1), examples.flatten(1), p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _compete(
    model: nn.Module,
    threat: ThreatModel,
    points: Points,
    starts: Tensor,
    targets: Tensor,
    schedule: Plan,
    batch_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All runs of all points; for each point the closest place, its distance (infinite if there is none), the run."""
    attack = FAB(threat, targets=1, steps=schedule.iterations + 1, minimum_norm=True)
    count, runs = targets.shape
    origin = torch.arange(count, device=targets.device).repeat_interleave(runs)
    every = points[origin]
    # FAB takes its target from the logits.
    every.logits = torch.zeros_like(every.logits).scatter(1, targets.reshape(-1, 1), 1.0)
    rows = attack.init_state(every, PointRNG("race", index=every.index))  # one run each: nothing is drawn
    rows.state["iterate"] = starts.flatten(0, 1)
    rows.state["run"] = torch.arange(runs, device=targets.device).repeat(count)
    for left, length in schedule.rounds:
        rows = _best(rows, count, left)
        parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        for part in parts:
            for _ in range(length):
                attack.step(model, part)
        rows = AttackState.cat(parts)
    rows = _best(rows, count, 1)
    return rows.x_adv, rows.state["closest"], rows.state["run"]


def _best(rows: AttackState, points: int, left: int) -> AttackState:
    """So many rows of each point, those with the closest points; of equal ones the first."""
    runs = len(rows) // points
    if runs == left:
        return rows
    order = rows.state["closest"].view(points, runs).argsort(dim=1, stable=True)[:, :left].sort(1).values
    first = torch.arange(points, device=order.device)[:, None] * runs
    return rows[(first + order).flatten()]


def _rays(model: nn.Module, threat: ThreatModel, points: Points, found: Found, rows: Tensor, queries: int) -> None:
    """Labels alone, along rays to corners of the bounds: any point with another prediction will do."""
    reach = FAR if threat.bounds is None else threat.bounds[1] - threat.bounds[0]
    attack, part = RayS(ThreatModel("linf", reach, threat.bounds), queries=queries), points[rows]
    under = attack.init_state(part, PointRNG("RayS", index=part.index))  # draws nothing
    while (active := ~under.success & (under.iteration < queries)).any():
        attack.step(model, under)
        found.spend(rows, active.long())
    found.take(rows[under.success], under.x_adv[under.success], "RayS")
