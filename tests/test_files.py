"""Files are complete or absent."""

import errno
import os
from pathlib import Path

import pytest

from atoll.errors import InputError
from atoll.files import check_writable, write_atomic


def test_an_error_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    file.write_text("old")

    def replace(path, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_atomic(file, b"new")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert file.read_text() == "old"


def test_a_folder_is_checked_without_touching_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_writable(tmp_path / "not" / "there")
    check_writable(Path("runs/x/results"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=f"{tmp_path} is read-only; copy the run"):
        check_writable(tmp_path / "not" / "there")
