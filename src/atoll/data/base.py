"""Data sets: three splits of images and labels, and the path from storage to a float batch."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from atoll.data.augment import Augmentation
from atoll.data.boxes import UNKNOWN, boxes_of, check_boxes
from atoll.data.decode import as_images, as_labels, decode, image_size, read_npz
from atoll.data.download import Progress, Remote, folders, obtain
from atoll.data.fingerprint import Fingerprint, Inspection, tensor_digest
from atoll.errors import AtollError, DataError, InputError, check_range
from atoll.registry import Registry, constructor_call
from atoll.rng import PointRNG, generator
from atoll.threat import Bounds


@runtime_checkable
class Split(Protocol):
    """A part of a data set that can be fetched by index, a batch at a time."""

    @property
    def labels(self) -> Tensor:
        """One int64 label per point."""
        ...

    def __len__(self) -> int: ...

    def fetch(self, index: Tensor) -> Tensor:
        """Images ``index`` as stored: uint8 ``(batch, C, H, W)``, or float for data that are not images."""
        ...


@dataclass(frozen=True)
class MemorySplit:
    """A split that lives in memory (or a memory-mapped file), images as uint8; ``boxes`` if they are known."""

    images: Tensor
    labels: Tensor
    boxes: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"expected one label per image, got {len(self.images)} images, {len(self.labels)} labels")
        if self.labels.dim() != 1 or self.labels.dtype != torch.int64:
            raise DataError(
                f"labels: expected one int64 number per image, got {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        if self.images.is_floating_point() and not self.images.isfinite().all():
            raise DataError("images: expected finite numbers, got NaN or infinity")
        if self.boxes is not None:
            check_boxes(self.boxes, len(self), self.images.shape, "boxes")

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, index: Tensor) -> Tensor:
        return self.images.index_select(0, index)  # ten times as fast as images[index]

    def take(self, index: Tensor) -> MemorySplit:
        return MemorySplit(self.images[index], self.labels[index], None if self.boxes is None else self.boxes[index])


@dataclass(frozen=True)
class Splits:
    """Train and test as published; validation is taken out of train by ``Data``."""

    train: Split
    test: Split


@dataclass(frozen=True)
class SubSplit:
    """Some rows of another split, without copying it."""

    whole: Split
    rows: Tensor

    @cached_property  # asked for in every batch
    def labels(self) -> Tensor:
        return self.whole.labels[self.rows]

    @property
    def boxes(self) -> Tensor | None:
        boxes = boxes_of(self.whole)
        return None if boxes is None else boxes[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, index: Tensor) -> Tensor:
        return self.whole.fetch(self.rows[index])


@dataclass(frozen=True)
class ConcatSplit:
    """One split after another, without copying either: a data set's own rows, then the extra ones.

    >>> own = MemorySplit(torch.zeros(2, 1), torch.tensor([0, 1]))
    >>> more = MemorySplit(torch.ones(3, 1), torch.tensor([1, 1, 0]))
    >>> both = ConcatSplit(own, more)
    >>> len(both), both.labels.tolist(), both.fetch(torch.tensor([4, 0])).tolist()
    (5, [0, 1, 1, 1, 0], [[1.0], [0.0]])
    """

    first: Split
    second: Split

    @cached_property
    def labels(self) -> Tensor:
        return torch.cat([self.first.labels, self.second.labels])

    @property
    def boxes(self) -> Tensor | None:
        """Of both; a part that knows none has no box on any image."""
        parts = [(split, boxes_of(split)) for split in (self.first, self.second)]
        if all(boxes is None for _, boxes in parts):
            return None
        none = torch.tensor(UNKNOWN)
        return torch.cat([none.expand(len(split), 4) if boxes is None else boxes for split, boxes in parts])

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def fetch(self, index: Tensor) -> Tensor:
        here = index < len(self.first)
        if here.all():
            return self.first.fetch(index)
        tail = self.second.fetch(index[~here] - len(self.first))
        images = tail.new_empty(len(index), *tail.shape[1:])
        images[~here] = tail
        if here.any():
            images[here] = self.first.fetch(index[here])
        return images


def in_memory(split: Split) -> bool:
    """Whether a batch is a copy from memory, not worth a worker process; a view is if its ``whole`` is."""
    if isinstance(split, ConcatSplit):
        return in_memory(split.first) and in_memory(split.second)
    whole: Split | None = getattr(split, "whole", None)
    if whole is not None:
        return in_memory(whole)
    return isinstance(split, MemorySplit) or getattr(split, "cache", None) is not None


def inspect_split(split: Split, inspection: Inspection) -> str:
    """A digest of images and labels.  Views are seen through: how they are made is part of the recipe.

    Splits that read files (``FolderSplit``) have a method ``inspect`` and collect all faults.
    """
    rows = [split.rows] if isinstance(split, SubSplit) else []
    whole: Split | None = getattr(split, "whole", None)
    if whole is not None:
        return inspect_split(whole, inspection) + (tensor_digest(rows) if rows else "")
    if isinstance(split, _Inspected):
        return split.inspect(inspection)
    images = (split.fetch(index) for index in in_order(len(split), 1024))
    return tensor_digest(itertools.chain([split.labels], images))


@runtime_checkable
class _Inspected(Protocol):
    """A split that knows how to inspect its files."""

    def inspect(self, inspection: Inspection) -> str: ...


@dataclass
class Batch:
    """A batch on its way to the model: inputs as floats, labels, and which points of the split they are."""

    x: Tensor
    y: Tensor
    index: Tensor


DATA = Registry("data set", "data", "atoll.data.base.Data", "atoll.data")


class Data(ABC):
    """Base of all data sets.  Constructing one is free; files are read on first use.

    Args:
        root: folder that holds (or will hold) the files; the user's cache folder if None.
        download: whether missing files may be fetched.
        validation: share of the training set held out for choosing the best checkpoint.
        split_seed: seed of that split; separate from the training seed, so runs with other seeds compare.
        augment: augmentations of training batches, in order.
        limit: number of training points to use (after the split; random but fixed), for small studies.
        extra: ``.npz`` file with ``image`` (NHWC) and ``label`` arrays of additional (generated) training
            images, or ``x_train`` and ``y_train``.  They come after the set's own rows in ``train``.
        extra_ratio: share of each training batch that comes from ``extra``.

    The trainer draws an epoch as ``shuffled(data.num_own, batch_size, ..., extra=data.num_extra,
    extra_ratio=data.extra_ratio)``.  Set ``progress`` to a function that shows downloads.
    """

    registry: ClassVar[Registry] = DATA

    bounds: Bounds | None = (0.0, 1.0)
    progress: Progress | None = None

    def __init__(
        self,
        *,
        root: Path | str | None = None,
        download: bool = True,
        validation: float = 0.1,
        split_seed: int = 0,
        augment: Sequence[Augmentation] = (),
        limit: int | None = None,
        extra: Path | str | None = None,
        extra_ratio: float = 0.7,
    ) -> None:
        if root == "":
            raise InputError("root: expected a folder, got an empty text")
        check_range("[0, 1)", validation=validation)
        check_range("(0, 1)", extra_ratio=extra_ratio)
        check_range("[1, inf)", limit=limit)
        self.root = Path(root).expanduser() if root is not None else None
        self.extra = Path(extra).expanduser() if extra is not None else None
        self.download, self.validation_share, self.split_seed = download, validation, split_seed
        self.augment, self.limit, self.extra_ratio = tuple(augment), limit, extra_ratio

    def __repr__(self) -> str:
        """The call that makes this data set again, without defaults."""
        # `validation` is the split itself, so the share has another name.
        return constructor_call(self, validation="validation_share")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the files are looked for; new ones go into the first."""
        return folders(type(self).__name__.lower(), self.root)

    def _obtain(self, remote: Remote) -> Path:
        """The path of a published file, which is fetched if it is missing and may be."""
        return obtain(remote, self.folders, download=self.download, progress=self.progress)

    @abstractmethod
    def load(self) -> Splits:
        """Read the files; called once."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.fetch(torch.tensor([0])).shape[1:])

    @cached_property
    def _splits(self) -> Splits:
        splits = self.load()
        for name, split in (("training", splits.train), ("test", splits.test)):
            if not len(split):
                raise DataError(f"{type(self).__name__}: the {name} set is empty")
            self._check_labels(split.labels, f"{type(self).__name__}, {name} set")
        return splits

    def _check_labels(self, labels: Tensor, source: str) -> None:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.num_classes:
            raise DataError(f"{source}: expected labels in [0, {self.num_classes - 1}], got [{low}, {high}]")

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Rows of the published training set that are for training and for validation."""
        from sklearn.model_selection import train_test_split  # a second to import; `atoll ls` does without

        labels = self._splits.train.labels.numpy()
        if not self.validation_share:
            return torch.arange(len(labels)), torch.arange(0)
        try:
            options = {"test_size": self.validation_share, "random_state": self.split_seed}
            train, validation = train_test_split(np.arange(len(labels)), stratify=labels, **options)
        except ValueError as error:  # a class with a single member, or fewer validation points than classes
            share = f"{self.validation_share:g} of the data"
            raise DataError(
                f"{type(self).__name__}: cannot hold out {share} for validation: {error}"
                " Add images, or choose another data.validation (0 for none)."
            ) from None
        return torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(validation))

    @cached_property
    def _own(self) -> Split:
        """The training rows of the data set itself."""
        rows = self._rows[0]
        if self.limit is not None:
            # Not simply the first ones, so that sorted data keep all their classes.
            order = torch.randperm(len(rows), generator=generator("limit", self.split_seed))
            rows = rows[order[: self.limit].sort().values]
        return SubSplit(self._splits.train, rows)

    @cached_property
    def _more(self) -> MemorySplit | None:
        """The rows of the ``extra`` file."""
        if self.extra is None:
            return None
        arrays = read_npz(self.extra, ("image", "label", "x_train", "y_train"))
        names = ("image", "label") if "image" in arrays else ("x_train", "y_train")
        if not arrays.keys() >= set(names):
            raise DataError(
                f"{self.extra}: expected arrays image and label, or x_train and y_train, got {sorted(arrays)}"
            )
        images = as_images(arrays[names[0]], f"{self.extra}, {names[0]}")
        labels = as_labels(arrays[names[1]], len(images), f"{self.extra}, {names[1]}")
        own = self._own.fetch(torch.tensor([0]))
        if images.shape[1:] != own.shape[1:] or images.dtype != own.dtype:
            raise DataError(
                f"{self.extra}: expected images of {own.dtype} {tuple(own.shape[1:])}, like the set's own,"
                f" got {images.dtype} {tuple(images.shape[1:])} (channels first)"
            )
        self._check_labels(labels, str(self.extra))
        return MemorySplit(images, labels)

    @cached_property
    def train(self) -> Split:
        """The set's own training rows, then the extra ones."""
        return self._own if self._more is None else ConcatSplit(self._own, self._more)

    @property
    def num_own(self) -> int:
        """How many rows of ``train`` are the data set's own; they come first."""
        return len(self._own)

    @property
    def num_extra(self) -> int:
        """How many rows of ``train`` come from the ``extra`` file."""
        return 0 if self._more is None else len(self._more)

    @cached_property
    def validation(self) -> Split:
        return SubSplit(self._splits.train, self._rows[1])

    @property
    def test(self) -> Split:
        return self._splits.test

    def inspect(self, known: Fingerprint | None = None) -> Fingerprint:
        """Read all data once before any work: one error lists every file that cannot be read.

        Args:
            known: an earlier fingerprint; files that have not been touched since are not read again.
        """
        inspection = Inspection(known.files if known else {})
        parts = {"training": self._splits.train, "test": self._splits.test}
        for name, split in parts.items():
            inspection.points[name], inspection.digests[name] = len(split), inspect_split(split, inspection)
        fingerprint = inspection.fingerprint(str(self.root or type(self).__name__))
        if self._more is not None:  # it is compared with the images that were just checked
            inspection.points["extra"], inspection.digests["extra"] = (
                len(self._more),
                inspect_split(self._more, inspection),
            )
        return fingerprint

    def read_image(self, file: Path, shape: tuple[int, ...], *, fit: bool = False) -> Tensor:
        """An image file as a point of this data set, as ``fetch`` would give it; the data themselves are not read.

        Data sets that scale and cut their images do the same with this one.  Others expect their size.

        Args:
            file: the image.
            shape: shape of one input, which the model knows.
            fit: scale and cut an image of another size to a square instead of refusing it.
        """
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise InputError(f"images: the model takes inputs of shape {shape}, not gray or RGB images")
        height, width = shape[1:]
        size = image_size(file)
        if size == (width, height):
            return decode(file, str(file), gray=shape[0] == 1)
        if not fit or width != height:
            raise DataError(f"{file}: expected {width} x {height} pixels, got {size[0]} x {size[1]}")
        return decode(file, str(file), resize=width, size=width, gray=shape[0] == 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know about how their files were read, one sentence each."""
        return ()

    def split(self, name: str) -> Split:
        """``"train"``, ``"validation"`` or ``"test"``."""
        if name not in ("train", "validation", "test"):
            raise InputError(f"split: expected train, validation or test, got {name!r}")
        split: Split = getattr(self, name)
        return split

    def tensors(self, split: str = "test", count: int | None = None) -> tuple[Tensor, Tensor]:
        """The first ``count`` points of a split (all if None) as floats, and their labels: for notebooks."""
        points = self.split(split)
        index = torch.arange(len(points))[:count]
        return to_float(points.fetch(index)), points.labels[index]


def sample(split: Split, count: int, *names: object) -> tuple[Tensor, Tensor]:
    """Random points of a split (all, if it has no more than ``count``) as floats, and their labels, in its order.

    Which ones depends on ``names`` only.  Some data sets are sorted by class, so the first ones would not do.

    >>> split = MemorySplit(torch.zeros(5, 1), torch.arange(5))
    >>> torch.equal(sample(split, 3, 0)[1], sample(split, 3, 0)[1]), len(sample(split, 9, 0)[1])
    (True, 5)
    """
    rows = sample_rows(split, count, *names)
    return to_float(split.fetch(rows)), split.labels[rows]


def sample_rows(split: Split, count: int, *names: object) -> Tensor:
    """Which points ``sample`` takes."""
    return torch.randperm(len(split), generator=generator(*names))[:count].sort().values


def to_float(images: Tensor) -> Tensor:
    """Stored images to floats in [0, 1]; data that are floats already keep their precision.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return images.float().div_(255) if images.dtype == torch.uint8 else images


@dataclass(frozen=True)
class _Batches:
    """The batches of an order as PyTorch's DataLoader wants them: numbered items."""

    split: Split
    order: Sequence[Tensor]

    def __getitem__(self, number: int) -> Tensor | AtollError:
        try:
            return self.split.fetch(self.order[number])
        except AtollError as error:  # raised in a worker, its one sentence would drown in two tracebacks
            return error


def batches(
    split: Split,
    order: Sequence[Tensor],
    *,
    augment: Sequence[Augmentation] = (),
    seed: object = 0,
    device: torch.device | str = "cpu",
    workers: int = 2,
) -> Iterator[Batch]:
    """Batches of a split in a given order (a sequence of index tensors), augmented.

    Splits in memory are fetched in place; others stream through worker processes.  Augmentation happens here,
    on the whole batch and on the model's device, with one random stream per point.  Neither the number of
    workers nor the composition of the batches changes what a point looks like.

    >>> split = MemorySplit(torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1) * 51, torch.tensor([0, 1, 0]))
    >>> [(batch.x.flatten().tolist(), batch.y.tolist()) for batch in batches(split, in_order(3, 2))]
    [([0.0, 0.20000000298023224], [0, 1]), ([0.4000000059604645], [0])]
    """
    source = _stored(split, order, workers, pin=torch.device(device).type == "cuda")
    try:
        for index, images in zip(order, source, strict=True):
            if isinstance(images, AtollError):
                raise images
            x = to_float(images.to(device, non_blocking=True))
            y = split.labels[index].to(device, non_blocking=True)
            index = index.to(device)
            for number, augmentation in enumerate(augment):
                x = augmentation(x, PointRNG(seed, number, type(augmentation).__name__, index=index))
            yield Batch(x, y, index)
    finally:
        # Ends the workers now.  An error's traceback would keep them until some later garbage collection,
        # which then waits five seconds for each.
        del source


def _stored(split: Split, order: Sequence[Tensor], workers: int, pin: bool) -> Iterator[Tensor | AtollError]:
    """The images of each batch as they are stored, or what went wrong."""
    items = _Batches(split, order)
    if in_memory(split):
        return (items[number] for number in range(len(order)))
    own = torch.Generator()  # otherwise the loader draws from the global one
    options = {"batch_size": None, "num_workers": workers, "pin_memory": pin, "generator": own}
    return iter(DataLoader(items, sampler=range(len(order)), **options))  # type: ignore[arg-type]


def in_order(length: int, batch_size: int) -> list[Tensor]:
    """Indices ``0 .. length-1`` in batches, the last one as short as it comes.

    >>> in_order(3, 2)
    [tensor([0, 1]), tensor([2])]
    """
    check_range("[1, inf)", batch_size=batch_size)
    return list(torch.split(torch.arange(length), batch_size)) if length else []


def shuffled(length: int, batch_size: int, *names: object, extra: int = 0, extra_ratio: float = 0.0) -> list[Tensor]:
    """One epoch of full batches in an order that depends on ``names`` only (seed, epoch).

    With ``extra`` additional points (numbered after the first ``length``), each batch takes ``extra_ratio``
    of its places from them; the epoch keeps its number of batches.  So Rebuffi et al., "Data Augmentation Can
    Improve Robustness" (2021), use generated images.

    >>> [batch.sort().values.tolist() for batch in shuffled(4, 4, "seed")]
    [[0, 1, 2, 3]]
    >>> [int((batch >= 4).sum()) for batch in shuffled(4, 2, "seed", extra=100, extra_ratio=0.5)]
    [1, 1]
    """
    if not 1 <= batch_size <= length:
        raise InputError(f"batch_size: expected between 1 and the {length} training points, got {batch_size}")
    check_range("[0, 1)", extra_ratio=extra_ratio)
    count = length // batch_size
    from_extra = round(batch_size * extra_ratio) if extra else 0
    own = torch.randperm(length, generator=generator("order", *names))
    if not from_extra:
        return list(torch.split(own[: count * batch_size], batch_size))
    draw = generator("extra", *names)
    rounds = math.ceil(count * from_extra / extra)
    more = torch.cat([torch.randperm(extra, generator=draw) for _ in range(rounds)]) + length
    keep = batch_size - from_extra
    return [
        torch.cat([own[i * keep : (i + 1) * keep], more[i * from_extra : (i + 1) * from_extra]]) for i in range(count)
    ]
