"""Robust losses with their default weights against the published formulas, one example at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from atoll.losses import ALP, AT, MART, TRADES, GloRoTRADES, LogitAnnealing, Loss, Outputs, Standard


def softmax(g: list[float]) -> list[float]:
    powers = [math.exp(value) for value in g]
    return [power / sum(powers) for power in powers]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mart(p: list[float], q: list[float], y: int) -> float:
    other = max(value for k, value in enumerate(q) if k != y)
    return -math.log(q[y]) - math.log(1 - other) + 6 * (1 - p[y]) * kl(p, q)


FORMULAS = {
    Standard: lambda p, q, y: -math.log(p[y]),
    AT: lambda p, q, y: -math.log(q[y]),
    TRADES: lambda p, q, y: -math.log(p[y]) + 6 * kl(p, q),
    ALP: lambda p, q, y: -math.log(q[y]) + sum((a - b) ** 2 for a, b in zip(p, q, strict=True)),
    MART: mart,
}


def logits() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    g, g_adv = 2 * torch.randn(2, 8, 5, generator=draw, dtype=torch.float64)
    return g, g_adv, torch.randint(5, (8,), generator=draw)


@pytest.mark.parametrize("kind", FORMULAS)
def test_defaults(kind: type[Loss]) -> None:
    g, g_adv, y = logits()
    values = sum(kind().values(Outputs(logits=g, adv_logits=g_adv), y).values())
    rows = zip(g.tolist(), g_adv.tolist(), y.tolist(), strict=True)
    expected = [FORMULAS[kind](softmax(a), softmax(b), label) for a, b, label in rows]
    assert values.tolist() == pytest.approx(expected, rel=1e-9)


def test_logit_annealing() -> None:
    """Temperature 0.75, offset 2 and beta 5 by default."""
    g, _, y = logits()
    values = LogitAnnealing().values(Outputs(logits=g), y)["ce"]
    expected = []
    for row, label in zip(g.tolist(), y.tolist(), strict=True):
        p = softmax([(value - 2 * (k == label)) / 0.75 for k, value in enumerate(row)])[label]
        expected.append(-0.75 * (1 - p) ** 5 * math.log(p))
    assert values.tolist() == pytest.approx(expected, rel=1e-9)


def test_gloro_trades_has_weight_one() -> None:
    weights = {name: weight for name, (weight, _) in GloRoTRADES().terms.items()}
    assert weights == {"ce": 1.0, "abstain": 1.0}


def test_objectives_and_passes() -> None:
    """What the attack maximizes, and whether a step needs a clean pass."""
    assert {kind: (kind.objective, kind.uses_clean) for kind in FORMULAS} == {
        Standard: (None, True), AT: ("ce", False), TRADES: ("kl", True), ALP: ("ce", True), MART: ("ce", True)
    }  # fmt: skip
