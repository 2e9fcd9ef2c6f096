"""What holds for every data set; a new one joins by a line in ``fakes.DATASETS``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import atoll.data
from atoll.data import Brightness, Data, HorizontalFlip, Split, batches, in_order, shuffled
from atoll.errors import InputError
from data.fakes import DATASETS, Case


@pytest.fixture(params=DATASETS)
def case(request: pytest.FixtureRequest) -> Case:
    return DATASETS[request.param]


def everything(split: Split) -> torch.Tensor:
    return split.fetch(torch.arange(len(split)))


def test_shape_dtype_and_labels(case: Case, tmp_path: Path) -> None:
    data = case.make(tmp_path, validation=0.2)
    assert data.shape == case.shape
    assert data.num_classes == len(data.classes) == case.classes
    assert all(isinstance(name, str) and name for name in data.classes)
    for name in ("train", "validation", "test"):
        split = data.split(name)
        images = everything(split)
        assert images.shape == (len(split), *case.shape)
        assert images.dtype == (torch.float32 if data.bounds is None else torch.uint8)
        assert split.labels.dtype == torch.int64
        assert split.labels.shape == (len(split),)
        assert 0 <= split.labels.min() <= split.labels.max() < case.classes
    assert (len(data.train) + len(data.validation), len(data.test)) == case.lengths


def test_splits_are_disjoint_and_complete(case: Case, tmp_path: Path) -> None:
    data = case.make(tmp_path, validation=0.2)
    train, validation = data._rows
    assert sorted(torch.cat([train, validation]).tolist()) == list(range(case.lengths[0]))
    # Stratified: every class is held out, and none completely.
    assert set(data.validation.labels.tolist()) == set(data.train.labels.tolist())
    pixels = {row.numpy().tobytes() for row in everything(data.train).flatten(1)}
    held_out = [row.numpy().tobytes() for row in everything(data.validation).flatten(1)]
    # Tiny digits do repeat; random fakes do not.
    assert sum(row in pixels for row in held_out) <= 1


def test_the_split_depends_on_its_seed_only(case: Case, tmp_path: Path) -> None:
    def rows(folder: str, seed: int) -> list[int]:
        (tmp_path / folder).mkdir()
        rows: list[int] = case.make(tmp_path / folder, split_seed=seed, validation=0.4)._rows[1].tolist()
        return rows

    first = rows("a", 0)
    torch.manual_seed(1)
    assert rows("b", 0) == first
    assert rows("c", 1) != first


def test_limit_is_a_fixed_part_of_train(case: Case, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    data = case.make(tmp_path / "a", limit=7, validation=0.2)
    assert len(data.train) == data.num_own == 7
    assert set(data.train.rows.tolist()) <= set(data._rows[0].tolist())  # type: ignore[attr-defined]
    assert len(set(data.train.labels.tolist())) > 1


def test_batches_repeat_and_leave_the_global_generator_alone(case: Case, tmp_path: Path) -> None:
    data = case.make(tmp_path, validation=0.2)
    augment = [HorizontalFlip(), Brightness(strength=0.2)] if len(case.shape) == 3 else []
    order = shuffled(len(data.train), 4, "seed", 0)
    state = torch.get_rng_state()
    first = list(batches(data.train, order, augment=augment, seed="s", workers=0))
    again = list(batches(data.train, order, augment=augment, seed="s", workers=0))
    assert torch.equal(torch.get_rng_state(), state)
    for one, other, index in zip(first, again, order, strict=True):
        assert torch.equal(one.x, other.x)
        assert one.x.dtype == torch.float32
        assert torch.equal(one.index, index)
        assert torch.equal(one.y, data.train.labels[index])
        assert data.bounds is None or (one.x.min() >= 0 and one.x.max() <= 1)


def test_a_point_does_not_depend_on_its_batch(case: Case, tmp_path: Path) -> None:
    data = case.make(tmp_path, validation=0.2)
    augment = [HorizontalFlip(), Brightness(strength=0.2)] if len(case.shape) == 3 else []
    length = min(12, len(data.train))
    by_five, alone = (
        torch.cat([b.x for b in batches(data.train, in_order(length, size), augment=augment, workers=0)])
        for size in (5, 1)
    )
    assert torch.equal(by_five, alone)


def test_repr_makes_it_again(case: Case, tmp_path: Path) -> None:
    data = case.make(tmp_path, validation=0.25, augment=[HorizontalFlip(p=0.1)], limit=3)
    kinds = {name: getattr(atoll.data, name) for name in atoll.data.__all__}
    again = eval(repr(data), {**kinds, type(data).__name__: type(data)})
    assert repr(again) == repr(data)
    assert (again.validation_share, again.augment, again.limit) == (0.25, (HorizontalFlip(p=0.1),), 3)


def test_constructing_reads_nothing(tmp_path: Path) -> None:
    for kind in (atoll.data.MNIST, atoll.data.CIFAR100, atoll.data.SVHN, atoll.data.TinyImageNet):
        assert isinstance(kind(root=tmp_path / "nowhere"), Data)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, "validation: expected a number in"),
        ({"validation": -0.1}, "validation: expected a number in"),
        ({"extra_ratio": 0.0}, "extra_ratio: expected a number in"),
        ({"limit": 0}, "limit: expected at least 1"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        atoll.data.Digits(**options)  # type: ignore[arg-type]


def test_unknown_split() -> None:
    with pytest.raises(InputError, match="expected train, validation or test, got 'dev'"):
        atoll.data.Digits().split("dev")
