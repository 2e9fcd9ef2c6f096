"""Files are complete or absent, and nothing damaged is used."""

import errno
import fcntl
import json
import math
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.errors import DamagedError, InputError
from atoll.files import (
    LARGEST,
    LOCK,
    STALE,
    append_record,
    check_nesting,
    check_output,
    check_writable,
    is_inside,
    open_for_writing,
    read_file,
    read_record,
    read_records,
    read_tensors,
    remove_stale,
    reserve,
    temporary_path,
    write_atomic,
    write_record,
    write_tensors,
)


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


def test_a_record_is_read_as_it_was_written(tmp_path):
    path, tree = tmp_path / "one.json", {"a": [1.5, math.inf], "b": {"c": "é"}}
    write_record(path, "a test", tree)
    assert read_record(path, "a test") == tree
    with pytest.raises(DamagedError, match=r"one\.json cannot be read: expected the record of a cell"):
        read_record(path, "a cell")


def test_every_flipped_bit_of_a_record_is_noticed(tmp_path):
    path, tree = tmp_path / "one.json", {"a": 1, "b": "x"}
    write_record(path, "a test", tree)
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            try:
                assert read_record(path, "a test") == tree  # white space, or the case of a digit escape
            except DamagedError:
                continue
    for end in range(len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(DamagedError):
            read_record(path, "a test")


WRONG = {
    "a list": (b"[1]", "expected a mapping"),
    "no text": (b'{"a": "\xff"}', "can't decode byte"),
    "nothing": (b"", "Expecting value"),
    "deep": (b"[" * 10**5, "nested too deeply"),
    "deep mapping": (b'{"a":' * 80 + b"1" + b"}" * 80, "nested too deeply"),
    "twice": (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    "no checksum": (b'{"record": "a test"}', "the checksum does not match"),
    "wrong checksum": (b'{"record": "a test", "checksum": [1]}', "the checksum does not match"),
    "huge number": (b'{"a": ' + b"9" * 10**5 + b"}", "4300 digits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_a_record_is_one_sentence(tmp_path, name):
    content, message = WRONG[name]
    (tmp_path / "one.json").write_bytes(content)
    with pytest.raises(DamagedError, match=rf"^\S+one\.json cannot be read: .*{re.escape(message)}"):
        read_record(tmp_path / "one.json", "a test")


def test_what_is_not_a_file_is_not_read(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside.json"
    inside.mkdir()
    write_record(outside, "a test", {})
    os.mkfifo(inside / "pipe")
    (inside / "link").symlink_to(outside)
    (inside / "zero").symlink_to("/dev/zero")
    with (inside / "large").open("wb") as file:
        file.truncate(LARGEST + 1)
    for name, message in (
        ("pipe", "not a regular file"),
        ("link", "outside the run"),
        ("zero", "outside the run"),
        ("large", "larger than 64 MB"),
    ):
        with pytest.raises(DamagedError, match=message):
            read_record(inside / name, "a test")
    with pytest.raises(DamagedError, match="not a regular file"):
        read_file(inside / "zero")
    with pytest.raises(DamagedError, match="not a regular file"):
        read_file(inside)
    with pytest.raises(FileNotFoundError):
        read_record(inside / "none", "a test")


def test_records_are_lines_of_json(tmp_path):
    path = tmp_path / "records.jsonl"
    records = [{"n": n, "x": n / 3} for n in range(3)]
    for record in records:
        append_record(path, record)
    assert read_records(path) == (records, [])
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert read_records(tmp_path / "none") == ([], [])


def test_a_truncated_last_line_is_dropped_and_a_damaged_line_is_not(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"n": 1})
    append_record(path, {"n": 2})
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert read_records(path) == ([{"n": 1}], [])
    append_record(path, {"n": 3})
    records, damaged = read_records(path)
    assert (records, len(damaged)) == ([{"n": 1}, {"n": 3}], 1)
    path.write_bytes(whole.replace(b'"n": 1', b'"n": 7'))
    assert read_records(path) == ([{"n": 2}], [whole.replace(b'"n": 1', b'"n": 7').splitlines(keepends=True)[0]])


def test_records_of_another_question_are_damaged(tmp_path):
    append_record(tmp_path / "records.jsonl", {"n": 1}, "one question")
    assert read_records(tmp_path / "records.jsonl", "one question") == ([{"n": 1}], [])
    for salt in ("", "another"):
        assert read_records(tmp_path / "records.jsonl", salt)[0] == []


def test_nothing_is_appended_to_a_link_or_a_pipe(tmp_path):
    (tmp_path / "target").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            append_record(tmp_path / name, {"n": 1})
    assert (tmp_path / "target").read_text() == ""


def test_nesting_that_contains_itself_is_refused():
    tree: list = []
    tree.append(tree)
    with pytest.raises(ValueError, match="nested too deeply"):
        check_nesting(tree)


def locked(folder):
    """Whether another process finds a folder locked."""
    code = f"import fcntl, os; fcntl.flock(os.open({str(folder)!r}, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0


def test_a_folder_has_one_writer(tmp_path):
    folder = tmp_path / "run" / "results"
    with open_for_writing(folder, tmp_path / "run"):
        assert locked(folder)
        with pytest.raises(InputError, match="in use by another process; wait"), open_for_writing(folder, tmp_path):
            pass
        assert locked(folder)
        (folder / "a").write_text("")
    assert not locked(folder)
    with open_for_writing(folder, tmp_path / "run"):
        assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    ready, end = os.pipe(), os.pipe()
    with open_for_writing(tmp_path / "run", tmp_path):
        child = os.fork()
        if not child:
            os.write(ready[1], b"x")
            os.read(end[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        (tmp_path / "run" / "a").write_text("")
        assert locked(tmp_path / "run")
    assert not locked(tmp_path / "run")
    os.write(end[1], b"x")
    os.waitpid(child, 0)


def test_a_new_folder_that_stays_empty_is_removed(tmp_path):
    with open_for_writing(tmp_path / "a" / "b" / "c", tmp_path):
        assert (tmp_path / "a" / "b" / "c").is_dir()
    assert not list(tmp_path.iterdir())


def temporary_of(path, monkeypatch, process=None, machine=None):
    """What another process, or another machine, calls its temporary file."""
    with monkeypatch.context() as patch:
        if process is not None:
            patch.setattr(os, "getpid", lambda: process)
        if machine is not None:
            patch.setattr(os, "uname", lambda: SimpleNamespace(nodename=machine))
        return temporary_path(path)


@pytest.fixture
def dead():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_temporary_files_of_dead_processes_are_removed(tmp_path, monkeypatch, dead):
    checkpoint = temporary_of(tmp_path / "checkpoints" / "00000004", monkeypatch, dead)
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text("")
    gone = temporary_of(tmp_path / "index.json", monkeypatch, dead)
    own = [temporary_path(tmp_path / "index.json").name, ".mine.tmp", ".1.tmp", "x.tmp"]
    for path in (gone, *(tmp_path / name for name in own)):
        path.write_text("")
    with open_for_writing(tmp_path, tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", *own}
    assert not list((tmp_path / "checkpoints").iterdir())


def test_temporary_files_of_other_machines_are_removed_after_a_day(tmp_path, monkeypatch, dead):
    """Another machine may run a process with the same number."""
    other = temporary_of(tmp_path / "result.json", monkeypatch, dead, machine="other")
    unknown = tmp_path / f".result.json.{dead}.tmp"  # of an older version
    assert other.name != temporary_of(tmp_path / "result.json", monkeypatch, dead).name
    for path in (other, unknown):
        path.write_text("")
    remove_stale(tmp_path.iterdir())
    assert set(tmp_path.iterdir()) == {other, unknown}
    for path in (other, unknown):
        os.utime(path, (0, time.time() - STALE - 60))
    remove_stale(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_folder_on_nfs_has_one_writer(tmp_path, monkeypatch):
    """NFS refuses to lock a folder, but locks a file that is open for writing."""
    flock = fcntl.flock

    def flock_of_nfs(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    folder = tmp_path / "run"
    for _ in range(2):
        with open_for_writing(folder, folder):
            with pytest.raises(InputError, match="in use by another process"), open_for_writing(folder, folder):
                pass
            with pytest.raises(InputError, match="in use by another process"), open_for_writing(folder, folder):
                pass
            assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_file_system_without_locks_has_no_lock(tmp_path, monkeypatch):
    def no_flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with open_for_writing(tmp_path, tmp_path), open_for_writing(tmp_path, tmp_path):
        pass


@pytest.mark.parametrize("name", ["results", "results/attack", "results/attack/1/points"])
def test_nothing_is_written_through_a_link_out_of_the_run(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    with pytest.raises(InputError, match="leads out of"), open_for_writing(run / "results/attack/1", run):
        pass
    with pytest.raises(InputError, match="leads out of"), open_for_writing(run, run):
        pass
    assert not list(outside.iterdir())
    (run / name).unlink()
    (run / "inner").mkdir()
    (run / name).symlink_to(run / "inner")
    (tmp_path / "alias").symlink_to(run)
    with open_for_writing(tmp_path / "alias" / "results/attack/1", tmp_path / "alias"):
        pass


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").symlink_to(tmp_path / "run" / "b")
    (tmp_path / "run" / "b").symlink_to(tmp_path / "run" / "a")
    with pytest.raises(DamagedError, match="cannot be read"):
        read_file(tmp_path / "run" / "a")
    assert is_inside(tmp_path / "run" / "a", tmp_path / "run")


def test_reserved_space_is_allocated(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    reserve(tmp_path / "a", 100_000)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 100_000
    assert (tmp_path / "a").read_bytes() == b"abc" + bytes(99_997)


def test_tensors_are_read_as_they_were_written(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])}
    write_tensors(tmp_path / "x", "a test", tensors, {"n": [1, None]})
    read, about = read_tensors(tmp_path / "x", "a test")
    assert about == {"n": [1, None]}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with pytest.raises(DamagedError, match="expected the record of a cell"):
        read_tensors(tmp_path / "x", "a cell")
    content = (tmp_path / "x").read_bytes()
    for place in range(len(content)):
        (tmp_path / "x").write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
        with pytest.raises(DamagedError):
            read_tensors(tmp_path / "x", "a test")


HEADS = {"an HTML page": b"<!doctype html>x", "an ONNX file": b"\x08\x08", "a proof file": b'........{"a":{"proof":'}


@pytest.mark.parametrize("kind", HEADS)
def test_only_files_of_the_same_kind_are_replaced(tmp_path, kind):
    check_output(tmp_path / "none", kind)
    for content in (b"", HEADS[kind]):
        (tmp_path / "file").write_bytes(content)
        check_output(tmp_path / "file", kind)
    for content in (b"# sha256: 0\ndata: Digits", b"{}", b"\0", *(set(HEADS.values()) - {HEADS[kind]})):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(InputError, match=f"is not {kind} and would be lost"):
            check_output(tmp_path / "file", kind)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(InputError, match="expected a regular file"):
            check_output(path, kind)
    with pytest.raises(InputError, match="got the folder"):
        check_output(tmp_path, kind)
