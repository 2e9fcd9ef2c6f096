"""The boundary search of the thesis (table B.1): PGD at growing eps, then CW, and the closer of both."""

from __future__ import annotations

import math

import torch
from torch import nn

from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.iterative import Points
from atoll.attacks.pgd import PGD
from atoll.explain.search import Found
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

RUNGS = ("36/255", "64/255", 0.3, 0.5, 0.7, 0.9, 1.1)
STEPS = 100
LEARNING_RATE = 0.01
CONSTANTS = 9  # of CW, which the thesis does not say: Foolbox's default


def ladder(
    model: nn.Module, threat: ThreatModel, points: Points, calls: float, *, seed: object, with_cw: bool = True
) -> Found:
    """Rungs for the points that stand, then CW for all; what the calls of a point do not reach is left out.

    Args:
        model: in evaluation mode.
        threat: l2, with the bounds.
        points: with the model's predictions as labels.
        calls: for each point; infinity for all it takes, at most 7 x 201 + 1800.
        seed: of PGD's random starts.
        with_cw: whether there is CW after the rungs.
    """
    found = Found.nothing(points)
    closest = torch.full_like(points.logits[:, 0], math.inf)
    for eps in RUNGS:
        rung = ThreatModel("l2", eps, threat.bounds)
        attack = PGD(rung, steps=STEPS, step_size=2 * rung.radius / STEPS)
        able = found.forward + found.backward + 2 * STEPS + 1 <= calls
        rows = (closest.isinf() & able).nonzero().squeeze(1)
        if not len(rows):
            break
        part = points[rows]
        adv = attack(model, part.x, part.y, seed=(seed, "ladder"), index=part.index)
        with torch.no_grad():
            fallen = model(adv).argmax(1) != part.y
        found.spend(rows, STEPS + 1, STEPS)
        found.take(rows[fallen], adv[fallen], "PGD")
        closest[rows[fallen]] = rung.distance(adv, part.x)[fallen]
    if not with_cw:
        return found
    left = ((calls - found.forward - found.backward) / (2 * STEPS)).clamp_max(CONSTANTS).long()
    for count in sorted(set(left.tolist()) - {0}):
        rows = (left == count).nonzero().squeeze(1)
        part, length = points[rows], STEPS * count
        cw = CarliniWagner(
            threat, steps=STEPS, binary_search_steps=count, learning_rate=LEARNING_RATE, abort_early=False,
            minimum_norm=True,
        )  # fmt: skip
        under = cw.init_state(part, PointRNG("CW", index=part.index))  # draws nothing
        for _ in range(length):
            cw.step(model, under)
        found.spend(rows, length, length)
        closer = under.state["closest"] < closest[rows]
        found.take(rows[closer], under.x_adv[closer], "CW")
    return found
