"""Arrays in .npz files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import Npz, batches, boxes_of, in_order
from atoll.errors import DataError
from data.fakes import fake_npz, labels, random


def test_layouts(tmp_path: Path) -> None:
    gray = random(0).integers(0, 256, (60, 9, 7), np.uint8)
    path = fake_npz(tmp_path / "x.npz", x_train=gray, x_test=gray[:20])
    data = Npz(path=path, validation=0)
    assert data.shape == (1, 9, 7)
    assert np.array_equal(data.train.fetch(torch.arange(60))[:, 0].numpy(), gray)
    assert data.classes == ("0", "1", "2", "3")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats(tmp_path: Path, dtype: type) -> None:
    x = random(0).random((60, 9, 7, 3)).astype(dtype)
    data = Npz(path=fake_npz(tmp_path / "x.npz", x_train=x, x_test=x[:20]), validation=0)
    (batch,) = batches(data.train, in_order(60, 60))
    assert batch.x.dtype == torch.float32
    assert np.allclose(batch.x.numpy(), x.transpose(0, 3, 1, 2), atol=1e-6)


def test_names_and_keras_labels(tmp_path: Path) -> None:
    names = np.array(["a", "b", "c", "d"])
    path = fake_npz(tmp_path / "x.npz", names=names, y_train=labels(60, 4)[:, None])
    assert Npz(path=path).classes == ("a", "b", "c", "d")
    assert Npz(path=path, validation=0).train.labels.tolist() == labels(60, 4).tolist()


def test_boxes(tmp_path: Path) -> None:
    assert boxes_of(Npz(path=fake_npz(tmp_path / "x.npz")).test) is None
    boxes = np.array([[0, 0, 9, 11]] * 19 + [[-1] * 4])  # the images have 12 rows and 10 columns
    data = Npz(path=fake_npz(tmp_path / "x.npz", box_test=boxes))
    loaded = boxes_of(data.test)
    assert loaded is not None
    assert loaded.tolist() == boxes.tolist()
    assert boxes_of(data.validation) is None


X = np.zeros((60, 12, 10, 3), np.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "missing: x_test"),
        ({"x_train": np.full(X.shape, np.nan)}, "x_train: expected finite numbers"),
        ({"x_train": X + 1.5}, r"x_train: expected floats in \[0, 1\]"),
        ({"x_train": X.astype(np.int32)}, "expected uint8, or floats"),
        (
            {"x_train": X[:, :6]},
            r"same shape and type in x_train and x_test, got .*\(3, 6, 10\).*\(3, 12, 10\)",
        ),
        ({"x_train": X.astype(np.float32)}, "x_train and x_test, got torch.float32"),
        ({"y_train": labels(59, 4)}, "y_train: expected 60 integer labels"),
        ({"y_train": np.zeros(60)}, "y_train: expected 60 integer labels.*float64"),
        ({"y_train": -labels(60, 4).astype(np.int64)}, "expected labels >= 0, got -3"),
        ({"y_train": np.full(60, 10**9)}, "without large gaps, got 1000000000"),
        ({"y_test": labels(20, 5)}, r"test set: expected labels in \[0, 3\], got \[0, 4\]"),
        ({"names": np.array(["a", "b"])}, r"expected labels in \[0, 1\]"),
        ({"names": np.arange(4)}, "names: expected one string per class"),
        ({"box_test": np.zeros((20, 3), int)}, r"box_test: expected .* for each of 20 images, got .* \(20, 3\)"),
        ({"box_test": np.zeros((20, 4))}, "box_test: expected integers x1, y1, x2, y2, got float64"),
        ({"box_train": np.array([[0, 0, 10, 9]] * 60)}, r"box_train: expected 0 <= x1 <= x2 < 10 and .* y2 < 12"),
        ({"x_train": np.array([{"a": 1}] * 60, dtype=object)}, "expected an .npz file of plain arrays"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str) -> None:
    path = fake_npz(tmp_path / "x.npz", **changes)
    with pytest.raises(DataError, match=message):
        _ = Npz(path=path).train


def test_broken_files(tmp_path: Path) -> None:
    path = fake_npz(tmp_path / "x.npz")
    whole = path.read_bytes()
    single = tmp_path / "single.npy"
    np.save(single, X)
    spoiled = bytearray(whole)
    spoiled[len(whole) // 3] ^= 1
    for content in (
        whole[:-100],
        bytes(spoiled),
        b"",
        b"hello",
        pickle.dumps({"x_train": 1}),
        single.read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x.npz: expected an .npz file"):
            _ = Npz(path=path).train
    with pytest.raises(DataError, match="no such file"):
        _ = Npz(path=tmp_path / "none.npz").train


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

    path = fake_npz(tmp_path / "x.npz", names=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="plain arrays"):
        _ = Npz(path=path).train
    assert not (tmp_path / "sprung").exists()
