"""Errors that the user can fix.  Each message is one clear sentence and needs no traceback."""

import math
import operator


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


def check_range(interval: str, /, **values: float | None) -> None:
    """Raise an InputError for numbers outside an interval such as ``[0, 1)`` or ``(0, inf)``; None is allowed.

    >>> check_range("[0, 1)", dropout=1.5)
    Traceback (most recent call last):
    atoll.errors.InputError: dropout: expected a number in [0, 1), got 1.5
    """
    low, high = map(float, interval[1:-1].split(","))
    bounds = [bound for bound, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]"]
    expected = f"a number in {interval}"
    if high == math.inf:
        expected = f"at least {low:g}" if low in bounds else f"a number > {low:g}"
    for name, value in values.items():
        if value is not None and not (low < value < high or value in bounds):
            raise InputError(f"{name}: expected {expected}, got {value}")


def check_count(least: int, /, **values: object) -> None:
    """Raise an InputError for values that are not integers >= ``least``; None is allowed.

    >>> check_count(1, draws=2.5)
    Traceback (most recent call last):
    atoll.errors.InputError: draws: expected an integer >= 1, got 2.5
    """
    for name, value in values.items():
        try:
            valid = value is None or operator.index(value) >= least  # type: ignore[arg-type]
        except TypeError:
            valid = False
        if not valid:
            raise InputError(f"{name}: expected an integer >= {least}, got {value!r}")
