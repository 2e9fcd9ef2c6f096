"""Digits and Two Moons, and the helpers for arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_moons

from atoll.data import Digits, TwoMoons
from atoll.data.decode import as_images, as_labels
from atoll.errors import DataError, InputError


def test_digits_are_those_of_scikit_learn() -> None:
    data = Digits(validation=0)
    actual = sorted(
        (int(label), image.numpy().tobytes())
        for split in (data.train, data.test)
        for label, image in zip(split.labels, split.fetch(torch.arange(len(split))), strict=True)
    )
    images, labels = load_digits(return_X_y=True)
    expected = sorted(
        (int(label), bytes(round(value * 255 / 16) for value in image))
        for label, image in zip(labels, images, strict=True)
    )
    assert actual == expected
    share = torch.bincount(data.test.labels) / torch.bincount(data.train.labels)
    assert ((share - 0.25).abs() < 0.02).all()


def test_moons() -> None:
    data = TwoMoons(n=40, noise=0.0, validation=0)
    points = data.train.fetch(torch.arange(40))
    assert points.dtype == torch.float32
    assert np.allclose(points.numpy(), make_moons(40, noise=0.0, random_state=0)[0])
    upper, lower = points[data.train.labels == 0], points[data.train.labels == 1]
    assert upper[:, 1].mean() > lower[:, 1].mean()
    noisy = TwoMoons()
    assert (len(noisy.train) + len(noisy.validation), len(noisy.test)) == (500, 1000)
    assert not torch.isin(noisy.test.fetch(torch.arange(1000)), noisy.train.fetch(torch.arange(450))).any()


@pytest.mark.parametrize("options", [{"n": 1}, {"noise": -1}, {"noise": float("nan")}])
def test_moons_refuses(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected"):
        TwoMoons(**options)  # type: ignore[arg-type]


def test_too_few_points_to_hold_some_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"TwoMoons: cannot hold out 0.1 of the data"):
        _ = TwoMoons(n=4).train


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4)), r"expected images of shape \(N, H, W\)"),
        (np.zeros((4, 3, 32, 32), np.uint8), r"\(N, H, W, channels\), got \(4, 3, 32, 32\)"),
        (np.zeros((0, 4, 4), np.uint8), "empty"),
        (np.full((1, 4, 4), np.inf), "NaN or infinity"),
        (np.full((1, 4, 4), 1.5), r"expected floats in \[0, 1\], got \[1.5, 1.5\]"),
        (np.full((1, 4, 4), -0.1), r"expected floats in \[0, 1\]"),
        (np.zeros((1, 4, 4), np.int64), "expected uint8, or floats"),
        (np.zeros((1, 4, 4), bool), "expected uint8, or floats"),
    ],
)
def test_images_refused(array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_images(array, "x")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((4, 1)), np.zeros((4, 2), int), np.zeros(5, int)])
def test_labels_refused(array: np.ndarray) -> None:
    with pytest.raises(DataError, match="y: expected 4 integer labels"):
        as_labels(array, 4, "y")
