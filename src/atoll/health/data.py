"""Checks of the data: missing classes, copies of images, blank images, and few gray levels."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from atoll.data.base import ConcatSplit, Data, Split, sample_rows, to_float
from atoll.data.fingerprint import first_few
from atoll.health.finding import Finding

LIMIT = 2**30
"""Bytes of pixels that are read from each split; of larger splits, a random part is compared."""

RARE = 1e-3  # share of images below which copies and blank images hardly change an accuracy
CHANCE = 0.05  # probability of a missing class by chance, above which it is not reported
FEW_LEVELS = 16  # 4 bits; then perturbations up to the usual 8/255 do not reach the next level
WIDE = 15 / 255  # ... because levels are further apart; those of dark images are few, but close
MANY_PIXELS = 10_000  # in fewer pixels, some levels may be missing by chance
SAMPLE = 100  # images whose levels are counted
BATCH_BYTES = 2**24
NAMES = 5  # names listed in a message

OnImages = Callable[[int, int], None]  # images read, and their total


@dataclass(frozen=True, eq=False)
class Contents:
    """The images of a split that were compared.

    Args:
        digests: digest of the pixels of each image.
        blank: which images have the same color everywhere.
        labels: their labels.
        total: number of images in the split.
    """

    digests: Sequence[bytes]
    blank: Tensor
    labels: Tensor
    total: int

    @cached_property
    def pictures(self) -> list[tuple[bytes, int]]:
        """Digest and label of every image that is not blank."""
        return [
            (digest, label)
            for digest, blank, label in zip(self.digests, self.blank.tolist(), self.labels.tolist(), strict=True)
            if not blank
        ]

    def __str__(self) -> str:
        read = len(self.digests)
        return f"{read:,}" if read == self.total else f"{read:,} of {self.total:,}"


@dataclass(frozen=True, eq=False)
class DataScan:
    """What one pass over the data shows.

    Args:
        test: the test images.
        training: the training and validation images.
        counts: number of test and training images of each class, of all images.
        some: some test images that are not blank; None if the inputs are not images.
    """

    test: Contents
    training: Contents
    counts: tuple[Tensor, Tensor]
    some: Tensor | None

    @property
    def digest(self) -> str:
        """Digest of everything that the checks depend on."""
        digest = hashlib.sha256()
        for contents in (self.test, self.training):
            digest.update(b"".join(contents.digests) + contents.labels.numpy().tobytes())
        for counts in self.counts:
            digest.update(counts.numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def compared(self) -> dict[str, int]:
        """Number of images that were read from each part."""
        return {"test": len(self.test.digests), "training": len(self.training.digests)}


def scan_data(data: Data, on_images: OnImages = lambda done, total: None) -> DataScan:
    """Read the data once, in batches, up to ``LIMIT`` bytes of pixels of the test and of the training images."""
    training = ConcatSplit(data.train, data.validation) if len(data.validation) else data.train
    splits = data.test, training
    rows = [_rows(split) for split in splits]
    total, done = sum(map(len, rows)), 0
    contents: list[Contents] = []
    for split, index in zip(splits, rows, strict=True):
        parts = []
        for part in torch.split(index, _batch_size(split)):
            parts.append(_read(split, part))
            done += len(part)
            on_images(done, total)
        digests = [digest for part, _ in parts for digest in part]
        contents.append(Contents(digests, torch.cat([blank for _, blank in parts]), split.labels[index], len(split)))
    test, train = (split.labels.bincount(minlength=data.num_classes) for split in splits)
    some = data.test.fetch(rows[0][:: max(len(rows[0]) // SAMPLE, 1)][:SAMPLE])
    return DataScan(contents[0], contents[1], (test, train), some[~_is_blank(some)] if some.dim() == 4 else None)


def _rows(split: Split) -> Tensor:
    """The images to read: all of them, unless the split is large."""
    size = split.fetch(torch.arange(1)).nbytes
    return sample_rows(split, max(LIMIT // size, 1), "health")


def _batch_size(split: Split) -> int:
    return max(BATCH_BYTES // split.fetch(torch.arange(1)).nbytes, 1)


def _read(split: Split, index: Tensor) -> tuple[list[bytes], Tensor]:
    """Digests of images, and which of them are blank."""
    images = split.fetch(index)
    digests = [hashlib.blake2b(image.data, digest_size=16).digest() for image in np.ascontiguousarray(images.numpy())]
    return digests, _is_blank(images)


def _is_blank(images: Tensor) -> Tensor:
    """Which images have the same color everywhere; inputs that are not images are never blank."""
    if images.dim() != 4:
        return torch.zeros(len(images), dtype=torch.bool)
    channels = images.flatten(2)
    return (channels.amax(2) == channels.amin(2)).all(1)


def check_data(scan: DataScan, classes: Sequence[str]) -> list[Finding]:
    """Look for defects of the data.

    - ``missing class``: classes without test or training images, unless there are so few images that this can be chance
    - ``duplicates``: test images that are exact copies of other test images
    - ``overlap``: test images that are exact copies of training images
    - ``blank``: images with the same color everywhere
    - ``gray levels``: images with at most 16 levels that are not adjacent
    - ``dark``: images that were probably divided by 255 twice

    Copies and blank images are reported if they are more than one in 1,000 images.

    Args:
        scan: the data.
        classes: names of the classes.
    """
    return [
        *_missing_classes(*scan.counts, classes),
        *_duplicates(scan.test),
        *_overlap(scan.test, scan.training),
        *_blank(scan.test, scan.training),
        *_few_levels(scan),
    ]


def _missing_classes(test: Tensor, training: Tensor, classes: Sequence[str]) -> Iterator[Finding]:
    for name, own, other in (("test", test, training), ("training", training, test)):
        # Probability that all images of the class are in the other part, if the images were divided at random.
        chance = (float(other.sum()) / float(other.sum() + own.sum())) ** other.double()
        nowhere = (other == 0) & (name == "test")  # reported once
        missing = (own == 0) & ((len(classes) * chance < CHANCE) | nowhere)
        if missing.any():
            names = [classes[label] for label in missing.nonzero().flatten().tolist()]
            subject = f"class {names[0]} has" if len(names) == 1 else f"{len(names):,} of {len(classes):,} classes have"
            more = "" if len(names) == 1 else f": {first_few(names, NAMES)}"
            yield Finding("missing class", f"{subject} no {name} images{more}")


def _duplicates(test: Contents) -> Iterator[Finding]:
    counts = Counter(digest for digest, _ in test.pictures)
    copies = sum(counts.values()) - len(counts)
    if copies > RARE * len(test.digests):
        disagree = len(set(test.pictures)) > len(counts)
        message = f"test images that are exact copies of other test images: {_of(copies, test)}"
        yield Finding("duplicates", message + (", some with another label" if disagree else ""))


def _overlap(test: Contents, training: Contents) -> Iterator[Finding]:
    known = {digest for digest, _ in training.pictures}
    count = sum(digest in known for digest, _ in test.pictures)
    if count > RARE * len(test.digests):
        compared = "" if len(training.digests) == training.total else f", compared with {training} training images"
        message = f"test images that are also training images: {_of(count, test)}{compared}"
        yield Finding("overlap", f"{message}; a model that was trained on them is less accurate than it seems")


def _blank(*parts: Contents) -> Iterator[Finding]:
    for name, part in zip(("test", "training"), parts, strict=True):
        count = int(part.blank.sum())
        if count > RARE * len(part.digests):
            yield Finding("blank", f"{name} images with the same color everywhere: {_of(count, part)}")


def _few_levels(scan: DataScan) -> Iterator[Finding]:
    if scan.some is None or not len(scan.some):
        return
    levels = to_float(torch.unique(scan.some))
    gap, highest = float(levels.diff().min()), float(levels[-1])
    if scan.some.is_floating_point() and highest <= 1.5 / 255:  # no image that was stored as uint8 looks like this
        message = f"all pixels are in [0, {highest:.2g}], a small part of [0, 1]"
        yield Finding("dark", f"{message}; were they divided by 255 twice?")
        return
    is_few = len(levels) <= FEW_LEVELS and gap > WIDE and scan.some.numel() >= MANY_PIXELS
    if is_few or gap > 1 / FEW_LEVELS + 0.001:
        message = f"the images have only {len(levels)} gray levels, at least {gap:.2g} apart"
        yield Finding("gray levels", f"{message}; rounding an adversarial image to them may undo the attack")


def _of(count: int, part: Contents) -> str:
    return f"{count:,} of {len(part.digests):,}"
