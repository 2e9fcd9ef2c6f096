"""Fingerprints of data: whether a run is resumed with the data that it was started with, and what changed if not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.errors import DataError

SHOWN = 20  # faults in a message
_NAMED = 3  # files of each kind in a message


class FileRecord(NamedTuple):
    """A file as it was read: size in bytes, time of its last change in nanoseconds, SHA-256 (shortened)."""

    size: int
    changed: int
    digest: str


@dataclass(frozen=True)
class Fingerprint:
    """What a data set contained when it was read.

    Args:
        points: number of points of each part (training, test, extra).
        digests: digest of images and labels of each part.
        files: image files by their path, for data sets that are folders of images.
    """

    points: Mapping[str, int]
    digests: Mapping[str, str]
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def difference(self, now: Fingerprint) -> str:
        """What changed since this fingerprint, in a few words; empty if nothing did.

        >>> before = Fingerprint({"training": 2}, {"training": "a"}, {"cat/1.png": FileRecord(9, 0, "x")})
        >>> before.difference(Fingerprint({"training": 1}, {"training": "b"}, {}))
        'deleted: cat/1.png'
        """
        parts = sorted(self.digests.keys() | now.digests.keys())
        changed = [part for part in parts if self.digests.get(part) != now.digests.get(part)]
        if not changed:
            return ""
        both = self.files.keys() & now.files.keys()
        kinds = {
            "deleted": self.files.keys() - both,
            "added": now.files.keys() - both,
            "edited": {name for name in both if self.files[name].digest != now.files[name].digest},
        }
        texts = [f"{kind}: {first_few(sorted(names), _NAMED)}" for kind, names in kinds.items() if names]
        return "; ".join(texts or [self._part_difference(part, now) for part in changed])

    def _part_difference(self, part: str, now: Fingerprint) -> str:
        before, after = self.points.get(part, 0), now.points.get(part, 0)
        return f"{part} points: {before:,} before, {after:,} now" if before != after else f"other {part} points"

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads them back."""
        files = {name: list(record) for name, record in self.files.items()}
        return {"points": dict(self.points), "digests": dict(self.digests), "files": files}

    @staticmethod
    def from_json(tree: Any) -> Fingerprint:
        files = {name: FileRecord(*record) for name, record in tree["files"].items()}
        return Fingerprint(tree["points"], tree["digests"], files)


@dataclass
class Inspection:
    """One pass over all data: what it found, and what is known from an earlier one.

    Args:
        known: files whose content need not be read again if size and time of change are the same.
    """

    known: Mapping[str, FileRecord] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def fingerprint(self, name: str) -> Fingerprint:
        """The fingerprint, or one error with all files that cannot be read."""
        if self.faults:
            raise DataError(
                f"{name}: {len(self.faults):,} of {len(self.files) + len(self.faults):,} images cannot be read;"
                f" repair or delete them, and start again:\n  " + first_few(self.faults, SHOWN, "\n  ")
            )
        return Fingerprint(self.points, self.digests, self.files)


def first_few(names: Sequence[str], count: int, separator: str = ", ") -> str:
    """The first names, and how many more there are.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    first, more = separator.join(names[:count]), len(names) - count
    return f"{first}{' ' if separator == ', ' else separator}and {more:,} more" if more > 0 else first


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the values of tensors.

    >>> tensor_digest([torch.zeros(2)]) == tensor_digest([torch.zeros(2)]) != tensor_digest([torch.ones(2)])
    True
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
