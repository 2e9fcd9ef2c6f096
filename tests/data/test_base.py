"""Splits, batches, orders, and extra images."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import (
    ConcatSplit,
    Digits,
    HorizontalFlip,
    ImageFolder,
    MemorySplit,
    Npz,
    RandomCrop,
    Split,
    SubSplit,
    batches,
    boxes_of,
    in_order,
    shuffled,
)
from atoll.data.base import in_memory
from atoll.errors import DataError, InputError
from data.fakes import fake_folder, fake_npz, labels, random


def memory(count: int, start: int = 0) -> MemorySplit:
    values = torch.arange(start, start + count, dtype=torch.uint8)
    return MemorySplit(values.view(-1, 1, 1, 1), values.long())


def extra_file(path: Path, count: int = 30, **changes: np.ndarray) -> Path:
    arrays = {
        "image": random("extra").integers(0, 256, (count, 8, 8, 1), np.uint8),
        "label": labels(count, 10),
    }
    np.savez(path, **{**arrays, **changes})
    return path


@given(st.lists(st.integers(0, 14), max_size=20))
def test_concat_is_concatenation(index: list[int]) -> None:
    both = ConcatSplit(memory(10), memory(5, 10))
    at = torch.tensor(index, dtype=torch.int64)
    assert both.fetch(at).flatten().tolist() == index
    assert both.labels[at].tolist() == index
    nested = SubSplit(both, torch.arange(14, -1, -1))
    assert nested.fetch(at).flatten().tolist() == [14 - i for i in index]


def test_boxes_stay_with_their_rows(tmp_path: Path) -> None:
    at = torch.tensor([[i, 0, i, 0] for i in range(10)])
    boxed = MemorySplit(torch.zeros(10, 1, 2, 10, dtype=torch.uint8), torch.arange(10), at)
    rows = torch.tensor([7, 2, 2])
    for split in (SubSplit(boxed, rows), boxed.take(rows), SubSplit(SubSplit(boxed, rows), torch.arange(3))):
        assert torch.equal(boxes_of(split), at[rows])  # type: ignore[arg-type]
    plain = memory(3)
    assert boxes_of(plain) is boxes_of(SubSplit(plain, torch.arange(2))) is boxes_of(ConcatSplit(plain, plain)) is None
    none = torch.full((3, 4), -1)
    assert torch.equal(boxes_of(ConcatSplit(boxed, plain)), torch.cat([at, none]))  # type: ignore[arg-type]
    assert torch.equal(boxes_of(ConcatSplit(plain, boxed)), torch.cat([none, at]))  # type: ignore[arg-type]
    path = fake_npz(tmp_path / "x.npz", box_train=np.array([[0, 0, i % 10, i % 12] for i in range(60)]))
    data = Npz(path=path, validation=0.2, limit=20)
    whole = boxes_of(data._splits.train)
    assert whole is not None
    assert torch.equal(boxes_of(data.validation), whole[data._rows[1]])  # type: ignore[arg-type]
    assert torch.equal(boxes_of(data.train), whole[data.train.rows])  # type: ignore[arg-type, attr-defined]


def test_all_splits_follow_the_protocol(tmp_path: Path) -> None:
    folder = ImageFolder(root=fake_folder(tmp_path), resize=8, size=8)
    for split in (
        memory(3),
        SubSplit(memory(3), torch.arange(2)),
        ConcatSplit(memory(1), memory(1)),
        folder.test,
    ):
        assert isinstance(split, Split)
    assert in_memory(ConcatSplit(SubSplit(memory(3), torch.arange(2)), memory(1)))
    assert not in_memory(folder.train)
    assert not in_memory(ConcatSplit(memory(3), folder.test))


@pytest.mark.parametrize(
    ("images", "target", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64), "labels: expected one per image, got 2 for 3 images"),
        (torch.zeros(2, 1), torch.zeros(2), "expected one int64 per image"),
        (torch.tensor([[0.0], [torch.nan]]), torch.zeros(2, dtype=torch.int64), "got NaN or infinity"),
    ],
)
def test_memory_split_refuses(images: torch.Tensor, target: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        MemorySplit(images, target)


def test_memory_split_refuses_boxes() -> None:
    with pytest.raises(InputError, match=r"boxes: expected 0 <= x1 <= x2 < 1 .* got \[0, 0, 1, 0\] for image 2"):
        replace(memory(3), boxes=torch.tensor([[0, 0, 0, 0], [-1] * 4, [0, 0, 1, 0]]))


class TestOrders:
    @given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 30), st.floats(0, 0.99))
    def test_shuffled(self, length: int, size: int, extra: int, ratio: float) -> None:
        if size > length:
            with pytest.raises(InputError, match="batch_size"):
                shuffled(length, size, 0)
            return
        order = shuffled(length, size, 0, 1, extra=extra, extra_ratio=ratio)
        assert len(order) == length // size
        assert all(len(batch) == size for batch in order)
        every = torch.cat(order)
        own = every[every < length]
        assert len(own.unique()) == len(own)
        assert every.max() < length + extra
        # Each extra point comes as often as any other, give or take one.
        counts = torch.bincount(every[every >= length] - length, minlength=extra)
        assert not extra or counts.max() - counts.min() <= 1
        share = round(size * ratio) if extra else 0
        assert all(int((batch >= length).sum()) == share for batch in order)

    def test_order_depends_on_names_only(self) -> None:
        first = torch.cat(shuffled(20, 5, 0, 1))
        torch.manual_seed(3)
        assert torch.equal(torch.cat(shuffled(20, 5, 0, 1)), first)
        assert not torch.equal(torch.cat(shuffled(20, 5, 0, 2)), first)

    def test_in_order(self) -> None:
        assert in_order(0, 3) == []
        assert torch.cat(in_order(7, 3)).tolist() == list(range(7))

    def test_refused(self) -> None:
        with pytest.raises(InputError, match="batch_size"):
            in_order(3, 0)
        with pytest.raises(InputError, match="batch_size"):
            shuffled(3, 0)
        with pytest.raises(InputError, match="extra_ratio"):
            shuffled(3, 1, extra=3, extra_ratio=1.0)


class TestExtra:
    @pytest.mark.parametrize("names", [("image", "label"), ("x_train", "y_train")])
    def test_own_rows_first(self, tmp_path: Path, names: tuple[str, str]) -> None:
        pixels = random("extra").integers(0, 256, (30, 8, 8, 1), np.uint8)
        np.savez(tmp_path / "extra.npz", **{names[0]: pixels, names[1]: labels(30, 10)})
        plain, data = Digits(limit=100), Digits(limit=100, extra=tmp_path / "extra.npz", extra_ratio=0.5)
        assert (plain.num_own, plain.num_extra) == (100, 0)
        assert (data.num_own, data.num_extra, len(data.train)) == (100, 30, 130)
        assert torch.equal(data.train.fetch(torch.arange(100)), plain.train.fetch(torch.arange(100)))
        generated = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        assert torch.equal(data.train.fetch(torch.arange(100, 130)), generated)
        assert data.train.labels.tolist() == [*plain.train.labels.tolist(), *labels(30, 10).tolist()]
        assert torch.equal(data.validation.labels, plain.validation.labels)
        assert len(data.test) == len(plain.test)

    def test_an_epoch(self, tmp_path: Path) -> None:
        data = Digits(limit=100, extra=extra_file(tmp_path / "extra.npz"), extra_ratio=0.7)
        order = shuffled(data.num_own, 20, 0, 0, extra=data.num_extra, extra_ratio=data.extra_ratio)
        epoch = list(batches(data.train, order, augment=[RandomCrop(padding=1)]))
        assert len(epoch) == 5
        assert all(int((batch.index >= 100).sum()) == 14 for batch in epoch)
        assert torch.equal(torch.cat([b.y for b in epoch]), data.train.labels[torch.cat(order)])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"image": np.zeros((30, 9, 9, 1), np.uint8)}, r"expected images of torch.uint8 \(1, 8, 8\)"),
            ({"image": np.zeros((30, 8, 8, 1), np.float32)}, "got torch.float32"),
            ({"label": np.full(30, 10)}, r"expected labels in \[0, 9\], got \[10, 10\]"),
            ({"label": np.zeros(29, np.int64)}, "expected 30 integer labels"),
            ({"label": np.full(30, -1)}, "expected labels >= 0"),
        ],
    )
    def test_refused(self, tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
        data = Digits(extra=extra_file(tmp_path / "extra.npz", **changes))
        with pytest.raises(DataError, match=message) as caught:
            _ = data.train
        assert "extra.npz" in str(caught.value)

    def test_missing_arrays_and_file(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "odd.npz", image=np.zeros((3, 8, 8, 1), np.uint8))
        with pytest.raises(DataError, match=r"expected arrays image and label, .* got \['image'\]"):
            _ = Digits(extra=tmp_path / "odd.npz").train
        with pytest.raises(DataError, match="no such file"):
            _ = Digits(extra=tmp_path / "none.npz").num_extra

    def test_with_floats(self, tmp_path: Path) -> None:
        x = random(0).random((40, 6, 6))
        path = fake_npz(tmp_path / "x.npz", x_train=x, y_train=labels(40, 4), x_test=x, y_test=labels(40, 4))
        np.savez(tmp_path / "extra.npz", image=x[:5].astype(np.float32), label=labels(5, 4))
        data = Npz(path=path, extra=tmp_path / "extra.npz", validation=0)
        assert len(data.train) == 45


class TestWorkers:
    """A streamed split gives the same batches however many processes read it."""

    @pytest.mark.parametrize("extra", [False, True])
    def test_same_batches(self, tmp_path: Path, extra: bool) -> None:
        path = tmp_path / "extra.npz"
        np.savez(path, image=random(1).integers(0, 256, (9, 12, 12, 3), np.uint8), label=labels(9, 2))
        data = ImageFolder(root=fake_folder(tmp_path / "images"), resize=16, size=12, extra=path if extra else None)
        order = shuffled(data.num_own, 4, 0, 0, extra=data.num_extra, extra_ratio=data.extra_ratio if extra else 0.0)
        state = torch.get_rng_state()
        runs = [
            list(batches(data.train, order, augment=[RandomCrop(padding=2), HorizontalFlip()], workers=workers))
            for workers in (0, 1, 2)
        ]
        assert torch.equal(torch.get_rng_state(), state)
        for run in runs[1:]:
            for one, other in zip(runs[0], run, strict=True):
                assert torch.equal(one.x, other.x)
                assert torch.equal(one.y, other.y)
                assert torch.equal(one.index, other.index)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_broken_image_is_one_sentence(self, tmp_path: Path, workers: int) -> None:
        root = fake_folder(tmp_path)
        broken = root / "val" / "bee" / "1.PNG"
        broken.write_bytes(broken.read_bytes()[:60])
        data = ImageFolder(root=root, resize=16, size=12)
        with pytest.raises(DataError, match="not a valid image file") as caught:
            list(batches(data.test, in_order(len(data.test), 2), workers=workers))
        assert str(broken) in str(caught.value)
        assert "Traceback" not in str(caught.value)

    def test_workers_end_with_the_error(self, tmp_path: Path) -> None:
        root = fake_folder(tmp_path)
        (root / "val" / "ant" / "0.PNG").write_bytes(b"")
        data = ImageFolder(root=root, resize=16, size=12)
        with pytest.raises(DataError):
            list(batches(data.test, in_order(len(data.test), 2), workers=1))
        assert multiprocessing.active_children() == []  # although the traceback refers to their loader
