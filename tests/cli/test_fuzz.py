"""Hostile values for every option of every command.

A command either accepts a value, which then is in the declared range, or refuses it: exit code 1 or 2, one sentence,
nothing written, and the run as before.  What this finds becomes a case in ``test_nonsense.py``.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from PIL import Image

from atoll.cli import VERBS, main, parser
from atoll.measure import MEASUREMENTS, Settings, measurement
from atoll.models import SmallConvNet
from support import SMALL

HOSTILE = [
    "", " ", "-1", "0", "-0", "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "0x10", "1_0", "1.5", "9" * 20,
    f"-{'9' * 20}", "9" * 5000, "1/0", "8/255", "1/3/4", "1e999999999", "true", "None", "null", "~", "[]", "{}",
    "[1, [2, {a: 3}]]", "{a: 1}", "a=b", "=", "a=", "=b", "a.b=1", ",", ",,", "a,b,,c", "best", "all", "é", "Ⅻ", "٣",
    "\u202e", "\udcff", "💥" * 50, "\x00", "\x1b[31m", "\n", "a\nb", "x" * 300, "x" * 10_000, "../x", "./x/../y",
    "x/" * 200, "%s%n", "{0}", "$HOME", "`id`", "'", '"', "\\", "[red]", "!!python/object:os.system", "*a", "&a [*a]",
    "- - -", "? :", "@", "#", "--", "-", "-x", "os.system", "atoll.losses.AT", "x.py:X", "data:text", "file:///x", "1h",
    "PGD-", "PGD-0", "PGD-9999999", "NaN", "1" * 400, "[" * 2000, "{" * 2000, "- " * 2000, "\ufeff1", "1;2", "0,nan",
    "1,inf", "255,0", "²",
]  # fmt: skip


class AcceptedError(Exception):
    """A command accepted its values and is about to compute something."""


def accept(*arguments: object, **options: object) -> None:
    raise AcceptedError


@pytest.fixture
def questions(trained: Path) -> Iterator[list[Settings]]:
    """The settings that commands accepted; no command computes anything."""
    result: list[Settings] = []

    def measure(self: object, subject: object, settings: Settings, context: object) -> None:
        result.append(settings)
        raise AcceptedError

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("attack", "certify", "curvature", "explain", "health"):
            patch.setattr(type(measurement(kind)), "measure", measure)
        patch.setattr("atoll.audit.engine._facts", accept)
        patch.setattr("atoll.studies.engine.run_sequentially", accept)
        patch.setattr("atoll.studies.ray.RayEngine.__call__", accept)
        patch.setattr("atoll.runs.run.export_model", accept)
        patch.setattr("atoll.runs.run.export", accept)
        patch.setattr("atoll.report.write_report", accept)
        patch.setattr("atoll.doctor.diagnose", accept)
        patch.setattr("atoll.runs.train.Trainer", accept)
        yield result


@pytest.fixture
def commands(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A valid command line of every command; the files are in a folder of their own."""
    files = tmp_path / "files"
    files.mkdir()
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    Image.new("L", (8, 8)).save(files / "image.png")
    program = torch.export.export(SmallConvNet((1, 8, 8), 10, widths=(4,)).eval(), (torch.zeros(2, 1, 8, 8),))
    torch.export.save(program, files / "net.pt2")
    run = str(trained)
    return {
        "train": [*SMALL, "--out", str(tmp_path / "new")],
        "attack": [run, "--attacks", "FGSM", "--points", "2"],
        "certify": [run, "--points", "2", "--eps", "0.1"],
        "curvature": [run, "--points", "2"],
        "explain": [run, "--points", "2", "--methods", "SM"],
        "health": [run, "--points", "2"],
        "audit": [run],
        "predict": [run, str(files / "image.png")],
        "export": [run, "-o", str(files / "model.onnx")],
        "report": [run, "-o", str(files / "report.html")],
        "adopt": [str(files / "net.pt2"), "--data", "Digits", "--out", str(tmp_path / "adopted")],
        "study": ["trh-two-moons"],
        "ls": [],
        "check": [str(files / "image.png")],
        "doctor": [],
        "completion": ["bash", "atoll train "],
    }


def options_of(verb: str) -> list[argparse.Action]:
    return [action for action in parser(verb)._actions if action.dest not in ("help", "debug")]


def command_lines(verb: str, words: list[str], seed: int, count: int) -> Iterator[list[str]]:
    """Command lines with one or two hostile values, each option in turn."""
    draw, actions = random.Random(f"{verb} {seed}"), options_of(verb)
    for number in range(count):
        line, more = list(words), []
        for action in [actions[number % len(actions)], *draw.sample(actions, draw.randrange(2))]:
            value = draw.choice(HOSTILE)
            if not action.option_strings:
                place = draw.randrange(len(line) + 1)
                line[place : place + (draw.random() < 0.7)] = [value]
            elif draw.random() < 0.5 or value.startswith("-"):
                more.append(f"{action.option_strings[-1]}={value}")
            else:
                more += [action.option_strings[-1], *([value] if action.nargs != 0 else [])]
        yield [verb, *line, *more]


def contents(*folders: Path) -> Mapping[Path, int]:
    """All files and folders, and when the files were last written."""
    paths = (path for folder in folders for path in folder.rglob("*"))
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in paths}


def verdict(words: list[str], capsys: pytest.CaptureFixture[str], *folders: Path) -> str:
    """What is wrong with the answer to a command line; empty if nothing is."""
    before = contents(*folders)
    try:
        code = main(words)
    except AcceptedError:
        return ""
    except SystemExit as stop:  # help
        code = stop.code
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    printed = capsys.readouterr()
    error = printed.out + printed.err if code else ""
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if code and not error.strip():
        return f"exit code {code} without a sentence"
    if "Traceback" in error or len(error) > 20_000:
        return f"printed {error[:300]}"
    if code in (1, 2) and contents(*folders) != before:
        return f"exit code {code}, but files have changed: {set(contents(*folders).items()) ^ set(before.items())}"
    return ""


def spell(words: list[str]) -> str:
    return " ".join(word if len(word) < 60 else f"{word[:60]}..." for word in map(repr, words))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("seed", "count"), [(0, 15), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_hostile_options_are_accepted_or_refused(verb, seed, count, commands, questions, trained, tmp_path, capsys):
    lines = list(command_lines(verb, commands[verb], seed, count))
    problems = {spell(line): problem for line in lines if (problem := verdict(line, capsys, tmp_path, trained))}
    assert not problems, "\n".join(f"{line}: {problem}" for line, problem in problems.items())
    for settings in questions:
        check_numbers(settings)


def check_numbers(settings: Settings) -> None:
    """Numbers that were accepted are finite, and counts can be counted."""
    hints = get_type_hints(type(settings))
    for name, value in vars(settings).items():
        if isinstance(value, float):
            assert math.isfinite(value), name
        if isinstance(value, int) and name != "seed":
            assert 0 <= value <= 10**9, name
        if isinstance(value, str) and type(None) in get_args(hints[name]):
            assert value, name


def test_every_number_of_settings_has_a_range():
    for kind, member in MEASUREMENTS.members().items():
        cls = member.cls.settings
        declared = {name for base in cls.__mro__ for name in vars(base).get("ranges", {})}
        hints = get_type_hints(cls)
        numbers = {name for name, hint in hints.items() if {int, float} & {hint, *get_args(hint)}}
        assert numbers == declared, kind


# Values that a command may accept, for options that do not multiply the work, and what keeps the work small.
EXTREME = [
    "0",
    "1",
    "2",
    "0.5",
    "-0.5",
    "1e-30",
    "1e30",
    "1e9",
    "1000000000",
    "1e-45",
    "8/255",
    "1/1000000",
    "l2",
    "noise",
]
ENDLESS = ("--samples", "--steps", "--max-probes", "--proof", "--top", "--power")
SMALL_WORK = {
    "attack": ["--attacks", "PGD-2", "--points", "3", "--power", "0", "--restart"],
    "certify": ["--points", "3", "--check", "1", "--attacks", "PGD-2", "--eps", "0.1", "--restart"],
    "curvature": ["--points", "3", "--max-probes", "2", "--top", "1", "--steps", "1", "--restart"],
    "explain": ["--points", "2", "--methods", "SM,BSM", "--pool", "4", "--checks", "0", "--restart"],
    "health": ["--points", "3", "--restart"],
    "predict": ["{files}/image.png"],
    "export": ["-o", "{files}/model.onnx", "--points", "3"],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", SMALL_WORK)
def test_extreme_values_are_computed_or_refused(verb, trained, gloro_run, commands, tmp_path, capsys):
    run = str(gloro_run.folder if verb in ("certify", "export") else trained)
    words = [verb, run, *(word.format(files=tmp_path / "files") for word in SMALL_WORK[verb])]
    problems = {}
    for action in options_of(verb):
        for value in action.choices or EXTREME:
            option = action.option_strings[-1] if action.option_strings else ""
            if not option or action.nargs == 0 or (option in ENDLESS and value in ("1e30", "1e9", "1000000000")):
                continue
            if problem := verdict([*words, f"{option}={value}"], capsys, tmp_path):
                problems[f"{option}={value}"] = problem
    assert not problems, "\n".join(f"{line}: {problem}" for line, problem in problems.items())
