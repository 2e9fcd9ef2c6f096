"""Atomic file writes (a file is complete or absent) and digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from atoll.errors import InputError


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


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


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
