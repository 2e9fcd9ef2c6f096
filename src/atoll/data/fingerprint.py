"""Fingerprints of data, to check that a resumed run has the same data as before, and to report what changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.errors import DataError

MAX_FAULTS = 20  # faults listed in a message
_MAX_FILES = 3  # files of each kind listed in a message


class FileRecord(NamedTuple):
    """A file as it was read: size in bytes, modification time in nanoseconds, and truncated SHA-256."""

    size: int
    changed: int
    digest: str


@dataclass(frozen=True)
class Fingerprint:
    """The content of a data set when it was read.

    Args:
        points: number of points in each part (training, test, extra).
        digests: digest of the images and labels of each part.
        files: image files by path, for data sets that are folders of images.
    """

    points: Mapping[str, int]
    digests: Mapping[str, str]
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def difference(self, now: Fingerprint) -> str:
        """Describe briefly what changed since this fingerprint; empty if nothing changed.

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
        texts = [f"{kind}: {first_few(sorted(names), _MAX_FILES)}" for kind, names in kinds.items() if names]
        return "; ".join(texts or [self._part_difference(part, now) for part in changed])

    def _part_difference(self, part: str, now: Fingerprint) -> str:
        before, after = self.points.get(part, 0), now.points.get(part, 0)
        return f"{part} points: {before:,} before, {after:,} now" if before != after else f"different {part} points"

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``from_json`` reads it back."""
        files = {name: list(record) for name, record in self.files.items()}
        return {"points": dict(self.points), "digests": dict(self.digests), "files": files}

    @staticmethod
    def from_json(tree: Any) -> Fingerprint:
        """Read plain data; raises a ValueError, TypeError, KeyError or AttributeError if it is something else."""
        files = {name: FileRecord(*record) for name, record in tree["files"].items()}
        if not all(isinstance(count, int) for count in tree["points"].values()):
            raise ValueError("expected numbers of points")
        if not all(isinstance(digest, str) for digest in tree["digests"].values()):
            raise ValueError("expected digests")
        return Fingerprint(tree["points"], tree["digests"], files)


@dataclass
class Inspection:
    """The results of one pass over all data.

    Args:
        known: files of an earlier pass, which are not read again if size and modification time are the same.
    """

    known: Mapping[str, FileRecord] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the fingerprint; raises one DataError that lists all files that cannot be read."""
        if self.faults:
            raise DataError(
                f"{name}: {len(self.faults):,} of {len(self.files) + len(self.faults):,} images cannot be read;"
                f" repair or remove them and try again:\n  " + first_few(self.faults, MAX_FAULTS, "\n  ")
            )
        return Fingerprint(self.points, self.digests, self.files)


def first_few(names: Sequence[str], count: int, separator: str = ", ") -> str:
    """Join the first names, and say how many more there are.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    first, more = separator.join(names[:count]), len(names) - count
    return f"{first}{' ' if separator == ', ' else separator}and {more:,} more" if more > 0 else first


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """Return the truncated SHA-256 of data types, shapes and values of tensors.

    >>> tensor_digest([torch.zeros(2)]) == tensor_digest([torch.zeros(2)]) != tensor_digest([torch.ones(2)])
    True
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
