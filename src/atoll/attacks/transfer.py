"""Transfer attacks: adversarial inputs crafted on a surrogate, for models without access to gradients."""

from __future__ import annotations

from typing import get_args

from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import AttackNorm


class Transfer(Attack):
    """Transfer attack: runs another attack on a surrogate and never queries the model under attack.

    The result equals that of the attack on the surrogate with the same seed and index.  All passes are passes of the
    surrogate.

    Args:
        attack: the attack to run, such as ``PGD(threat)`` or ``PGD(threat, "margin")``.
        surrogate: maps inputs to logits; switched to evaluation mode during the attack and restored afterwards.

    >>> import torch
    >>> from atoll.attacks import FGSM
    >>> from atoll.threat import ThreatModel
    >>> surrogate, defender = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    >>> _ = surrogate.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> Transfer(FGSM(ThreatModel("linf", 0.1)), surrogate)(defender, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    tensor([[0.5000, 0.5000]])
    """

    needs_gradients = False  # of the model under attack
    norms = get_args(AttackNorm)  # those of the wrapped attack

    def __init__(self, attack: Attack, surrogate: nn.Module) -> None:
        super().__init__(attack.threat)
        self.attack = attack
        self.surrogate = surrogate

    def streams(self, seed: object, index: Tensor) -> PointRNG:
        """Return the random streams of the wrapped attack."""
        return self.attack.streams(seed, index)

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        with evaluation_mode(self.surrogate):
            return self.attack.search(self.surrogate, x, y, streams)
