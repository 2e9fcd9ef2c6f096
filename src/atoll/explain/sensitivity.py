"""How much an attribution can change near an input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.explain.attributions import PointAttribution, Target, checked, checked_target
from atoll.explain.boundary import content_index
from atoll.explain.faithfulness import explain_where_possible
from atoll.rng import PointRNG
from atoll.threat import Bounds, Norm, ThreatModel, per_point


@dataclass(frozen=True)
class AttributionSensitivity:
    """For each point the largest ratio, and where: pairs that prove that the constant is not smaller."""

    value: Tensor
    at: Tensor


def attribution_lipschitz(
    method: PointAttribution,
    inputs: Tensor,
    target: Target = None,
    *,
    eps: float,
    norm: Norm = "l2",
    bounds: Bounds | None = (0.0, 1.0),
    starts: int = 4,
    steps: int = 20,
    seed: object = 0,
) -> AttributionSensitivity:
    r"""How much an attribution can change near an input: a lower bound of its Lipschitz constant in a ball.

    .. math:: \max_{\|x' - x\| \le \epsilon} \frac{\|A(x') - A(x)\|}{\|x' - x\|}

    That is the smallest lambda for which the attribution is (lambda, eps)-locally robust (thesis, definition 12, with
    its premise corrected: see the errata).  Gradients of ReLU nets are constant almost everywhere, so the ascent takes
    none: from several random starts at distances between eps and eps / 100 it moves at random, and stays where the
    ratio is larger.  Any point it finds is a proof that the constant is not smaller; that it is no larger is not known.

    Costs ``1 + starts (1 + steps)`` attributions.

    Args:
        method: the attribution, of its model.
        inputs: ``(points, ...)``.
        target: the classes of interest; those predicted at the inputs if None.
        eps: radius of the ball.
        norm: of both distances.
        bounds: valid range of inputs.
        starts: random starts.
        steps: moves from each of them.
        seed: of starts and moves, which depend on the input's numbers.
    """
    x = checked(inputs)
    threat = ThreatModel(norm, eps, bounds)
    threat.check(x)
    if threat.radius <= 0 or starts < 1 or steps < 0:
        raise InputError(f"eps, starts, steps: expected more than 0, at least 1 and 0, got {eps}, {starts}, {steps}")
    classes = checked_target(method.model, x, target, len(x))
    here, index = explain_where_possible(method, x, classes), content_index(x)

    def ratio(there: Tensor) -> Tensor:
        change = threat.size(explain_where_possible(method, there, classes) - here)
        return torch.nan_to_num(change / threat.distance(there, x).clamp_min(1e-12), nan=0.0)

    best, at = torch.zeros_like(x.flatten(1)[:, 0]), x.clone()
    for number in range(starts):
        streams = PointRNG(seed, "lipschitz", number, index=index)
        reach = 10 ** (-2 * streams.uniform(dtype=x.dtype))
        place = threat.clamp(x + per_point(reach, x) * (threat.random_start(x, streams) - x))
        value, move = ratio(place), reach * threat.radius
        for step in range(steps + 1):
            better = value > best
            best, at = torch.where(better, value, best), torch.where(per_point(better, x), place, at)
            if step == steps:
                break
            noise = threat.steepest(streams.normal(*x.shape[1:], dtype=x.dtype), sparsity=0.0)
            candidate = threat.project(place + per_point(move, x) * noise, x)
            there = ratio(candidate)
            risen = there > value
            place, value = torch.where(per_point(risen, x), candidate, place), torch.where(risen, there, value)
            # As in evolution strategies: longer moves after a success, shorter ones after a failure.
            move = (move * torch.where(risen, 1.5, 0.85).to(x)).clamp(1e-4 * threat.radius, threat.radius)
    return AttributionSensitivity(best, at)
