"""CIFAR's binary records, in the archive and unpacked; the pickled version is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import CIFAR10, CIFAR100
from atoll.errors import DataError
from data.fakes import cifar_members, fake_cifar, known, labels, random, tar


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "count"), [(CIFAR10, 40), (CIFAR100, 500)])
def test_pixels_and_labels(tmp_path: Path, kind: type[CIFAR10], count: int, packed: bool) -> None:
    data = fake_cifar(kind, tmp_path, packed=packed)(root=tmp_path, download=False, validation=0)
    name = next(iter(kind.test_files))
    pixels = random(kind.__name__, name).integers(0, 256, (count, 3072), np.uint8)
    images = data.test.fetch(torch.arange(count))
    assert np.array_equal(images.numpy(), pixels.reshape(count, 3, 32, 32))
    assert images.is_contiguous()
    assert np.array_equal(data.test.labels.numpy(), labels(count, data.num_classes))  # the fine ones


def test_class_names() -> None:
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert CIFAR10.classes == tuple(sorted(CIFAR10.classes))


def test_training_files_stay_in_order(tmp_path: Path) -> None:
    data = fake_cifar(CIFAR10, tmp_path)(root=tmp_path, download=False, validation=0)
    first = random("CIFAR10", "data_batch_1.bin").integers(0, 256, (40, 3072), np.uint8)
    assert np.array_equal(data.train.fetch(torch.arange(40)).flatten(1).numpy(), first)


def test_the_pickled_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"cos\nsystem\n")
    with pytest.raises(DataError, match=r"is a pickle, .* put cifar-10-binary.tar.gz into"):
        _ = CIFAR10(root=tmp_path, download=False).train


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar-100-binary.tar.gz is missing; put it into"):
        _ = CIFAR100(root=tmp_path, download=False).train


def test_an_incomplete_folder_is_not_used(tmp_path: Path) -> None:
    kind = fake_cifar(CIFAR10, tmp_path, packed=False)
    (tmp_path / kind.folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is missing"):
        _ = kind(root=tmp_path, download=False).train


def test_a_truncated_file(tmp_path: Path) -> None:
    kind = fake_cifar(CIFAR10, tmp_path, packed=False)
    path = tmp_path / kind.folder / "data_batch_3.bin"
    for size in (40 * 3073 - 1, 39 * 3073, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(DataError, match=rf"{path}: expected 122920 bytes, 40 records of 3073, got {size}"):
            _ = kind(root=tmp_path, download=False).train


def test_labels_out_of_range(tmp_path: Path) -> None:
    kind = fake_cifar(CIFAR10, tmp_path, packed=False)
    path = tmp_path / kind.folder / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"test set: expected labels in \[0, 9\], got \[0, 10\]"):
        _ = kind(root=tmp_path, download=False).train


def in_archive(tmp_path: Path, members: dict[str, bytes]) -> CIFAR10:
    kind = fake_cifar(CIFAR10, tmp_path)
    path = tar(tmp_path / "cifar10" / CIFAR10.archive.name, members)
    return type("CIFAR10", (kind,), {"archive": known(CIFAR10.archive, path)})(root=tmp_path, download=False)


def test_archive_with_other_members(tmp_path: Path) -> None:
    members = {f"../{name}": data for name, data in cifar_members(CIFAR10, 40).items()}
    with pytest.raises(DataError, match=r"missing: cifar-10-batches-bin/data_batch_1.bin"):
        _ = in_archive(tmp_path, members).train
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar-10-binary.tar.gz", "cifar10"]


def test_broken_archive(tmp_path: Path) -> None:
    data = in_archive(tmp_path, {})
    path = tmp_path / "cifar10" / CIFAR10.archive.name
    whole = tar(path, {f"cifar-10-batches-bin/{n}": c for n, c in cifar_members(CIFAR10, 40).items()}).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive"):
        path.write_bytes(content)
        type(data).archive = known(CIFAR10.archive, path)
        with pytest.raises(DataError, match=r"damaged or truncated|missing:"):
            _ = data.train


def test_wrong_checksum(tmp_path: Path) -> None:
    fake_cifar(CIFAR10, tmp_path)
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz: expected md5 c32a1d4a.*delete it"):
        _ = CIFAR10(root=tmp_path).train
