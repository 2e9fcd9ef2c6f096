"""Fetching published files: checksummed, resumable, and never half there."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import requests
from filelock import FileLock
from urllib3.exceptions import HTTPError

from atoll.errors import DataError

with warnings.catch_warnings():  # in notebooks without ipywidgets, pooch's import of tqdm would print a warning
    warnings.simplefilter("ignore")
    import pooch  # type: ignore[import-untyped]

Progress = Callable[[str, int, "int | None"], None]
"""Called with the file's name, the bytes so far, and their total if the server sends it."""

_CHUNK = 1 << 18
_TIMEOUT = (10, 60)  # seconds to connect, and between two chunks
_FAILURES = (requests.RequestException, HTTPError)


@dataclass(frozen=True)
class Remote:
    """A published file: its name, its checksum, and its URLs, best one first."""

    name: str
    md5: str
    urls: tuple[str, ...]


def folders(dataset: str, root: Path | None) -> tuple[Path, ...]:
    """Where the files of a data set are looked for; new ones go into the first.

    >>> [folder.as_posix() for folder in folders("mnist", Path("files"))]
    ['files/mnist', 'files']
    """
    # A folder per data set, because MNIST and its successors share their file names.
    return (Path(pooch.os_cache("atoll")) / dataset,) if root is None else (root / dataset, root)


def find(names: Iterable[str], places: Sequence[Path]) -> Path | None:
    """The first of the names that exists, in the first of the places that has one."""
    names = tuple(names)
    return next((place / name for place in places for name in names if (place / name).exists()), None)


def verify(path: Path, md5: str) -> Path:
    """The path itself, if the file has the checksum."""
    try:
        got = pooch.file_hash(str(path), alg="md5")
    except OSError as error:  # a folder, or not for us to read
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if got != md5:
        raise DataError(
            f"{path}: expected md5 {md5}, got {got}: the file is damaged or another one; delete it to fetch it anew"
        )
    return path


def obtain(remote: Remote, places: Sequence[Path], *, download: bool = True, progress: Progress | None = None) -> Path:
    """The path of a file with the right checksum, fetched into the first place if it is nowhere yet.

    A file that is there with a wrong checksum is an error: it is neither used nor replaced.

    >>> obtain(Remote("images.gz", "0" * 32, ()), [Path("files")], download=False)
    Traceback (most recent call last):
    atoll.errors.DataError: images.gz is missing: put it into files, or allow its download
    """
    if path := find([remote.name], places):
        return verify(path, remote.md5)
    if not download:
        raise DataError(f"{remote.name} is missing: put it into {places[0]}, or allow its download")
    target = places[0] / remote.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Of several processes that want the file, one fetches it and the others find it there.
        with FileLock(target.with_name(f".{target.name}.lock")):
            return verify(target, remote.md5) if target.exists() else _fetch(remote, target, progress)
    except OSError as error:  # no permission, disk full
        raise DataError(f"cannot write {target}: {error.strerror or error}") from None


def _fetch(remote: Remote, target: Path, progress: Progress | None) -> Path:
    faults = []
    for url in remote.urls:
        downloader = Resume(target.with_name(target.name + ".part"), progress)
        # A part left by a different file spoils the sum once; without it the second try is a fresh start.
        for _ in range(2):
            try:
                with _quiet(pooch.get_logger()):
                    pooch.retrieve(url, f"md5:{remote.md5}", target.name, target.parent, downloader=downloader)
                return target
            except _FAILURES as error:
                faults.append(f"{url}: {_reason(error)}")
                break
            except ValueError:  # what pooch raises for a wrong checksum
                faults.append(f"{url}: wrong checksum")
                if not downloader.resumed:
                    break
    raise DataError(
        f"cannot download {remote.name} ({'; '.join(faults)}): get it from {remote.urls[0]}"
        f" by other means and put it into {target.parent}"
    )


@dataclass
class Resume:
    """A downloader for pooch that writes to a ``.part`` file and resumes from there.

    A lost connection is tried again.  The part is handed over only when it is complete; pooch then compares the
    checksum and renames it into place.
    """

    part: Path  # the bytes so far; may be there from an earlier run
    progress: Progress | None = None
    _: KW_ONLY
    attempts: int = 3  # how often in a row a connection may fail without a new byte
    pause: float = 0.25  # seconds before the second attempt, doubled for each further one
    resumed: bool = field(default=False, init=False)

    def __call__(self, url: str, output_file: Any, pooch: Any = None, **_: object) -> None:
        """Download ``url`` to ``output_file``, the way pooch calls it."""
        self.resumed = False
        failed, best = 0, 0
        while True:
            try:
                self._continue(url)
                break
            except _FAILURES as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                refused = status is not None and status < 500 and status != 429
                # Only more bytes than ever before count as progress: a server without ranges starts over.
                size = self._size()
                failed, best = (0, size) if size > best else (failed + 1, best)
                if refused or failed >= self.attempts:
                    raise
                time.sleep(self.pause * 2**failed)
        os.replace(self.part, output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _continue(self, url: str) -> None:
        start = self._size()
        # Compression on the way would make positions and checksums those of another file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            span = response.headers.get("Content-Range", "")
            if response.status_code == 416:  # nothing after `start`: the part is complete, or not of this file
                if span == f"bytes */{start}":
                    self.resumed = True
                    return
                self.part.unlink()
                raise requests.ConnectionError(f"the server does not know the range from byte {start}")
            response.raise_for_status()
            going_on = response.status_code == 206 and span.startswith(f"bytes {start}-")
            if response.status_code == 206 and not going_on:
                self.part.unlink(missing_ok=True)
                raise requests.ConnectionError(f"the server sent {span or 'an unnamed range'} instead of {start}-")
            self.resumed |= going_on
            done = start if going_on else 0
            length = response.headers.get("Content-Length", "")
            total = done + int(length) if length.isdigit() else None
            with open(self.part, "ab" if going_on else "wb") as file:
                for chunk in response.raw.stream(_CHUNK, decode_content=False):
                    file.write(chunk)
                    done += len(chunk)
                    if self.progress is not None:
                        self.progress(self.part.name.removesuffix(".part"), done, total)
                file.flush()
                os.fsync(file.fileno())
            if total is not None and done != total:
                raise requests.ConnectionError(f"the connection ended after {done} of {total} bytes")


def _reason(error: Exception) -> str:
    """A short reason for a connection error; the libraries nest them five deep."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    return error.args[0] if error.args and isinstance(error.args[0], str) else "no connection"


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Pooch announces each download on standard error; the progress callback replaces that."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
