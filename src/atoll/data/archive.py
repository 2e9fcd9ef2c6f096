"""Safe unpacking of archives that may be malicious."""

from __future__ import annotations

import functools
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from atoll.errors import DataError, InputError

_CHUNK = 1 << 20
_PADDING = 1 << 24  # limit of the zeros after the last member of a tar file, far more than usual
_HEADER = 512  # minimum size that a member counts for, so that empty members are limited as well
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class _Member:
    """A member of a tar or zip file."""

    name: str
    kind: str  # "file", "folder", "link" or "other"
    size: int
    target: str
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path | str, destination: Path | str, *, limit: int = 1 << 34) -> Path:
    """Unpack a tar (plain or compressed) or zip file into a new folder, either completely or not at all.

    Unpacks into a temporary folder next to ``destination``, which is renamed at the end.  Rejects absolute paths,
    ``..``, links that leave the folder, devices, duplicate names, and archives with more than ``limit`` bytes.  Ignores
    permissions and owners.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with zipfile.ZipFile(Path(folder, "a.zip"), "w") as made:
    ...         made.writestr("x/hello.txt", "hello")
    ...     unpack(Path(folder, "a.zip"), Path(folder, "a")).joinpath("x/hello.txt").read_text()
    'hello'
    """
    archive, destination = Path(archive), Path(destination)
    if destination.exists():
        raise InputError(f"destination: {destination} already exists; delete it to unpack again")
    if not archive.is_file():
        raise DataError(f"{archive}: no such file")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as error:
        raise DataError(f"cannot write to {destination.parent}: {error.strerror}") from None
    try:
        with _members(archive) as members:
            _write(archive, members, folder, limit)
        folder.chmod(0o755)  # temporary folders are private
        os.rename(folder, destination)
    except _BROKEN as error:
        raise DataError(f"{archive}: damaged or truncated: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return destination


def _write(archive: Path, members: Iterator[_Member], folder: Path, limit: int) -> None:
    names: set[str] = set()
    links: dict[str, str] = {}
    total = 0
    for member in members:
        name = _inside(archive, member.name)
        if name == ".":
            continue
        path = folder / name
        total += max(member.size, _HEADER)
        if total > limit:
            raise DataError(f"{archive}: expected at most {limit} bytes of content, got more")
        if name in names or any(str(parent) in links for parent in PurePosixPath(name).parents):
            raise DataError(f"{archive}: expected unique names, got {member.name!r} twice")
        names.add(name)
        if member.kind == "link":
            links[name] = member.target
        elif member.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        elif member.kind == "file":
            _copy(archive, member, path)
        else:
            raise DataError(f"{archive}: expected files, folders and links, got a special file {member.name!r}")
    # Create links last, so that nothing is written through one, and check where they really lead.
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    for name, target in links.items():
        end = Path(os.path.realpath(folder / name))
        if os.path.isabs(target) or not end.is_relative_to(os.path.realpath(folder)) or not end.exists():
            raise DataError(f"{archive}: expected links to members, got {name!r}, which points to {target!r}")


def _inside(archive: Path, name: str) -> str:
    """Return the normalized name; raises a DataError unless it stays inside the folder on every operating system."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or set(name) & set("\\:\0"):
        raise DataError(f"{archive}: expected relative paths without '..', got {name!r}")
    return str(path)


def _copy(archive: Path, member: _Member, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    if source is None:
        raise DataError(f"{archive}: expected content for {member.name!r}, got none")
    left = member.size
    with source, open(path, "xb") as file:
        while chunk := source.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            file.write(chunk)
    if left:
        raise DataError(f"{archive}: expected {member.size} bytes of {member.name!r}, got {member.size - left}")


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield _zip_members(opened)
    else:
        with tarfile.open(archive) as tar:
            yield _tar_members(archive, tar)


def _zip_members(archive: zipfile.ZipFile) -> Iterator[_Member]:
    for info in archive.infolist():
        mode = info.external_attr >> 16  # zero if the archive was not created on Unix
        if info.is_dir():
            kind = "folder"
        elif stat.S_ISLNK(mode):
            kind = "link"
        else:
            kind = "file" if stat.S_IFMT(mode) in (0, stat.S_IFREG) else "other"
        target = archive.read(info).decode() if kind == "link" and info.file_size <= 4096 else ""
        yield _Member(info.filename, kind, info.file_size, target, functools.partial(archive.open, info))


def _tar_members(path: Path, archive: tarfile.TarFile) -> Iterator[_Member]:
    files: dict[str, tarfile.TarInfo] = {}
    for info in archive:
        kind = "folder" if info.isdir() else "link" if info.issym() else "file" if info.isreg() else "other"
        content = info
        if info.islnk():  # a hard link to an earlier member becomes a copy
            if info.linkname not in files:
                raise DataError(f"{path}: expected links to members, got {info.name!r}, a link to {info.linkname!r}")
            kind, content = "file", files[info.linkname]
        if kind == "file":
            files[info.name] = content
        opener = functools.partial(archive.extractfile, content)
        yield _Member(info.name, kind, content.size, info.linkname, opener)
    # The reader mistakes a damaged header for the end, but only a few zeros follow the real end.  Reading them also
    # verifies the checksum of a compressed archive.
    rest = archive.fileobj.read(_PADDING) if archive.fileobj is not None else b""
    if rest.strip(b"\0") or len(rest) == _PADDING:
        raise DataError(f"{path}: damaged or truncated: invalid header")
