"""Files are complete or absent, and nothing damaged is used."""

import errno
import fcntl
import hashlib
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

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image

from atoll import files
from atoll.errors import DamagedError, InputError
from atoll.files import (
    LARGEST,
    LOCK,
    append_record,
    check_nesting,
    check_output,
    check_writable,
    discard,
    is_inside,
    json_digest,
    open_for_writing,
    read_file,
    read_record,
    read_records,
    read_tensors,
    remove_stale,
    reserve,
    sha256,
    temporary_path,
    write_arrays,
    write_atomic,
    write_figure,
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
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"{tmp_path}/file is a file, expected a folder"):
        check_writable(tmp_path / "file" / "results")
    for right in (os.W_OK, os.X_OK):  # a folder whose user lacks one of the rights
        monkeypatch.setattr(os, "access", lambda path, mode, right=right: not mode & right)
        with pytest.raises(InputError, match=f"{tmp_path} is read-only; copy the run"):
            check_writable(tmp_path / "not" / "there")


def test_content_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append("folder" if is_folder(file) else "file") or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda path, target: events.append("rename") or replace(path, target))
    write_atomic(tmp_path / "new" / "folder" / "a", b"content")
    write_atomic(tmp_path / "new" / "folder" / "a", b"other")
    assert events == ["file", "rename", "folder"] * 2
    assert (tmp_path / "new" / "folder" / "a").read_bytes() == b"other"


def is_folder(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def test_a_file_replaces_a_link_and_never_a_folder(tmp_path):
    for name in ("folder", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(DamagedError, match=r"/folder is a folder; remove it and rerun"):
        write_atomic(tmp_path / "folder", b"")
    write_atomic(tmp_path / "link", b"content")
    assert not (tmp_path / "link").is_symlink()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "link"]


def test_whatever_is_in_the_place_of_a_file_is_discarded(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for name in ("folder", "link", "broken", "file", "nothing"):
        discard(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.pictures
def test_figures_have_120_dots_per_inch_and_the_format_of_their_name(tmp_path):
    figure = plt.figure(figsize=(2, 1))
    write_figure(tmp_path / "a.png", figure)
    write_figure(tmp_path / "b.png", figure, dpi=50)
    write_figure(tmp_path / "c.svg", figure)
    plt.close(figure)
    assert [Image.open(tmp_path / name).size for name in ("a.png", "b.png")] == [(240, 120), (100, 50)]
    assert "<svg" in (tmp_path / "c.svg").read_text()


def test_arrays_are_read_by_numpy(tmp_path):
    write_arrays(tmp_path / "a.npz", x=np.arange(3), y=np.array("name"))
    with np.load(tmp_path / "a.npz") as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {"x": [0, 1, 2], "y": "name"}


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_digests_do_not_depend_on_the_order_of_keys(tmp_path):
    assert json_digest({"b": [1, {"d": 2, "c": 3}], "a": "x"}) == sha('{"a": "x", "b": [1, {"c": 3, "d": 2}]}')
    (tmp_path / "a").write_text("abc")
    assert sha256(tmp_path / "a") == sha("abc")


def test_files_have_the_bytes_of_earlier_versions(tmp_path):
    """Otherwise this version could not read the runs of the last one, or the other way around."""
    write_record(tmp_path / "a.json", "a test", {"n": 1})
    checksum = sha('{"n": 1, "record": "a test"}')
    assert (tmp_path / "a.json").read_text() == (
        f'{{\n  "record": "a test",\n  "n": 1,\n  "checksum": "{checksum}"\n}}\n'
    )
    append_record(tmp_path / "a.jsonl", {"n": 1})
    append_record(tmp_path / "a.jsonl", {"n": 2}, "salt")
    assert (tmp_path / "a.jsonl").read_text().splitlines() == [
        f'{{"n": 1, "checksum": "{sha(text)[:16]}"}}'.replace("1", number, 1)
        for number, text in (("1", '{"n": 1}'), ("2", '["salt", {"n": 2}]'))
    ]
    write_tensors(tmp_path / "a.safetensors", "a test", {"x": torch.zeros(1)}, {})
    content = (tmp_path / "a.safetensors").read_bytes()
    (checksum,) = re.findall(rb"[0-9a-f]{64}", content)
    assert checksum.decode() == hashlib.sha256(content.replace(checksum, b"-" * 64)).hexdigest()


def test_only_readers_of_version_0_1_accept_records_without_checksum(tmp_path):
    path, lines = tmp_path / "one.json", tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}')
    lines.write_text('{"a": 1}\n')
    assert read_record(path, "a test", old=True) == {"a": 1}
    assert read_records(lines, old=True) == ([{"a": 1}], [])
    assert read_records(lines) == ([], [b'{"a": 1}\n'])
    for content, old, message in (
        ({"a": 1}, False, "the checksum does not match"),
        ({"a": 1, "checksum": sha('{"a": 2}')}, True, "the checksum does not match"),
        ({"a": 1, "checksum": sha('{"a": 1}')}, False, "expected the record of a test"),  # of no kind
        ({"a": 1, "record": "a cell"}, True, "expected the record of a test"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(DamagedError, match=message):
            read_record(path, "a test", old=old)
    lines.write_text('{"a": 1, "checksum": "0000000000000000"}\n')
    assert read_records(lines, old=True)[0] == []


def test_the_size_of_a_text_is_limited_to_64_mb(tmp_path):
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 64 * 2**20)
    assert len(read_file(tmp_path / "a")) == 67_108_864
    os.truncate(tmp_path / "a", 64 * 2**20 + 1)
    with pytest.raises(DamagedError, match="larger than 64 MB"):
        read_file(tmp_path / "a")


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    write_tensors(tmp_path / "a", "a test", {"x": torch.zeros(1)}, {})
    monkeypatch.setattr(Path, "read_bytes", broken)
    for read in (read_file, lambda path: read_tensors(path, "a test")):
        with pytest.raises(DamagedError, match=f"^{tmp_path}/a cannot be read: Input/output error$"):
            read(tmp_path / "a")


def test_a_record_is_read_as_it_was_written(tmp_path):
    path, tree = tmp_path / "one.json", {"a": [1.5, math.inf], "b": {"c": "é"}}
    write_record(path, "a test", tree)
    assert read_record(path, "a test") == tree
    for kind in ("a cell", "a tree"):
        with pytest.raises(DamagedError, match=rf"one\.json cannot be read: expected the record of {kind}"):
            read_record(path, kind)


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
    "twice": (b'{"b": 0, "a": 1, "c": 0, "a": 2}', "the key 'a' occurs twice"),
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


def test_a_record_can_follow_a_line_truncated_anywhere(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"n": 1})
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        append_record(path, {"n": 2})
        records, damaged = read_records(path)
        complete = end >= len(whole) - 1
        assert records == [{"n": 1}] * complete + [{"n": 2}]
        assert len(damaged) == (end > 0 and not complete)
        assert b"\n\n" not in path.read_bytes()


def test_a_group_can_write_to_what_its_umask_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    before = os.umask(0o002)
    try:
        append_record(tmp_path / "records.jsonl", {"n": 1})
        with open_for_writing(tmp_path, tmp_path):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"records.jsonl": 0o664, LOCK: 0o664}


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


def test_nesting_is_limited_to_64_levels(tmp_path):
    for kind in ("[]", '{"a":}'):
        start, end = kind[:-1], kind[-1]
        for depth, allowed in ((64, True), (65, False)):
            (tmp_path / "a").write_text(start * depth + ("1" if "a" in kind else "") + end * depth)
            if allowed:
                check_nesting(json.loads((tmp_path / "a").read_text()))
            else:
                with pytest.raises(ValueError, match="nested too deeply"):
                    check_nesting(json.loads((tmp_path / "a").read_text()))
    check_nesting(1)


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


def test_a_forked_process_closes_its_copies_of_the_locks(tmp_path):
    with open_for_writing(tmp_path, tmp_path):
        assert locked(tmp_path)
        files._close_locks()  # as the child does
        assert not locked(tmp_path)


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
    clock = other.stat().st_mtime
    for path in (other, unknown):
        os.utime(path, (0, clock))
    monkeypatch.setattr(time, "time", lambda: clock + 24 * 3600)
    remove_stale(tmp_path.iterdir())
    assert set(tmp_path.iterdir()) == {other, unknown}
    monkeypatch.setattr(time, "time", lambda: clock + 24 * 3600 + 1)
    remove_stale(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_other_users_stay_while_their_process_runs(tmp_path, monkeypatch, dead):
    def kill(process, signal):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = temporary_of(tmp_path / "index.json", monkeypatch, dead)
    path.write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill)
        remove_stale([path])
    assert path.exists()
    remove_stale([tmp_path / "index.json", path, path])
    assert not path.exists()


flock = fcntl.flock


def flock_of_nfs(descriptor, operation):
    """NFS refuses to lock a folder, but locks a file that is open for writing."""
    if is_folder(descriptor):
        raise OSError(errno.EBADF, "Bad file descriptor")
    flock(descriptor, operation)


def test_a_folder_on_nfs_has_one_writer(tmp_path, monkeypatch):
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
    with pytest.raises(DamagedError, match=r"/run/a cannot be read: Too many levels of symbolic links$"):
        read_file(tmp_path / "run" / "a")
    assert is_inside(tmp_path / "run" / "a", tmp_path / "run")


def test_reserved_space_is_allocated(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    reserve(tmp_path / "a", 100_000)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 100_000
    assert (tmp_path / "a").read_bytes() == b"abc" + bytes(99_997)
    reserve(tmp_path / "a", 0)
    assert (tmp_path / "a").read_bytes() == b""


def test_tensors_are_read_as_they_were_written(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])}
    write_tensors(tmp_path / "x", "a test", tensors, {"n": [1, None]})
    read, about = read_tensors(tmp_path / "x", "a test")
    assert about == {"n": [1, None]}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    for kind in ("a cell", "a tree"):
        with pytest.raises(DamagedError, match=f"expected the record of {kind}"):
            read_tensors(tmp_path / "x", kind)
    content = (tmp_path / "x").read_bytes()
    for place in range(len(content)):
        (tmp_path / "x").write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
        with pytest.raises(DamagedError):
            read_tensors(tmp_path / "x", "a test")


def test_headers_of_tensors_may_have_any_length(tmp_path):
    """Safetensors fills them with spaces up to a multiple of eight bytes."""
    for length in range(8):
        about = "x" * length
        write_tensors(tmp_path / "x", "a test", {"a": torch.zeros(1)}, {"about": about})
        assert read_tensors(tmp_path / "x", "a test")[1] == {"about": about}


HEADS = {"an HTML page": b"<!doctype html>x", "an ONNX file": b"\x08\x08", "a proof file": b'........{"a":{"proof":'}


@pytest.mark.parametrize("kind", HEADS)
def test_only_files_of_the_same_kind_are_replaced(tmp_path, kind):
    check_output(tmp_path / "none", kind)
    for content in (b"", HEADS[kind]):
        (tmp_path / "file").write_bytes(content)
        check_output(tmp_path / "file", kind)
    model = b'........{"__metadata__":{"format":"pt"}}'  # any other file of tensors
    others = (b"# sha256: 0\ndata: Digits", b"{}", b"\0", b"<a>", model, b'........["proof"]', b'{"proof": 1}')
    for content in (*others, *(set(HEADS.values()) - {HEADS[kind]})):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(InputError, match=f"is not {kind} and would be lost"):
            check_output(tmp_path / "file", kind)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(InputError, match="expected a regular file"):
            check_output(path, kind)
    with pytest.raises(InputError, match="got the folder"):
        check_output(tmp_path, kind)


def test_an_output_removes_what_a_killed_process_has_left_of_it(tmp_path, monkeypatch, dead):
    left, other = (temporary_of(tmp_path / name, monkeypatch, dead) for name in ("a[1].html", "b.html"))
    for path in (left, other):
        path.write_text("")
    check_output(tmp_path / "a[1].html", "an HTML page")
    assert list(tmp_path.iterdir()) == [other]
