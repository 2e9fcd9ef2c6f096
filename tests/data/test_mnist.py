"""The idx format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import KMNIST, MNIST, FashionMNIST
from atoll.data.mnist import read_idx
from atoll.errors import DataError
from data.fakes import fake_mnist, idx, labels, random


@pytest.mark.parametrize("packed", [True, False])
def test_pixels_and_labels(tmp_path: Path, packed: bool) -> None:
    data = fake_mnist(MNIST, tmp_path, packed=packed)(root=tmp_path, download=False, validation=0)
    expected = random("MNIST", "t10k-images-idx3-ubyte.gz").integers(0, 256, (40, 28, 28), np.uint8)
    assert np.array_equal(data.test.fetch(torch.arange(40))[:, 0].numpy(), expected)
    assert np.array_equal(data.train.labels.numpy(), labels(80, 10))


def test_root_itself_and_the_other_spelling(tmp_path: Path) -> None:
    kind = fake_mnist(MNIST, tmp_path, packed=False)
    for path in (tmp_path / "mnist").iterdir():
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(kind(root=tmp_path, download=False).test) == 40


def test_families_do_not_mix(tmp_path: Path) -> None:
    digits, clothes = fake_mnist(MNIST, tmp_path), fake_mnist(FashionMNIST, tmp_path)
    first, second = (kind(root=tmp_path, download=False).test for kind in (digits, clothes))
    assert not torch.equal(first.fetch(torch.arange(40)), second.fetch(torch.arange(40)))


def test_registries() -> None:
    sums = [remote.md5 for kind in (MNIST, FashionMNIST, KMNIST) for remote in kind.files]
    assert len(set(sums)) == 12
    assert all(len(md5) == 32 and int(md5, 16) for md5 in sums)
    assert all(url.endswith(f.name) for k in (MNIST, FashionMNIST, KMNIST) for f in k.files for url in f.urls)


def test_wrong_checksum(tmp_path: Path) -> None:
    kind = fake_mnist(MNIST, tmp_path)
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(labels(40, 7))))
    with pytest.raises(DataError, match=f"{path}: expected md5"):
        _ = kind(root=tmp_path).train


GOOD = idx(np.zeros((5, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with 00000803, got $"),
        (GOOD[:10], "starts with 00000803"),
        (GOOD[:-1], "expected 3936 bytes for 5 items, got 3935"),
        (GOOD + b"\0", "expected 3936 bytes for 5 items, got 3937"),
        (b"\x00\x00\x0d" + GOOD[3:], "starts with 00000803, got 00000d03"),
        (idx(labels(5, 10)), "starts with 00000803, got 00000801"),
        (idx(np.zeros((5, 28, 27), np.uint8)), r"expected items of shape \(28, 28\), got \(28, 27\)"),
        (
            GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:],
            "expected 3367254359056 bytes|bytes for 4294967295 items",
        ),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, (28, 28))
    assert str(path) in str(caught.value)


def test_broken_compression(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD)
    for content in (packed[:-9], packed[:20], b"\x1f\x8b\x08" + b"?" * 40, b"no gzip"):
        (tmp_path / "x.gz").write_bytes(content)
        with pytest.raises(DataError, match="damaged or truncated"):
            read_idx(tmp_path / "x.gz", (28, 28))


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(bytes([0, 0, 8, 1]) + content)
    try:
        assert len(read_idx(path, ())) == len(content) - 4
    except DataError:
        assert int.from_bytes(content[:4], "big") != len(content) - 4 or len(content) < 4


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    for array, message in (
        (labels(41, 10), "expected 40 integer labels"),
        (labels(40, 11), r"labels in \[0, 9\]"),
    ):
        root = tmp_path / str(len(message))
        kind = fake_mnist(MNIST, root, packed=False)
        (root / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(array))
        with pytest.raises(DataError, match=message):
            _ = kind(root=root, download=False).train
