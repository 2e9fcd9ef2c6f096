"""Oxford pets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.data import OxfordPets, boxes_of
from atoll.errors import DataError
from data.fakes import PETS, fake_pets


@pytest.mark.parametrize("packed", [True, False])
def test_breeds_and_heads(tmp_path: Path, packed: bool) -> None:
    kind = fake_pets(tmp_path, packed=packed)
    data = kind(root=tmp_path, download=False, resize=24, size=24, validation=0.25)
    assert data.classes == PETS
    assert data.test.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert boxes_of(data.test) is None  # not published
    boxes = boxes_of(data.validation)
    assert boxes is not None
    # Pixels count from 1 there; of the 30 columns 3 to 26 stay.  The first image of each breed has no box.
    own = data._rows[1] % 8 == 0
    assert boxes.tolist() == [[-1] * 4 if bare else [0, 3, 8, 14] for bare in own.tolist()]


def test_unpacked_once(tmp_path: Path) -> None:
    kind = fake_pets(tmp_path)
    first = kind(root=tmp_path, download=False, resize=24, size=24)
    images = first.test.fetch(torch.arange(9))
    for remote in kind.archives.values():
        (tmp_path / remote.name).unlink()
    assert torch.equal(kind(root=tmp_path, download=False, resize=24, size=24).test.fetch(torch.arange(9)), images)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Abyssinian_1", "trainval.txt: expected an image and its class in each line"),
        ("Abyssinian_1 one", "trainval.txt: expected an image and its class in each line"),
        ("Abyssinian_1 2 1 1", "expected classes 1, 2, ... in trainval.txt"),
        ("", "the training set is empty"),
    ],
)
def test_broken_lists(tmp_path: Path, text: str, message: str) -> None:
    kind = fake_pets(tmp_path, packed=False)
    (tmp_path / "annotations" / "trainval.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        _ = kind(root=tmp_path, download=False).train


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"images.tar.gz is missing"):
        _ = OxfordPets(root=tmp_path, download=False).train
