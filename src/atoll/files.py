"""The store of everything a run keeps: atomic writes, records with checksums, and digests.

A record is a JSON object with its kind and a checksum of the rest.  A file of records has one of them per line, so that
other programs can read it as JSON Lines.  Reading checks everything: the file must be regular, small enough, UTF-8 and
not nested too deeply, and its checksum must match.  What fails is a ``DamagedError``; nothing is used unchecked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import DamagedError, InputError

LARGEST = 64 * 2**20  # bytes of a file of text; Atoll writes far smaller ones
DEEPEST = 64  # levels of nested lists and mappings
CHECKSUM = "checksum"  # the key of the checksum in a record
_SHORT = 16  # digits of the checksum of a line


def sync(path: Path) -> None:
    """Flush a written file, or the entries of a folder, to disk so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Refuse a folder of results that nothing can be written to, before any work; it need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} is read-only; copy the run to a folder that you can write to")


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary file, fsync and rename, so that a reader never sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # about the file, not about the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def read_file(path: Path, *, inside: Path | None = None) -> bytes:
    """Read a regular file of at most 64 MB; never waits for a pipe or a device.

    Raises a FileNotFoundError if there is none, and a DamagedError if it cannot be read or, with ``inside``, if it is a
    link to a file outside this folder.
    """
    try:
        status = path.stat()
        if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
            raise DamagedError(f"{path} cannot be read: a link to a file outside the run folder")
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path} cannot be read: not a file written by Atoll")
        if status.st_size > LARGEST:
            raise DamagedError(f"{path} cannot be read: larger than {LARGEST // 2**20} MB")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, for other programs; what Atoll itself reads again is a record."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def write_record(path: Path, kind: str, tree: Mapping[str, Any]) -> None:
    """Write a mapping with its kind and a checksum, atomically; ``read_record`` reads it."""
    record = {"record": kind, **tree}
    write_json(path, {**record, CHECKSUM: json_digest(record)})


def read_record(path: Path, kind: str, *, inside: Path | None = None, old: bool = False) -> Any:
    """Read a record without its checksum and kind; raises a DamagedError if one of them does not match.

    Args:
        path: the file.
        kind: the expected kind.
        inside: the folder that a link may not lead out of (default: that of the file).
        old: whether to accept files of version 0.1, which have neither checksum nor kind.
    """
    try:
        tree = parse_json(read_file(path, inside=inside or path.parent))
        if not isinstance(tree, dict):
            raise ValueError("expected a mapping")
        checksum = tree.pop(CHECKSUM, None)
        if not (old and checksum is None) and checksum != json_digest(tree):
            raise ValueError("damaged: the checksum does not match")
        if tree.pop("record", kind if old else None) != kind:
            raise ValueError(f"expected the record of {kind}")
        return tree
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None


def append_record(path: Path, record: Mapping[str, Any], salt: str = "") -> None:
    """Append a record as one line of JSON with a short checksum, which also covers ``salt``."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no waiting for a pipe
    with open(os.open(path, flags, 0o666), "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        separator = b"" if file.read(1) in (b"", b"\n") else b"\n"  # a kill may have truncated the last line
        file.write(separator + record_line(record, salt))


def record_line(record: Mapping[str, Any], salt: str = "") -> bytes:
    """Return the line that ``append_record`` writes."""
    return json.dumps({**record, CHECKSUM: _line_checksum(record, salt)}).encode() + b"\n"


def read_records(path: Path, salt: str = "", *, old: bool = False) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Read a file of records; returns them without their checksums, and the lines that are damaged.

    A last line that a kill has truncated does not count as damaged.

    Args:
        path: the file, which need not exist.
        salt: what the checksums also cover, such as the digest of the question that the records answer.
        old: whether to accept lines without a checksum, as in version 0.1.
    """
    try:
        content = read_file(path, inside=path.parent)
    except FileNotFoundError:
        return [], []
    records, damaged = [], []
    for line in content.splitlines(keepends=True):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("expected a mapping")
            checksum = record.pop(CHECKSUM, None)
            if not (old and checksum is None) and checksum != _line_checksum(record, salt):
                raise ValueError("the checksum does not match")
            records.append(record)
        except (ValueError, RecursionError):
            if line.strip() and line.endswith(b"\n"):
                damaged.append(line)
    return records, damaged


def _line_checksum(record: Mapping[str, Any], salt: str) -> str:
    return json_digest([salt, record] if salt else record)[:_SHORT]


def parse_json(content: bytes) -> Any:
    """Parse JSON; raises a ValueError if it is not valid, has a key twice, or is nested too deeply.

    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' occurs twice
    """
    try:
        tree = json.loads(content.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_nesting(tree)
    return tree


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return tree


def check_nesting(tree: Any) -> None:
    """Raise a ValueError for plain data that is nested too deeply or contains itself."""
    level, depth = [tree], 0
    while level:
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = list({id(part): part for inner in parts for part in inner if isinstance(part, dict | list)}.values())
        depth += 1


def json_digest(value: Any) -> str:
    """Return the SHA-256 of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, with None.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
