"""Adversarial attacks on any ``nn.Module`` that maps inputs to logits, and evaluations with them."""

from atoll.attacks.apgd import APGD
from atoll.attacks.autoattack import AutoAttack
from atoll.attacks.base import Attack
from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.evaluate import Evaluation, evaluate
from atoll.attacks.fab import FAB
from atoll.attacks.fmn import FMN
from atoll.attacks.pdpgd import PDPGD
from atoll.attacks.pgd import FGSM, PGD
from atoll.attacks.rays import RayS
from atoll.attacks.sigma_zero import SigmaZero
from atoll.attacks.square import Square
from atoll.attacks.suites import suite
from atoll.attacks.transfer import Transfer
from atoll.losses.objectives import OBJECTIVES, Objective
from atoll.modules import evaluation_mode
from atoll.threat import ThreatModel

__all__ = [
    "APGD",
    "FAB",
    "FGSM",
    "FMN",
    "OBJECTIVES",
    "PDPGD",
    "PGD",
    "Attack",
    "AutoAttack",
    "CarliniWagner",
    "Evaluation",
    "Objective",
    "RayS",
    "SigmaZero",
    "Square",
    "ThreatModel",
    "Transfer",
    "evaluate",
    "evaluation_mode",
    "suite",
]
