"""The commands that measure something, or repeat what was measured."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.measure import Result

VERBS = ("attack", "certify", "curvature", "explain", "health")  # measurements with a command of their own


def command(verb: str, run: Path, *flags: str) -> str:
    return shlex.join(["atoll", verb, str(run), *flags])


def resume(run: Path) -> str:
    return shlex.join(["atoll", "train", "--resume", "--out", str(run)])


def train_again(run: Path, environment: Mapping[str, Any]) -> list[str]:
    """The command as typed, if it is known, and the resolved recipe, which always produces bit-identical results."""
    typed = environment.get("command")
    lines = []
    if isinstance(typed, list) and typed[1:2] == ["train"] and all(isinstance(word, str) for word in typed):
        lines.append(shlex.join(["atoll", *typed[1:]]))
    return [*lines, shlex.join(["atoll", "train", str(run / "recipe.yaml"), "--out", f"{run}-again"])]


def repeat(run: Path, result: Result) -> str | None:
    """The command that measures a result again: one flag for every setting that is not the default.

    None if its kind has no command.
    """
    if result.kind not in VERBS:
        return None
    flags = []
    stored = result.settings.to_json()  # without what only says how to compute
    for field in dataclasses.fields(result.settings):
        value = getattr(result.settings, field.name)
        if field.name == "points" and value is None and field.default is not None:
            value = result.points  # all points, which only a number can say
        if field.name in stored and value != field.default and value is not None:
            flags += _flag(field.name, value)
    origin = result.subject.origin
    flags += [] if origin.step is None else ["--checkpoint", str(origin.step)]
    flags += [] if origin.weights == "raw" else ["--weights", origin.weights]
    return command(result.kind, run, *flags)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    # A value with a dash in front would be taken for a flag.
    return [f"--{flag}={text}"] if text.startswith("-") else [f"--{flag}", text]
