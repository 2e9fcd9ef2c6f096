"""Objectives of attacks against their definitions, one point at a time, in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.losses.objectives import OBJECTIVES, TARGETED

Numbers = list[float]


def softmax(g: Numbers) -> Numbers:
    powers = [math.exp(value - max(g)) for value in g]
    return [power / sum(powers) for power in powers]


def others(g: Numbers, y: int) -> Numbers:
    return [value for k, value in enumerate(g) if k != y]


def dlr(g: Numbers, y: int) -> float:
    """Croce & Hein (2020), equation 6; for two classes it would be +-1."""
    difference = max(others(g, y)) - g[y]
    first, _, third = [*sorted(g, reverse=True), math.nan][:3]
    return difference if len(g) < 3 else difference / (first - third)


def dlr_targeted(g: Numbers, y: int, t: int) -> float:
    """Equation 7; for three classes it would be -1 if the target has the lowest logit."""
    if len(g) < 4:
        return g[t] - g[y]
    first, _, third, fourth = sorted(g, reverse=True)[:4]
    return (g[t] - g[y]) / (first - (third + fourth) / 2)


UNTARGETED = {
    "ce": lambda g, y, clean: -math.log(softmax(g)[y]),
    "kl": lambda g, y, clean: sum(
        p * math.log(p / q) for p, q in zip(softmax(clean), softmax(g), strict=True)
    ),  # from the clean prediction
    "margin": lambda g, y, clean: max(others(g, y)) - g[y],
    "pm": lambda g, y, clean: max(others(softmax(g), y)) - softmax(g)[y],
    "dlr": lambda g, y, clean: dlr(g, y),
}
WITH_TARGET = {
    "margin": lambda g, y, t: g[t] - g[y],
    "pm": lambda g, y, t: softmax(g)[t] - softmax(g)[y],
    "dlr": dlr_targeted,
}
classes = st.sampled_from([2, 3, 4, 5, 10])


def points(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of seven points, labels, other classes, and clean logits."""
    draw = torch.Generator().manual_seed(seed)
    g, clean = 3 * torch.randn(2, 7, count, generator=draw, dtype=torch.float64)
    y = torch.randint(count, (7,), generator=draw)
    target = (y + 1 + torch.randint(count - 1, (7,), generator=draw)) % count
    return g, y, target, clean


@pytest.mark.parametrize("name", OBJECTIVES)
@given(count=classes, seed=st.integers(0, 10**6))
def test_untargeted(name: str, count: int, seed: int) -> None:
    g, y, _, clean = points(count, seed)
    expected = [UNTARGETED[name](*row) for row in zip(g.tolist(), y.tolist(), clean.tolist(), strict=True)]
    assert OBJECTIVES[name](g, y, clean).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", TARGETED)
@given(count=classes, seed=st.integers(0, 10**6))
def test_targeted(name: str, count: int, seed: int) -> None:
    g, y, target, _ = points(count, seed)
    expected = [WITH_TARGET[name](*row) for row in zip(g.tolist(), y.tolist(), target.tolist(), strict=True)]
    assert TARGETED[name](g, y, target).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gap", [0.0, 1e-9])
def test_ratios_of_nearly_equal_logits_are_finite(gap: float) -> None:
    """The largest logits may be so close that their difference is zero; a small difference still counts."""
    g = torch.tensor([[1.0, 1.0 - gap, 1.0 - gap, 1.0 - gap, 0.0]], dtype=torch.float64)
    y, target = torch.tensor([0]), torch.tensor([1])
    expected = -1.0 if gap else 0.0
    assert float(OBJECTIVES["dlr"](g, y, None)) == pytest.approx(expected, rel=1e-6)
    assert float(TARGETED["dlr"](g, y, target)) == pytest.approx(expected, rel=1e-6)


def test_cross_entropy_of_mixed_labels() -> None:
    g = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    p = softmax(g[0].tolist())
    mixed = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64)
    assert float(OBJECTIVES["ce"](g, mixed, None)) == pytest.approx(-0.3 * math.log(p[0]) - 0.7 * math.log(p[1]))
