"""Attacks on any ``nn.Module`` that maps inputs to logits."""

from atoll.attacks.apgd import APGD
from atoll.attacks.base import Attack, evaluation_mode
from atoll.attacks.fab import FAB
from atoll.attacks.objectives import OBJECTIVES, Objective
from atoll.attacks.pgd import FGSM, PGD

__all__ = ["APGD", "FAB", "FGSM", "OBJECTIVES", "PGD", "Attack", "Objective", "evaluation_mode"]
