"""Centroids that begin at training points."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.models import CentroidNet, SmallConvNet
from atoll.training.methods import CentroidsFromData


def start(per_class: int, seed: int = 0, **options: Any) -> tuple[CentroidNet, MemorySplit]:
    """Three classes with 4, 5 and 6 points of 8-bit numbers."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.tensor([0] * 4 + [1] * 5 + [2] * 6)[torch.randperm(15, generator=draw)]
    split = MemorySplit(torch.randint(256, (15, 1, 4, 4), generator=draw, dtype=torch.uint8), labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CentroidNet((1, 4, 4), 3, per_class=per_class, **options)
    trainer = SimpleNamespace(model=model, data=SimpleNamespace(train=split), seed=seed)
    CentroidsFromData().setup(trainer)
    return model, split


def rows(model: CentroidNet, features: torch.Tensor) -> list[list[int]]:
    """The points that the centroids of each class equal."""
    equal = (model.head.centroids[:, :, None] - features).abs().amax(3) < 1e-6
    assert (equal.sum(2) == 1).all()
    return equal.long().argmax(2).tolist()


@pytest.mark.parametrize("per_class", [1, 4])
def test_they_are_different_points_of_their_class(per_class: int) -> None:
    model, split = start(per_class)
    points = rows(model, split.images.flatten(1) / 255)
    assert [split.labels[own].tolist() for own in points] == [[k] * per_class for k in range(3)]
    assert all(len(set(own)) == per_class for own in points)
    others = [rows(start(per_class, seed)[0], split.images.flatten(1) / 255) for seed in range(4)]
    assert others[0] == points
    assert len({str(other) for other in others}) > 1


def test_they_are_features_in_evaluation_mode() -> None:
    def encoder(shape: tuple[int, ...], classes: int) -> SmallConvNet:
        return SmallConvNet(shape, classes, widths=(4,), hidden=8, batch_norm=True)

    model, split = start(2, encoder=encoder)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        features = model.eval().features(split.images / 255)
    assert [split.labels[own].tolist() for own in rows(model, features)] == [[0, 0], [1, 1], [2, 2]]


def test_they_are_stretched_if_inputs_are() -> None:
    model, split = start(2, stretch=0.2)
    features = model.head.stretched(split.images.flatten(1) / 255)
    assert [split.labels[own].tolist() for own in rows(model, features)] == [[0, 0], [1, 1], [2, 2]]


def test_a_class_must_have_enough_points() -> None:
    with pytest.raises(InputError, match="expected at most 4, the training points of class 0, got 5"):
        start(5)
