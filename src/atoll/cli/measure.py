"""The verb that all measurements share: flags from settings, runs in, results out."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docstring_parser import parse as parse_docstring

from atoll.cli.output import error_console, print_json, progress_bar
from atoll.distributed import is_main, process_group
from atoll.errors import InputError
from atoll.measure import Result, Settings
from atoll.runs.data_record import LOCATIONS
from atoll.runs.run import Which, open_run


def add_flags(parser: argparse.ArgumentParser, settings: type[Settings]) -> None:
    """Runs, one flag per field of the settings, and the options of all measurements."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    texts = _help_texts(settings)
    hints = typing.get_type_hints(settings)
    for item in dataclasses.fields(settings):
        _add_flag(parser, item, hints[item.name], texts.get(item.name, ""))
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    add_locations(parser)
    parser.add_argument("--restart", action="store_true", help="discard saved progress and start over")
    parser.add_argument("--trust", action="store_true", help="import classes from outside Atoll that runs name")


def add_locations(parser: argparse.ArgumentParser) -> None:
    """``--data.root PATH`` and the like, for data that were moved."""
    for key in LOCATIONS:
        text = f"where the data of the runs are now, if they were moved: replaces data.{key}"
        parser.add_argument(
            f"--data.{key}",
            dest="locations",
            action="append",
            default=[],
            type=functools.partial(_location, key),
            metavar="PATH",
            help=text,
        )


def _location(key: str, place: str) -> tuple[str, str]:
    return key, place


def _help_texts(settings: type) -> dict[str, str]:
    """What the docstrings of settings and their base classes say about each field."""
    texts: dict[str, str] = {}
    for cls in settings.__mro__[:-1]:
        for parameter in parse_docstring(cls.__doc__ or "").params:
            texts.setdefault(parameter.arg_name, (parameter.description or "").rstrip("."))
    return texts


def _add_flag(parser: argparse.ArgumentParser, item: Any, hint: Any, text: str) -> None:
    flag = f"--{item.name.replace('_', '-')}"
    options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and len(options) == 1:
        hint = options[0]
    default = ",".join(item.default) if isinstance(item.default, tuple) else item.default
    if "default" not in text and default not in (None, False, True, ""):
        text = f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(hint) is typing.Literal:
        parser.add_argument(flag, choices=typing.get_args(hint), **common)
    elif typing.get_origin(hint) is tuple:
        parser.add_argument(flag, action="extend", type=lambda word: word.split(","), metavar="NAME,...", **common)
    else:
        parser.add_argument(flag, type=hint, metavar={int: "N", float: "X"}.get(hint, "TEXT"), **common)


def settings_from(options: argparse.Namespace, settings: type[Settings], **more: Any) -> Settings:
    """The settings that the flags describe."""
    names = {item.name for item in dataclasses.fields(settings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return settings(**given, **more)


def run_measurement(
    options: argparse.Namespace, settings: type[Settings], show: Callable[[dict[str, Any]], None], **more: Any
) -> None:
    """Measure every run and print the results."""
    measure_runs(options, settings, show, **more)


def measure_runs(
    options: argparse.Namespace, settings: type[Settings], show: Callable[[dict[str, Any]], None], **more: Any
) -> dict[str, Any]:
    """Measure every run, print the results, and return them by run."""
    question = settings_from(options, settings, **more)
    checkpoint = parse_checkpoint(options.checkpoint)
    places = dict(options.locations)
    runs = {
        str(path): open_run(path, trust=options.trust, data=places) for path in options.runs
    }  # all, before any work
    results: dict[str, Result] = {}
    with process_group(), progress_bar("") as bar:
        bar.disable = bar.disable or not is_main()
        for name, run in runs.items():
            if is_main() and (warning := run.selection_warning(checkpoint, options.weights)):
                error_console.print(f"{name}: {warning}", style="yellow", markup=False, soft_wrap=True)
            task = bar.add_task(name, total=None, note="")

            def on_progress(what: str, done: float, total: int, task: Any = task) -> None:
                bar.update(task, completed=int(done), total=total, note=what)

            results[name] = run.measure(
                question,
                checkpoint=checkpoint,
                weights=options.weights,
                restart=options.restart,
                on_progress=on_progress,
            )
            bar.remove_task(task)
    if is_main():
        if options.json:
            print_json({name: {**result.to_json(), "folder": str(result.folder)} for name, result in results.items()})
        else:
            show(results)
    return results


def parse_checkpoint(word: str) -> Which:
    """What ``--checkpoint`` names.

    >>> parse_checkpoint("best"), parse_checkpoint("120")
    ('best', 120)
    """
    if word.isdecimal():
        return int(word)
    if word in ("best", "last"):
        return typing.cast(Which, word)
    raise InputError(f"--checkpoint: expected best, last or a step, got {word!r}")
