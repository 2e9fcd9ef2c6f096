"""Attacks that look for the closest point across the boundary, and what they have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.attacks.iterative import IterativeAttack, Rows, put
from atoll.threat import ThreatModel


class MinimumNormAttack(IterativeAttack):
    """Base of attacks whose state holds ``closest``, the distance of the closest adversarial point ever seen.

    A point is given up as soon as that is within eps, and stays where it was if it never is.

    Args:
        threat: what the attacker may do.
        minimum_norm: eps plays no part: the search goes on to its end, and the closest adversarial points are the
            result, however far they are.
    """

    def __init__(self, threat: ThreatModel, *, minimum_norm: bool = False) -> None:
        super().__init__(threat)
        self.minimum_norm = minimum_norm
        self.enough = 0.0 if minimum_norm else threat.radius  # close enough to stop
        self.reach = math.inf if minimum_norm else threat.radius  # close enough to be shown

    def keep_closest(
        self, rows: Rows, candidates: Tensor, adversarial: Tensor, *, distance: Tensor | None = None
    ) -> Tensor:
        """Note the candidates that are closer than any before them; returns which ones are."""
        distance = self.threat.distance(candidates, rows.x) if distance is None else distance
        closer = adversarial & (distance < rows.state["closest"])
        rows.state["closest"] = torch.where(closer, distance, rows.state["closest"])
        put(rows.adv, closer & (distance <= self.reach), candidates)
        rows.success |= rows.state["closest"] <= self.enough
        return closer
