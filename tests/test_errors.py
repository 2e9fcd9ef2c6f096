"""Errors of the system as one sentence, and ranges of numbers."""

import errno
import math
import os

import numpy as np
import pytest
import torch

from atoll.cli import main
from atoll.errors import InputError, check_count, check_range, describe, shorten

MEMORY = "use a smaller batch size, model or data set, or a machine with more memory"


def decoding_error():
    try:
        b"D\xe9gits".decode()
    except UnicodeDecodeError as error:
        return error


def encoding_error():
    try:
        "\udce9.png".encode()
    except UnicodeEncodeError as error:
        return error


def allocation_error():
    try:
        torch.empty(2**58, dtype=torch.uint8)
    except RuntimeError as error:
        return error


def system_error(number, file=None):
    return OSError(number, os.strerror(number), file)


SENTENCES = {
    "full disk": (system_error(errno.ENOSPC, "x"), "x: No space left on device; free some space and rerun"),
    "quota": (system_error(errno.EDQUOT), "free some space and rerun the same command"),
    "read-only": (system_error(errno.EROFS, "x"), "x: Read-only file system; copy the run to a folder"),
    "no permission": (system_error(errno.EACCES, "x"), "x: Permission denied; copy the run to a folder"),
    "long name": (system_error(errno.ENAMETOOLONG, "x"), "x: File name too long; choose a shorter path"),
    "through a file": (system_error(errno.ENOTDIR, "x/y"), "x/y: Not a directory; choose a path that does not lead"),
    "a folder": (system_error(errno.EISDIR, "x"), "x: Is a directory; choose a file instead of a folder"),
    "large file": (system_error(errno.EFBIG), "File too large; raise the limit on the size of files"),
    "open files": (system_error(errno.EMFILE), "raise the limit on open files"),
    "other": (system_error(errno.EIO, "x"), "x: Input/output error"),
    "no number": (OSError("no luck"), "no luck"),
    "memory": (MemoryError(), f"not enough memory; {MEMORY}"),
    "memory of a process": (system_error(errno.ENOMEM), f"not enough memory; {MEMORY}"),
    "memory of PyTorch": (allocation_error(), f"not enough memory for another 288,230,376.2 GB; {MEMORY}"),
    "memory of a GPU": (torch.OutOfMemoryError("CUDA out of memory."), f"not enough memory; {MEMORY}"),
    "memory for weights": (
        RuntimeError("unable to mmap 38871120 bytes from file <x>: Cannot allocate memory (12)"),
        "not enough memory for another 38.9 MB",
    ),
    "not UTF-8": (decoding_error(), "expected a text file in UTF-8, got the byte 0xe9 at position 1"),
    "not printable": (encoding_error(), "cannot write '\\udce9' in utf-8; set PYTHONUTF8=1 or rename the file"),
    "nested": (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_errors_of_the_system_are_one_sentence(case, monkeypatch, capsys):
    error, sentence = SENTENCES[case]
    text = describe(error)
    assert sentence in text
    assert "\n" not in text

    def fail(options):
        raise error

    monkeypatch.setattr("atoll.cli.ls.run", fail)
    assert main(["ls"]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
    with pytest.raises(type(error)):
        main(["ls", "--debug"])


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), RuntimeError("x"), AssertionError()])
def test_other_errors_are_bugs_and_keep_their_traceback(error, monkeypatch):
    def fail(options):
        raise error

    assert describe(error) is None
    monkeypatch.setattr("atoll.cli.ls.run", fail)
    with pytest.raises(type(error)):
        main(["ls"])


@pytest.mark.parametrize(
    ("interval", "value", "expected"),
    [
        ("[0, 1)", 0, None),
        ("[0, 1)", np.float32(0.5), None),
        ("[0, 1)", torch.tensor(0.5), None),
        ("[0, 1)", None, None),
        ("(0, inf]", math.inf, None),
        ("[0, 1)", 1, "a number in [0, 1), got 1"),
        ("(0, 1)", 0.0, "a number in (0, 1), got 0.0"),
        ("[0, inf)", -1, "at least 0, got -1"),
        ("(0, inf)", 0, "a number > 0, got 0"),
        ("[0, inf)", math.inf, "a finite number, got inf"),
        ("[0, inf)", math.nan, "a finite number, got nan"),
        ("(0, inf]", math.nan, "a number > 0, got nan"),
        ("[0, inf)", 10**400, "a finite number, got an integer with 401 digits"),
        ("[0, inf)", "1", "a finite number, got '1'"),
        ("[0, inf)", {}, "a finite number, got {}"),
    ],
)
def test_ranges(interval, value, expected):
    if expected is None:
        check_range(interval, x=value)
        return
    with pytest.raises(InputError) as raised:
        check_range(interval, x=value)
    assert str(raised.value) == f"x: expected {expected}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, None),
        (np.int64(9), None),
        (None, None),
        (0, "at least 1, got 0"),
        (11, "at most 10, got 11"),
        (10**4000, "at most 10, got an integer with 4001 digits"),
        (2.0, "an integer >= 1, got 2.0"),
        ("2", "an integer >= 1, got '2'"),
        (math.nan, "an integer >= 1, got nan"),
    ],
)
def test_counts(value, expected):
    if expected is None:
        check_count(1, 10, n=value)
        return
    with pytest.raises(InputError) as raised:
        check_count(1, 10, n=value)
    assert str(raised.value) == f"n: expected {expected}"


def test_long_values_are_shortened():
    assert len(shorten("x" * 10**6)) < 110
