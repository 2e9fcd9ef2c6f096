"""Data sets with training, validation and test splits, and batches of floats."""

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
from atoll.errors import AtollError, DataError, InputError, check_count, check_range
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
        """Return the images ``index`` as stored: uint8 ``(batch, C, H, W)``, or floats for other data."""
        ...


@dataclass(frozen=True)
class MemorySplit:
    """A split in memory or in a memory-mapped file, with images as uint8 and optional bounding boxes."""

    images: Tensor
    labels: Tensor
    boxes: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"labels: expected one per image, got {len(self.labels)} for {len(self.images)} images")
        if self.labels.dim() != 1 or self.labels.dtype != torch.int64:
            raise DataError(f"labels: expected one int64 per image, got {self.labels.dtype} {tuple(self.labels.shape)}")
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
    """The published training and test sets; ``Data`` holds out a part of training for validation."""

    train: Split
    test: Split


@dataclass(frozen=True)
class SubSplit:
    """Selected rows of another split, without copying it."""

    whole: Split
    rows: Tensor

    @cached_property  # used in every batch
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
    """Two splits, one after the other, without copying: the rows of a data set, then extra rows.

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
        """Boxes of both splits; None only if neither has boxes."""
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
    """Whether batches are copied from memory and need no worker processes; a view is if its ``whole`` is."""
    if isinstance(split, ConcatSplit):
        return in_memory(split.first) and in_memory(split.second)
    whole: Split | None = getattr(split, "whole", None)
    if whole is not None:
        return in_memory(whole)
    return isinstance(split, MemorySplit) or getattr(split, "cache", None) is not None


def inspect_split(split: Split, inspection: Inspection) -> str:
    """Return a digest of images and labels; for a view, of the underlying split, because the recipe defines the view.

    Splits that read files (``FolderSplit``) have a method ``inspect``, which collects all faults.
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
    """A split with a method that inspects its files."""

    def inspect(self, inspection: Inspection) -> str: ...


@dataclass
class Batch:
    """A batch: inputs as floats, labels, and the indices of the points in the split."""

    x: Tensor
    y: Tensor
    index: Tensor


DATA = Registry("data set", "data", "atoll.data.base.Data", "atoll.data")


class Data(ABC):
    """Base class of data sets; files are read on first use, not by the constructor.

    Args:
        root: folder of the files, also for downloads; the user's cache folder if None.
        download: whether to download missing files.
        validation: share of the training set held out to select the best checkpoint.
        split_seed: seed of the validation split; separate from the training seed, so that runs are comparable.
        augment: augmentations of training batches, in order.
        limit: number of training points to use (after the split; random but fixed), for small studies.
        extra: ``.npz`` file of additional (generated) training images, with arrays ``image`` (NHWC) and ``label``, or
            ``x_train`` and ``y_train``.  They follow the data set's own rows in ``train``.
        extra_ratio: share of each training batch that comes from ``extra``.

    The trainer draws an epoch as ``shuffled(data.num_own, batch_size, ..., extra=data.num_extra,
    extra_ratio=data.extra_ratio)``.  Set ``progress`` to a function that shows the progress of downloads.
    """

    registry: ClassVar[Registry] = DATA

    bounds: Bounds | None = (0.0, 1.0)
    resize: int | None = None  # length of the shorter side of photos before the middle is cut out, if they are scaled
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
            raise InputError("root: expected a folder, got an empty string")
        check_range("[0, 1)", validation=validation)
        check_range("(0, 1)", extra_ratio=extra_ratio)
        check_count(1, limit=limit)
        self.root = Path(root).expanduser() if root is not None else None
        self.extra = Path(extra).expanduser() if extra is not None else None
        self.download, self.validation_share, self.split_seed = download, validation, split_seed
        self.augment, self.limit, self.extra_ratio = tuple(augment), limit, extra_ratio

    def __repr__(self) -> str:
        """Return the call that creates this data set, without defaults."""
        # The attribute `validation` is the split itself, so the share has another name.
        return constructor_call(self, validation="validation_share")

    @property
    def _source(self) -> str:
        """Where the data comes from, for messages."""
        return str(self.root or type(self).__name__)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that are searched for the files; downloads go to the first."""
        return folders(type(self).__name__.lower(), self.root)

    def _obtain(self, remote: Remote) -> Path:
        """Return the path of a published file, and download it if it is missing and downloads are allowed."""
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
        """Rows of the published training set for training and for validation."""
        from sklearn.model_selection import train_test_split  # slow to import, and `atoll ls` does not need it

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
                " Add images or change data.validation (0 for none)."
            ) from None
        return torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(validation))

    @cached_property
    def _own(self) -> Split:
        """The training rows of the data set itself."""
        rows = self._rows[0]
        if self.limit is not None:
            # Not simply the first ones, so that sorted data keep all classes.
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
                f"{self.extra}: expected images of {own.dtype} {tuple(own.shape[1:])}, as in the data set,"
                f" got {images.dtype} {tuple(images.shape[1:])} (channels first)"
            )
        self._check_labels(labels, str(self.extra))
        return MemorySplit(images, labels)

    @cached_property
    def train(self) -> Split:
        """The data set's own training rows, then the extra ones."""
        return self._own if self._more is None else ConcatSplit(self._own, self._more)

    @property
    def num_own(self) -> int:
        """Number of rows of ``train`` that are the data set's own; they come first."""
        return len(self._own)

    @property
    def num_extra(self) -> int:
        """Number of rows of ``train`` that come from the ``extra`` file."""
        return 0 if self._more is None else len(self._more)

    @cached_property
    def validation(self) -> Split:
        return SubSplit(self._splits.train, self._rows[1])

    @property
    def test(self) -> Split:
        return self._splits.test

    def inspect(self, known: Fingerprint | None = None) -> Fingerprint:
        """Read all data once and return its fingerprint; raises one error that lists all unreadable files.

        Args:
            known: an earlier fingerprint; files that have not changed since are not read again.
        """
        inspection = Inspection(known.files if known else {})
        parts = {"training": self._splits.train, "test": self._splits.test}
        for name, split in parts.items():
            inspection.points[name], inspection.digests[name] = len(split), inspect_split(split, inspection)
        fingerprint = inspection.fingerprint(self._source)
        if self._more is not None:  # after the data set itself, whose image format it must match
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
        """Notes for the user on how the files were read, one sentence each."""
        return ()

    def split(self, name: str) -> Split:
        """Return a split by name: ``"train"``, ``"validation"`` or ``"test"``."""
        if name not in ("train", "validation", "test"):
            raise InputError(f"split: expected train, validation or test, got {name!r}")
        split: Split = getattr(self, name)
        return split

    def tensors(self, split: str = "test", count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the first ``count`` points of a split (all if None) as floats, and their labels."""
        points = self.split(split)
        index = torch.arange(len(points))[:count]
        return to_float(points.fetch(index)), points.labels[index]


def sample(split: Split, count: int, *names: object) -> tuple[Tensor, Tensor]:
    """Return ``count`` random points of a split (or all, if it has fewer) as floats, and their labels, in order.

    The choice depends only on ``names``.  It is random because some data sets are sorted by class.

    >>> split = MemorySplit(torch.zeros(5, 1), torch.arange(5))
    >>> torch.equal(sample(split, 3, 0)[1], sample(split, 3, 0)[1]), len(sample(split, 9, 0)[1])
    (True, 5)
    """
    rows = sample_rows(split, count, *names)
    return to_float(split.fetch(rows)), split.labels[rows]


def sample_rows(split: Split, count: int, *names: object) -> Tensor:
    """Return the indices of the points that ``sample`` returns."""
    return torch.randperm(len(split), generator=generator(*names))[:count].sort().values


def to_float(images: Tensor) -> Tensor:
    """Convert stored images to floats in [0, 1]; data that is already float does not change.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return images.float().div_(255) if images.dtype == torch.uint8 else images


@dataclass(frozen=True)
class _Batches:
    """The batches of an order as a map-style data set for PyTorch's DataLoader."""

    split: Split
    order: Sequence[Tensor]

    def __getitem__(self, number: int) -> Tensor | AtollError:
        try:
            return self.split.fetch(self.order[number])
        except AtollError as error:  # raised in a worker, the message would be buried in two tracebacks
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
    """Yield augmented batches of a split in a given order (a sequence of index tensors).

    Splits in memory are read directly, others by worker processes.  Augmentation runs on the whole batch and on the
    given device, with one random stream per point.  The result for a point depends neither on the number of workers nor
    on the other points of the batch.

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
            index = index.to(device, non_blocking=True)
            for number, augmentation in enumerate(augment):
                x = augmentation(x, PointRNG(seed, number, type(augmentation).__name__, index=index))
            yield Batch(x, y, index)
    finally:
        # Stop the workers now.  The traceback of an error would keep them alive until a later garbage collection, which
        # would wait five seconds for each.
        del source


def _stored(split: Split, order: Sequence[Tensor], workers: int, pin: bool) -> Iterator[Tensor | AtollError]:
    """Yield the images of each batch as they are stored, or the error that occurred."""
    items = _Batches(split, order)
    if in_memory(split):
        return (items[number] for number in range(len(order)))
    own = torch.Generator()  # otherwise the loader draws from the global generator
    options = {"batch_size": None, "num_workers": workers, "pin_memory": pin, "generator": own}
    return iter(DataLoader(items, sampler=range(len(order)), **options))  # type: ignore[arg-type]


def in_order(length: int, batch_size: int) -> list[Tensor]:
    """Return the indices ``0 .. length-1`` in batches; the last one may be smaller.

    >>> in_order(3, 2)
    [tensor([0, 1]), tensor([2])]
    """
    check_count(1, batch_size=batch_size)
    return list(torch.split(torch.arange(length), batch_size)) if length else []


def shuffled(length: int, batch_size: int, *names: object, extra: int = 0, extra_ratio: float = 0.0) -> list[Tensor]:
    """Return one epoch of full batches, in an order that depends only on ``names`` (seed, epoch).

    With ``extra`` additional points (numbered after the first ``length``), a share ``extra_ratio`` of each batch comes
    from them; the number of batches does not change.  Rebuffi et al., "Data Augmentation Can Improve Robustness"
    (2021), use generated images in this way.

    >>> [batch.sort().values.tolist() for batch in shuffled(4, 4, "seed")]
    [[0, 1, 2, 3]]
    >>> [int((batch >= 4).sum()) for batch in shuffled(4, 2, "seed", extra=100, extra_ratio=0.5)]
    [1, 1]
    """
    if not 1 <= batch_size <= length:
        raise InputError(f"batch_size: expected 1 to {length} (the number of training points), got {batch_size}")
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
