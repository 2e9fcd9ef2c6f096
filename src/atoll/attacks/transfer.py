"""Transfer: adversarial inputs made on a surrogate model, for a defender that cannot be looked into."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG


class Transfer(Attack):
    """Any attack, carried out on the surrogate; the model it is called with, the defender, is not touched.

    With the same seed and index it gives exactly what the attack itself gives on the surrogate.  Costs the attack's
    passes, all of them of the surrogate.

    Args:
        attack: what to run, e.g. ``PGD(threat)`` or ``PGD(threat, "margin")``.
        surrogate: maps inputs to logits; attacked in evaluation mode and left as it was.

    >>> import torch
    >>> from atoll.attacks import FGSM
    >>> from atoll.threat import ThreatModel
    >>> surrogate, defender = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    >>> _ = surrogate.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> Transfer(FGSM(ThreatModel("linf", 0.1)), surrogate)(defender, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    tensor([[0.5000, 0.5000]])
    """

    needs_gradients = False  # of the defender

    def __init__(self, attack: Attack, surrogate: nn.Module) -> None:
        super().__init__(attack.threat)
        self.attack = attack
        self.surrogate = surrogate

    def streams(self, seed: object, index: Tensor) -> PointRNG:
        """Those of the attack itself."""
        return self.attack.streams(seed, index)

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        with evaluation_mode(self.surrogate):
            return self.attack.search(self.surrogate, x, y, streams)
