"""Accuracy of a model during training, with the same evaluation as ``atoll attack`` and ``atoll certify``."""

from __future__ import annotations

import copy

import torch
from torch import nn

from atoll.attacks.evaluate import evaluate
from atoll.attacks.suites import get_attack
from atoll.certify import certifier_for, heuristic_certifier
from atoll.certify.certificate import Certifier
from atoll.certify.evaluate import certify
from atoll.certify.power import LipschitzEstimator
from atoll.data.base import Split
from atoll.models.base import Classifier
from atoll.stats import Accuracy
from atoll.threat import ThreatModel


def validate(
    model: nn.Module,
    split: Split,
    threat: ThreatModel,
    steps: int,
    batch_size: int,
    lipschitz: LipschitzEstimator | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Accuracy]:
    """Measure clean accuracy, accuracy under PGD with the given number of steps, and verified accuracy.

    Verified accuracy requires Lipschitz constants.  Its name is ``vra`` if they are exact, and ``vra_estimate`` if they
    come from power iteration, which is not a proof.
    """
    attacks = {"robust": get_attack(f"PGD-{steps}", threat)} if steps else {}
    accuracy = evaluate(
        model, split, attacks, batch_size=batch_size, seed="evaluation", device=device, check=False
    ).accuracy
    if lipschitz is None:
        return accuracy
    assert isinstance(model, Classifier)
    certifier: Certifier
    if lipschitz.exact:  # in float64, as in `atoll certify`
        certifier = certifier_for(copy.deepcopy(model).double(), radii=[threat.radius])
    else:
        certifier = heuristic_certifier(model, lipschitz)
    verified = certify(certifier, split, batch_size=batch_size, device=device).verified(threat.radius)
    return accuracy | {"vra" if lipschitz.exact else "vra_estimate": verified}
