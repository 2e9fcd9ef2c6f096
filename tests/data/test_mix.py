"""Mixup and cutmix against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import cutmix, cutmix_boxes, mixup
from atoll.errors import InputError

X = torch.rand(6, 3, 8, 10, generator=torch.Generator().manual_seed(0))
Y = torch.eye(4)[[0, 1, 2, 3, 0, 1]]
PERMUTATION = torch.tensor([3, 2, 5, 0, 4, 1])


@given(st.lists(st.floats(0, 1, width=32), min_size=6, max_size=6))
def test_mixup(weights: list[float]) -> None:
    x, y = mixup(X, Y, PERMUTATION, torch.tensor(weights))
    for i, w in enumerate(weights):
        j = int(PERMUTATION[i])
        assert torch.allclose(x[i], w * X[i] + (1 - w) * X[j], atol=1e-6)
        assert torch.allclose(y[i], w * Y[i] + (1 - w) * Y[j], atol=1e-6)
    assert torch.allclose(y.sum(1), torch.ones(6))


def test_mixup_with_one_number() -> None:
    for one, other in zip(mixup(X, Y, PERMUTATION, 0.3), mixup(X, Y, PERMUTATION, torch.full((6,), 0.3)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(mixup(X, Y, PERMUTATION, 1.0)[0], X)


@given(st.lists(st.tuples(*[st.integers(-3, 13)] * 4), min_size=6, max_size=6))
@settings(deadline=None)
def test_cutmix(boxes: list[tuple[int, int, int, int]]) -> None:
    x, y = cutmix(X, Y, PERMUTATION, torch.tensor(boxes))
    for i, (top, left, bottom, right) in enumerate(boxes):
        j, expected, area = int(PERMUTATION[i]), X[i].clone(), 0
        for row in range(max(top, 0), min(bottom, 8)):
            for column in range(max(left, 0), min(right, 10)):
                expected[:, row, column] = X[j, :, row, column]
                area += 1
        assert torch.equal(x[i], expected)
        assert torch.allclose(y[i], Y[i] * (1 - area / 80) + Y[j] * (area / 80), atol=1e-6)


@given(st.floats(0, 1), st.floats(0, 0.999), st.floats(0, 0.999))
def test_boxes(weight: float, down: float, right: float) -> None:
    top, left, bottom, end = cutmix_boxes(torch.tensor([weight]), torch.tensor([[down, right]]), 32, 48)[0].tolist()
    assert 0 <= top <= bottom <= 32
    assert 0 <= left <= end <= 48
    side = (1 - weight) ** 0.5
    assert bottom - top <= 32 * side + 1
    assert end - left <= 48 * side + 1
    if down == right == 0.5:
        assert (bottom - top) * (end - left) == pytest.approx(32 * 48 * (1 - weight), abs=2 * (32 + 48))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixup(X, Y.long(), PERMUTATION, 0.5), "y_onehot: expected float probabilities"),
        (lambda: mixup(X, Y[:3], PERMUTATION, 0.5), "each of 6 inputs, got 3 and 6"),
        (lambda: mixup(X, Y, PERMUTATION, 1.5), r"weight: expected numbers in \[0, 1\]"),
        (lambda: mixup(X, Y, PERMUTATION, float("nan")), r"weight: expected numbers in \[0, 1\]"),
        (lambda: cutmix(X, Y, PERMUTATION, torch.zeros(5, 4)), r"boxes \(batch, 4\)"),
        (lambda: cutmix(X[:, 0, 0], Y, PERMUTATION, torch.zeros(6, 4)), r"images \(batch, C, H, W\)"),
    ],
)
def test_refused(call: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()  # type: ignore[operator]
