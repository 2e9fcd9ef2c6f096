"""The store of everything a run keeps: atomic writes, records with checksums, and digests.

A record is a JSON object with its kind and a checksum of the rest.  A file of records has one of them per line, so that
other programs can read it as JSON Lines.  Tensors are safetensors with a checksum in their metadata.

Reading checks everything: the file must be regular, small enough, UTF-8 and not nested too deeply, and its checksum
must match.  What fails is a ``DamagedError``; nothing is used unchecked.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import DamagedError, InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

LARGEST = 64 * 2**20  # bytes of a file of text; Atoll writes far smaller ones
DEEPEST = 64  # levels of nested lists and mappings
CHECKSUM = "checksum"  # the key of the checksum in a record
BLANK = "-" * 64  # stands for the checksum of a file of tensors when it is computed
LOCK = ".lock"  # the file that is locked where folders cannot be
STALE = 24 * 3600.0  # seconds after which a temporary file of another machine is removed
_SHORT = 16  # digits of the checksum of a line


def discard(path: Path) -> None:
    """Remove what is in the place of a file, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    if not existing.is_dir():
        raise InputError(f"{existing} is a file, expected a folder; choose another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} is read-only; copy the run to a folder that you can write to")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with all links resolved, is in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


# How files begin that a user may ask for; a command only writes over files of the same kind.
OUTPUTS: Mapping[str, Callable[[bytes], bool]] = {
    "an HTML page": lambda head: head[:15].lower() == b"<!doctype html>",
    "an ONNX file": lambda head: head[:1] == b"\x08",
    "a proof file": lambda head: head[8:9] == b"{" and b'"proof"' in head,
}


def check_output(path: Path, kind: str) -> None:
    """Refuse an output that would replace a folder, a device, a pipe or a file of another kind (``OUTPUTS``).

    Also removes what killed processes have left of the same output.
    """
    remove_stale(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))
    if not path.exists():
        return
    if path.is_dir():
        raise InputError(f"out: expected a file, got the folder {path}")
    if not path.is_file():
        raise InputError(f"out: expected a regular file, got {path}; choose another file")
    with path.open("rb") as file:
        head = file.read(4096)
    if head and not OUTPUTS[kind](head):
        raise InputError(f"out: {path} is not {kind} and would be lost; choose another file or remove it")


def check_links(folder: Path, inside: Path) -> None:
    """Refuse to write to a folder that is or contains a link out of another folder."""
    entries = (Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *(entry for entry in entries if entry.is_symlink())):
        if not is_inside(path, inside):
            raise InputError(f"{path} leads out of {inside}; replace the link by what it points to")


@contextmanager
def open_for_writing(folder: Path, inside: Path) -> Iterator[None]:
    """Lock a folder for this process, check its links, and remove temporary files of processes that are gone.

    The kernel releases the lock when the process ends.  It has no file, except on NFS, which cannot lock folders.  NFS
    and other shared file systems keep out other machines as well, unless they are mounted with local locks or none.  A
    new folder that stays empty is removed.

    Args:
        folder: the folder, which need not exist yet.
        inside: the folder of the run, out of which no link may lead.
    """
    check_links(folder, inside)
    check_writable(folder)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptors: list[int] = []
    try:
        try:
            _lock(folder, os.O_RDONLY | os.O_DIRECTORY, descriptors)
        except BlockingIOError:
            raise InputError(f"{folder} is in use by another process; wait until it has finished") from None
        remove_stale([*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")])
        yield
    finally:
        if _locks.issuperset(descriptors):  # not in a forked process
            with suppress(OSError):  # not empty
                for path in new:
                    path.rmdir()
            _locks.difference_update(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _lock(path: Path, flags: int, descriptors: list[int]) -> None:
    """Lock a folder, or the file ``.lock`` in it if the file system only locks files that are open for writing."""
    descriptors.append(os.open(path, flags, 0o666))
    _locks.add(descriptors[-1])
    try:
        fcntl.flock(descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks if this is the file
        if flags & os.O_DIRECTORY:
            _lock(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, descriptors)


def temporary_path(path: Path) -> Path:
    """Return where this process writes a file or folder before it is complete; ``remove_stale`` knows its name."""
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}.tmp")


def remove_stale(paths: Iterable[Path]) -> None:
    """Remove the temporary files and folders among some paths whose processes are gone.

    Nobody knows the processes of other machines, so what they write must be a day old.
    """
    for path in paths:
        match = re.fullmatch(r"\..+\.(?:([0-9a-f]{8})-)?(\d+)\.tmp", path.name)  # older versions wrote no machine
        if match is None:
            continue
        with suppress(FileNotFoundError):  # its process has finished now
            if not _is_running(int(match[2])) if match[1] == _host() else time.time() - path.lstat().st_mtime > STALE:
                discard(path)


def _host() -> str:
    """Return a short digest of the name of this machine."""
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


_locks: set[int] = set()  # descriptors of locked folders


def _close_locks() -> None:
    """Close the locks in a forked process, which would otherwise keep them when its parent is killed."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def check_no_folder(path: Path) -> None:
    """Raise a DamagedError if there is a folder in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        raise DamagedError(f"{path} is a folder; remove it and rerun the same command")


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary file, fsync and rename, so that a reader never sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_no_folder(path)
    temporary = temporary_path(path)
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


def write_figure(path: Path, figure: Figure, dpi: int = 120) -> None:
    """Write a figure atomically, in the format of the suffix."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=path.suffix.lstrip("."))
    write_atomic(path, content.getvalue())


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """Write an ``.npz`` file atomically."""
    import numpy as np  # slow to import

    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, content.getvalue())


def reserve(path: Path, size: int) -> None:
    """Reserve disk space for a file; otherwise, a full disk would kill the process that writes to its memory map."""
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        file.truncate(size)


def read_file(path: Path, *, inside: Path | None = None) -> bytes:
    """Read a regular file of at most 64 MB; never waits for a pipe or a device.

    Raises a FileNotFoundError if there is none, and a DamagedError if it cannot be read or, with ``inside``, if it is a
    link to a file outside this folder.
    """
    check_file(path, inside=inside)
    try:
        if path.stat().st_size > LARGEST:
            raise DamagedError(f"{path} cannot be read: larger than {LARGEST // 2**20} MB")
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def check_file(path: Path, *, inside: Path | None = None) -> None:
    """Raise a DamagedError for what is not a regular file or, with ``inside``, a link to a file outside a folder.

    Raises a FileNotFoundError if there is nothing.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    if inside is not None and not is_inside(path, inside):
        raise DamagedError(f"{path} cannot be read: a link to a file outside the run folder")
    if not stat.S_ISREG(mode):
        raise DamagedError(f"{path} cannot be read: not a regular file")


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
    except ValueError as error:
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
        except ValueError:
            if line.strip() and line.endswith(b"\n"):
                damaged.append(line)
    return records, damaged


def _line_checksum(record: Mapping[str, Any], salt: str) -> str:
    return json_digest([salt, record] if salt else record)[:_SHORT]


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and plain data with a checksum of both, atomically; ``read_tensors`` reads them."""
    from safetensors.torch import save  # slow to import

    metadata = {"record": kind, "about": json.dumps(about), CHECKSUM: BLANK}
    before, blank, after = save(dict(tensors), metadata).partition(BLANK.encode())
    write_atomic(path, before + hashlib.sha256(before + blank + after).hexdigest().encode() + after)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], Any]:
    """Read tensors and plain data; raises a DamagedError if the checksum or the kind does not match.

    Raises a FileNotFoundError if there is no file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load  # slow to import

    check_file(path, inside=path.parent)
    try:
        content = path.read_bytes()
        metadata = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        checksum = metadata[CHECKSUM]
        if hashlib.sha256(content.replace(checksum.encode(), BLANK.encode(), 1)).hexdigest() != checksum:
            raise ValueError("damaged: the checksum does not match")
        if metadata["record"] != kind:
            raise ValueError(f"expected the record of {kind}")
        return load(content), parse_json(metadata["about"].encode())
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None


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
    level = [tree]
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = list({id(part): part for inner in parts for part in inner if isinstance(part, dict | list)}.values())
        if not level:
            return
    raise ValueError("nested too deeply")


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
    """Return the SHA-256 of a regular file."""
    check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
