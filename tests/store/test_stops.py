"""Full disks and kills at seeded moments, over all commands: one sentence or success, and then the same result."""

import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.errors import AtollError, describe
from atoll.runs.run import open_run
from store_cases import TINY, content, difference, look, study
from support import fork

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")  # events around files
KILLED = 9
# Commands on a finished run without results, which is the folder `run`; they write into it or beside it.
COMMANDS = {
    "train": ["train", *TINY, "--out", "new"],
    "attack": ["attack", "run", "--attacks", "FGSM,PGD-2", "--points", "12", "--corruptions"],
    "certify": ["certify", "run", "--smooth", "0.25", "--samples", "20", "--points", "4", "--eps", "0.1"],
    "curvature": ["curvature", "run", "--points", "8", "--top", "1", "--steps", "1", "--landscape", "weights"],
    "explain": ["explain", "run", "--points", "3", "--methods", "SM,BIG", "--checks", "0", "--budget", "20"],
    "health": ["health", "run"],
    "export": ["export", "run", "-o", "model.onnx", "--points", "20"],
    "report": ["report", "run", "-o", "report.html"],
    "audit": ["audit", "run", "--only", "health"],
    "adopt": ["adopt", "source.onnx", "--data", "Digits", "--out", "adopted"],
    "study": ["study"],
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a finished run and an exported model."""
    folder = tmp_path_factory.mktemp("start")
    assert main(["train", *TINY, "--out", str(folder / "run")]) == 0
    assert main(["export", str(folder / "run"), "-o", str(folder / "source.onnx"), "--points", "5"]) == 0
    return folder


def run(name: str, folder: Path) -> int:
    """Run a command in a folder; returns the exit code."""
    os.chdir(folder)
    if name == "study":
        try:
            study(folder / "cells")
        except (AtollError, OSError) as error:  # as the command line does
            sys.stderr.write(str(error) if isinstance(error, AtollError) else describe(error))
            return 1
        return 0
    if name == "adopt" and (folder / "adopted").exists():
        return 0
    if name == "train" and (folder / "new" / "recipe.yaml").exists():
        return main(["train", "--resume", "--out", "new"])
    return main(COMMANDS[name])


def result_of(name: str, folder: Path) -> object:
    """What a command has made, without what differs between equal results."""
    if name in ("train", "adopt"):
        path = folder / {"train": "new", "adopt": "adopted"}[name]
        *rest, results, _ = look(path)[0]  # in the order of their dates
        return [*rest, sorted(results, key=str)]
    if name in ("export", "report"):
        return (folder / COMMANDS[name][3]).read_bytes()
    if name == "study":
        return study(folder / "cells")
    return sorted(content(open_run(folder / "run").results()), key=str)


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory):
    """The result of each command that nothing stops, and how many file events it causes."""
    cache = {}

    def of(name: str) -> tuple[object, int]:
        if name not in cache:
            folder = shutil.copytree(start, tmp_path_factory.mktemp(name) / "whole")
            count = folder.with_name("count")

            def task() -> int:
                events = [0]
                sys.addaudithook(lambda event, _: events.__setitem__(0, events[0] + (event in CHANGES)))
                code = run(name, folder)
                count.write_text(str(events[0]))
                return code

            stop(task, folder, 0)
            cache[name] = result_of(name, folder), int(count.read_text())
        return cache[name]

    return of


def stop(task, folder: Path, *codes: int) -> int:
    """Run a task in a process of its own; it must end with one of some exit codes, and print no traceback."""
    errors = folder.with_name("errors")
    process = fork(task, errors)
    process.join(300)
    message = errors.read_text()
    assert process.exitcode in codes, message
    assert "Traceback" not in message
    if process.exitcode == 1:
        assert message.strip()
    return process.exitcode


def check_repeated(name: str, folder: Path, expected: object) -> None:
    """The same command finishes, and its result is that of a command that nothing has stopped."""
    stop(lambda: run(name, folder), folder, 0)
    result = result_of(name, folder)
    assert result == expected, difference(result, expected)
    assert not [*folder.rglob(".*.tmp")]


def seeds(count: int, quick: set[int]) -> list:
    """Numbers with the command of each, some of which are quick."""
    names = list(COMMANDS)
    cases = ((number, names[number % len(names)]) for number in range(count))
    return [
        pytest.param(name, number, id=f"{name}-{number}", marks=() if number in quick else pytest.mark.slow)
        for number, name in cases
    ]


@pytest.mark.parametrize(("name", "seed"), seeds(110, quick={3, 4}))
def test_a_killed_command_can_be_repeated(start, expected, tmp_path, name, seed):
    """The process dies at a random event around a file, without a chance to clean up."""
    result, count = expected(name)
    moment, folder = random.Random(seed).randrange(count), shutil.copytree(start, tmp_path / "killed")
    events = [0]

    def die(event: str, _: object) -> None:
        events[0] += event in CHANGES
        if events[0] > moment:
            os._exit(KILLED)

    def task() -> int:
        sys.addaudithook(die)
        return run(name, folder)

    stop(task, folder, KILLED, 0)
    check_repeated(name, folder, result)


@pytest.mark.parametrize(("name", "seed"), seeds(55, quick={1}))
def test_files_cannot_grow_beyond_a_limit(start, expected, tmp_path, name, seed):
    """As on a file system without space, but for every single file."""
    result, _ = expected(name)
    limit, folder = int(10 ** random.Random(seed).uniform(1, 5.5)), shutil.copytree(start, tmp_path / "limited")

    def task() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return run(name, folder)

    stop(task, folder, 0, 1)
    check_repeated(name, folder, result)


@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a file system of a given size, which needs the rights of root."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), seeds(55, quick=set()))
def test_a_full_disk(start, expected, tmp_path, small_disk, name, seed):
    result, _ = expected(name)
    used = sum(path.stat().st_size + 4096 for path in start.rglob("*"))
    disk = small_disk(used + int(10 ** random.Random(seed).uniform(2, 5.5)))
    folder = shutil.copytree(start, disk / "full")
    stop(lambda: run(name, folder), tmp_path / "full", 0, 1)
    moved = shutil.copytree(folder, tmp_path / "moved")
    check_repeated(name, moved, result)
