"""The robust generalization gap against direct evaluation."""

import math

import pytest
import torch
import torch.nn.functional as F

from atoll.attacks import PGD
from atoll.curvature import robust_gap
from atoll.errors import InputError
from atoll.threat import ThreatModel
from curvature.cases import make_risk


def test_gap_is_measured_with_the_same_attack_on_both_sides():
    p = make_risk("conv-bn", points=24)
    train, test = (p.x[:15], p.y[:15]), (p.x[15:], p.y[15:])
    attack = PGD(ThreatModel("linf", 0.05), steps=2)
    p.model.train()  # the gap is measured in evaluation mode, and the mode is restored
    result = robust_gap(p.model, train, test, attack, batch_size=4)
    assert p.model.training
    p.model.eval()
    direct = []
    for x, y in (train, test):
        with torch.no_grad():
            logits = p.model(attack(p.model, x, y))
        losses = F.cross_entropy(logits, y, reduction="none")
        direct.append((float((logits.argmax(1) != y).double().mean()), float(losses.mean()), float(losses.std())))
    assert result.error.value == pytest.approx(direct[1][0] - direct[0][0])
    assert result.loss.value == pytest.approx(direct[1][1] - direct[0][1])
    assert result.loss.standard_error == pytest.approx(math.hypot(direct[0][2] / 15**0.5, direct[1][2] / 3))
    assert result.to_json()["train_error"]["value"] == pytest.approx(direct[0][0])
    with pytest.raises(InputError, match="labels: expected one per point"):
        robust_gap(p.model, (p.x, p.y[:3]), test, attack)
