"""SVHN's MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from atoll.data import SVHN
from atoll.errors import DataError
from data.fakes import fake_svhn, known, labels, random


def test_pixels_and_labels(tmp_path: Path) -> None:
    data = fake_svhn(tmp_path)(root=tmp_path, download=False, validation=0)
    pixels = random("test_32x32.mat").integers(0, 256, (32, 32, 3, 30), np.uint8)
    images = data.test.fetch(torch.arange(30))
    assert images[7, 2, 5, 11] == int(pixels[5, 11, 2, 7])
    assert np.array_equal(images.numpy(), pixels.transpose(3, 2, 0, 1))
    assert data.test.labels.tolist() == [(i % 10 + 1) % 10 for i in range(30)]


PIXELS = np.zeros((32, 32, 3, 4), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": PIXELS}, "expected a .mat file with X and y"),
        ({"X": PIXELS[:16], "y": labels(4, 4) + 1}, r"expected X of uint8 \(32, 32, 3, N\), got uint8 \(16"),
        ({"X": PIXELS.astype(float), "y": labels(4, 4) + 1}, "got float64"),
        ({"X": PIXELS, "y": labels(5, 5) + 1}, "expected 4 integer labels"),
        ({"X": PIXELS, "y": labels(4, 4)}, "expected labels 1 to 10, got 0 to 3"),
        ({"X": PIXELS, "y": labels(4, 4) + 9}, "expected labels 1 to 10, got 9 to 12"),
        (b"no matlab at all" * 20, "expected a .mat file with X and y"),
        (b"", "expected a .mat file with X and y"),
    ],
)
def test_broken_files(tmp_path: Path, content: dict[str, np.ndarray] | bytes, message: str) -> None:
    kind = fake_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        savemat(path, {k: v[:, None] if v.ndim == 1 else v for k, v in content.items()})
    kind.files = (known(SVHN.files[0], path), kind.files[1])
    with pytest.raises(DataError, match=message) as caught:
        _ = kind(root=tmp_path, download=False).train
    assert str(path) in str(caught.value)


def test_truncated(tmp_path: Path) -> None:
    kind = fake_svhn(tmp_path)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="expected md5"):
        _ = kind(root=tmp_path, download=False).train
    kind.files = (kind.files[0], known(SVHN.files[1], path))
    with pytest.raises(DataError, match=r"expected a .mat file"):
        _ = kind(root=tmp_path, download=False).train
