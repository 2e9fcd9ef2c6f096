"""Downloads of published files, with checksums and resume; a file is complete or absent."""

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
"""Called with the name of the file, the bytes so far, and the total if the server sends it."""

_CHUNK = 1 << 18
_TIMEOUT = (10, 60)  # seconds to connect, and between chunks
_FAILURES = (requests.RequestException, HTTPError)


@dataclass(frozen=True)
class Remote:
    """A published file: name, checksum, and URLs in order of preference."""

    name: str
    md5: str
    urls: tuple[str, ...]


def folders(dataset: str, root: Path | None) -> tuple[Path, ...]:
    """Return the folders to search for the files of a data set; downloads go to the first.

    >>> [folder.as_posix() for folder in folders("mnist", Path("files"))]
    ['files/mnist', 'files']
    """
    # One folder per data set, because MNIST, Fashion-MNIST and KMNIST use the same file names.
    return (Path(pooch.os_cache("atoll")) / dataset,) if root is None else (root / dataset, root)


def find(names: Iterable[str], places: Sequence[Path]) -> Path | None:
    """Return the first existing file with one of the names, searching the places in order, or None."""
    names = tuple(names)
    return next((place / name for place in places for name in names if (place / name).exists()), None)


def verify(path: Path, md5: str) -> Path:
    """Return the path if the file has the checksum; raises a DataError otherwise."""
    try:
        got = pooch.file_hash(str(path), alg="md5")
    except OSError as error:  # a folder, or no permission
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if got != md5:
        raise DataError(
            f"{path}: expected md5 {md5}, got {got}; the file is damaged or a different version, delete it to download"
            " it again"
        )
    return path


def obtain(remote: Remote, places: Sequence[Path], *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return the path of a file with the right checksum, and download it to the first place if it is missing.

    An existing file with a wrong checksum is an error; it is neither used nor replaced.

    >>> obtain(Remote("images.gz", "0" * 32, ()), [Path("files")], download=False)
    Traceback (most recent call last):
    atoll.errors.DataError: images.gz is missing; put it into files or allow the download
    """
    if path := find([remote.name], places):
        return verify(path, remote.md5)
    if not download:
        raise DataError(f"{remote.name} is missing; put it into {places[0]} or allow the download")
    target = places[0] / remote.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # If several processes need the file, one downloads it and the others wait.
        with FileLock(target.with_name(f".{target.name}.lock")):
            return verify(target, remote.md5) if target.exists() else _fetch(remote, target, progress)
    except OSError as error:  # no permission, disk full
        raise DataError(f"cannot write {target}: {error.strerror or error}") from None


def _fetch(remote: Remote, target: Path, progress: Progress | None) -> Path:
    faults = []
    for url in remote.urls:
        downloader = Resume(target.with_name(target.name + ".part"), progress)
        # A partial download of a different file makes the checksum fail once; the second try starts from scratch.
        for _ in range(2):
            try:
                with _quiet(pooch.get_logger()):
                    pooch.retrieve(url, f"md5:{remote.md5}", target.name, target.parent, downloader=downloader)
                return target
            except _FAILURES as error:
                faults.append(f"{url}: {_reason(error)}")
                break
            except ValueError:  # pooch raises it for a wrong checksum
                faults.append(f"{url}: wrong checksum")
                if not downloader.resumed:
                    break
    raise DataError(
        f"cannot download {remote.name} ({'; '.join(faults)}); download {remote.urls[0]} manually and put it into"
        f" {target.parent}"
    )


@dataclass
class Resume:
    """A downloader for pooch that writes to a ``.part`` file and resumes from it.

    Lost connections are retried.  Only a complete file is passed to pooch, which then verifies the checksum and renames
    the file.
    """

    part: Path  # the bytes so far; may exist from an earlier run
    progress: Progress | None = None
    _: KW_ONLY
    attempts: int = 3  # number of consecutive failures without new bytes before giving up
    pause: float = 0.25  # seconds before the second attempt, doubled for each further attempt
    resumed: bool = field(default=False, init=False)

    def __call__(self, url: str, output_file: Any, pooch: Any = None, **_: object) -> None:
        """Download ``url`` to ``output_file``; called by pooch."""
        self.resumed = False
        failed, best = 0, 0
        while True:
            try:
                self._continue(url)
                break
            except _FAILURES as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                refused = status is not None and status < 500 and status != 429
                # Only more bytes than before count as progress, because a server without ranges starts over.
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
        # Compressed transfer would change byte positions and the checksum.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            span = response.headers.get("Content-Range", "")
            if response.status_code == 416:  # no bytes after `start`: the part is complete, or from a different file
                if span == f"bytes */{start}":
                    self.resumed = True
                    return
                self.part.unlink()
                raise requests.ConnectionError(f"the server rejected the range from byte {start}")
            response.raise_for_status()
            resuming = response.status_code == 206 and span.startswith(f"bytes {start}-")
            if response.status_code == 206 and not resuming:
                self.part.unlink(missing_ok=True)
                raise requests.ConnectionError(f"the server sent {span or 'an unnamed range'} instead of {start}-")
            self.resumed |= resuming
            done = start if resuming else 0
            length = response.headers.get("Content-Length", "")
            total = done + int(length) if length.isdigit() else None
            with open(self.part, "ab" if resuming else "wb") as file:
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
    """Return a short reason for a connection error, which the libraries wrap several times."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    return error.args[0] if error.args and isinstance(error.args[0], str) else "no connection"


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence pooch's messages about downloads, which the progress callback replaces."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
