"""The boundary search of the thesis (table B.1): PGD at growing radii, then CW; the closer result counts."""

from __future__ import annotations

import math

import torch
from torch import nn

from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.iterative import Points
from atoll.attacks.pgd import PGD
from atoll.errors import InputError
from atoll.explain.boundary import Examples, SearchState
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

RADII = ("36/255", "64/255", 0.3, 0.5, 0.7, 0.9, 1.1)
STEPS = 100
LEARNING_RATE = 0.01
CONSTANTS = 9  # binary search steps of CW; the thesis does not give the number, so this is Foolbox's default


def pgd_cw_search(
    model: nn.Module,
    threat: ThreatModel,
    points: Points,
    examples: Examples,
    calls: float,
    *,
    seed: object,
    batch_size: int,
    with_cw: bool = True,
) -> SearchState:
    """A strategy for ``boundary_search``: PGD at growing radii until it succeeds, then CW on all points.

    The search skips steps that do not fit into the budget of a point.

    Args:
        model: the model, in evaluation mode.
        threat: threat model with norm l2 and the bounds of inputs.
        points: points, with the model's predictions as labels.
        examples: not used.
        calls: budget of model calls per point; the search takes at most 7 x 201 + 1800, so infinity is allowed.
        seed: seed of PGD's random starts.
        batch_size: not used; all points run together.
        with_cw: whether to run CW after PGD.
    """
    if threat.norm != "l2":
        raise InputError(f"norm: the search with PGD and CW expects l2, got {threat.norm}")
    state = SearchState.start(points)
    closest = torch.full_like(points.logits[:, 0], math.inf)
    for eps in RADII:
        ball = ThreatModel("l2", eps, threat.bounds)
        attack = PGD(ball, steps=STEPS, step_size=2 * ball.radius / STEPS)
        able = state.forward + state.backward + 2 * STEPS + 1 <= calls
        rows = (closest.isinf() & able).nonzero().squeeze(1)
        if not len(rows):
            break
        part = points[rows]
        adv = attack(model, part.x, part.y, seed=(seed, "ladder"), index=part.index)
        with torch.no_grad():
            fallen = model(adv).argmax(1) != part.y
        state.count(rows, STEPS + 1, STEPS)
        state.record(rows[fallen], adv[fallen], "PGD")
        closest[rows[fallen]] = ball.distance(adv, part.x)[fallen]
    if not with_cw:
        return state
    left = ((calls - state.forward - state.backward) / (2 * STEPS)).clamp_max(CONSTANTS).long()
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
        state.count(rows, length, length)
        closer = under.state["closest"] < closest[rows]
        state.record(rows[closer], under.x_adv[closer], "CW")
    return state
