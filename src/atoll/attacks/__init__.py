"""Attacks on any ``nn.Module`` that maps inputs to logits."""

from atoll.attacks.apgd import APGD
from atoll.attacks.base import Attack, evaluation_mode
from atoll.attacks.fab import FAB
from atoll.attacks.objectives import OBJECTIVES, Objective
from atoll.attacks.pgd import FGSM, PGD
from atoll.attacks.square import Square

__all__ = ["APGD", "FAB", "FGSM", "OBJECTIVES", "PGD", "Attack", "Objective", "Square", "evaluation_mode"]
