"""Errors that the user can fix.  Each message is one clear sentence and needs no traceback."""

from __future__ import annotations

import errno
import math
import operator
import re


class AtollError(Exception):
    """Base class of all user errors; the command line prints the message and exits with a non-zero status."""


class InputError(AtollError, ValueError):
    """An argument, image, label or model output is not valid."""


class RecipeError(AtollError):
    """A recipe is invalid; the message lists all errors."""


class DataError(AtollError):
    """A data file is missing, corrupt or truncated, or has the wrong checksum."""


class CheckpointError(AtollError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class CaptureError(AtollError):
    """A model cannot be captured as a graph: it draws random numbers, branches on data or modifies itself."""


class UnsoundError(AtollError):
    """An attack broke a certificate, which is a bug in Atoll; the offending point is saved."""


class TrainingError(AtollError):
    """Training cannot continue (NaN, lost worker, full disk); the last good checkpoint is intact."""


class Interrupted(TrainingError):
    """Training was stopped on request (Ctrl-C or SIGTERM) after saving a checkpoint."""


class DamagedError(AtollError):
    """A file of a run is damaged, or Atoll did not write it."""


class ResultError(AtollError):
    """A stored result is damaged, or this version cannot read it."""


LARGEST_COUNT = 10**9  # more points, steps or probes than this are a mistake
LARGEST_SEED = 2**63 - 1
LARGEST_STEPS = 10**6  # the same for steps of an attack and epochs
LARGEST_SIZE = 2**16  # the same for widths and numbers of layers, which need memory


def check_range(interval: str, /, **values: float | None) -> None:
    """Raise an InputError for numbers outside an interval such as ``[0, 1)`` or ``(0, inf)``; None is allowed.

    NaN is never in an interval.  Infinity is only in one that is closed there, such as ``(0, inf]``.

    >>> check_range("[0, 1)", dropout=1.5)
    Traceback (most recent call last):
    atoll.errors.InputError: dropout: expected a number in [0, 1), got 1.5
    """
    low, high = map(float, interval[1:-1].split(","))
    bounds = [bound for bound, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]"]
    for name, value in values.items():
        if value is None:
            continue
        try:
            number = float("nan" if isinstance(value, str) else value)
        except OverflowError:  # an integer beyond the largest float
            number = math.inf
        except TypeError:
            number = math.nan
        if low < number < high or number in bounds:
            continue
        expected = f"a number in {interval}"
        if not math.isfinite(number) and math.inf not in bounds:
            expected = "a finite number"
        elif high == math.inf:
            expected = f"at least {low:g}" if low in bounds else f"a number > {low:g}"
        raise InputError(f"{name}: expected {expected}, got {shorten(value)}")


def check_count(least: int, most: int = LARGEST_COUNT, /, **values: object) -> None:
    """Raise an InputError for values that are not integers from ``least`` to ``most``; None is allowed.

    >>> check_count(1, draws=2.5)
    Traceback (most recent call last):
    atoll.errors.InputError: draws: expected an integer >= 1, got 2.5
    >>> check_count(1, points=10**20)
    Traceback (most recent call last):
    atoll.errors.InputError: points: expected at most 1,000,000,000, got 100000000000000000000
    """
    for name, value in values.items():
        if value is None:
            continue
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise InputError(f"{name}: expected an integer >= {least}, got {value!r:.100}") from None
        if count < least:
            raise InputError(f"{name}: expected at least {least:,}, got {shorten(count)}")
        if count > most:
            raise InputError(f"{name}: expected at most {most:,}, got {shorten(count)}")


def shorten(value: object) -> str:
    """Return a value as text for an error message.

    >>> shorten(10**5000), shorten([1, 2])
    ('an integer with 5001 digits', '[1, 2]')
    """
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer with {math.floor(math.log10(abs(value))) + 1} digits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# What to do about an error of the operating system.
_ADVICE = {
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM),
        "copy the run to a folder that you can write to, or choose another place for the output",
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and rerun the same command"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) and rerun the same command",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and rerun the same command",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "choose a path that does not lead through a file",
    errno.EISDIR: "choose a file instead of a folder",
    errno.ENOENT: "check the path",
}
_MEMORY = "use a smaller batch size, model or data set, or a machine with more memory"


def describe(error: BaseException) -> str | None:
    """Return one sentence about an error of the system that says what to do; None for all other errors.

    This covers full disks, paths that cannot be used, too little memory (also PyTorch's errors), and files that are not
    text or are nested too deeply.

    >>> describe(OSError(errno.ENOSPC, "No space left on device", "runs/x"))
    'runs/x: No space left on device; free some space and rerun the same command'
    >>> describe(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 36000000000 bytes."))
    'not enough memory for another 36.0 GB; use a smaller batch size, model or data set, or a machine with more memory'
    >>> describe(KeyError("x")) is None
    True
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return f"not enough memory; {_MEMORY}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}{error.strerror or text}" + (f"; {advice}" if advice else "")
    if isinstance(error, RuntimeError) and re.search(r"can('|no)t allocate memory|out of memory|bad alloc", text, re.I):
        size = re.search(r"(?:allocate|mmap) (\d+) bytes", text)
        return f"not enough memory{f' for another {_size(int(size[1]))}' if size else ''}; {_MEMORY}"
    if isinstance(error, UnicodeDecodeError):
        return f"expected a text file in UTF-8, got the byte {error.object[error.start]:#04x} at position {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return f"cannot write {error.object[error.start]!r} in {error.encoding}; set PYTHONUTF8=1 or rename the file"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; use one with fewer levels"
    return None


def _size(count: int) -> str:
    """Return a number of bytes as text.

    >>> _size(36_000_000_000), _size(1_600_000)
    ('36.0 GB', '1.6 MB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 10**9 else f"{count / 1e6:,.1f} MB"
