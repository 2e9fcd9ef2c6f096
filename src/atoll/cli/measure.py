"""The verb that all measurements share: flags from settings, runs in, results out."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from atoll.cli.answers import print_json
from atoll.cli.flags import Flag
from atoll.cli.index import look_up
from atoll.cli.output import error_console, progress_bar
from atoll.cli.values import number, path, whole_number

if TYPE_CHECKING:
    from atoll.measure import Result, Settings
    from atoll.runs.run import Run, Which


def add_flags(
    parser: argparse.ArgumentParser, kind: str, runs: str = "folder of a run; several runs are compared"
) -> None:
    """Runs, one flag per field of the settings of a measurement, and the options of all measurements."""
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help=runs)
    for flag in look_up("settings", kind):
        _add_flag(parser, Flag(**flag))
    group = add_run_flags(parser)
    group.add_argument("--restart", action="store_true", help="discard saved progress and results, and start over")


def add_run_flags(parser: argparse.ArgumentParser) -> Any:
    """Which weights to use, where the data and the device are, and whether to trust the run; returns their group."""
    group = parser.add_argument_group("run")
    text = "checkpoint to use: best, last, or the number of a step (default: best)"
    group.add_argument("--checkpoint", default="best", metavar="NAME", help=text)
    group.add_argument(
        "--weights", default="raw", metavar="NAME", help="raw, or the name of an average such as swa (default: raw)"
    )
    add_locations(group)
    add_device(group)
    group.add_argument("--trust", action="store_true", help="import classes from outside Atoll that the run names")
    return group


def add_locations(parser: Any) -> None:
    """``--data.root PATH`` and the like, for data that were moved."""
    for key in look_up("constants", "atoll.runs.data_record.LOCATIONS"):
        parser.add_argument(
            f"--data.{key}",
            dest="locations",
            action="append",
            default=[],
            type=functools.partial(_location, key),
            metavar="PATH",
            help=f"where data.{key} is now, if it was moved since training",
        )


def _location(key: str, place: str) -> tuple[str, str]:
    return key, str(path(place))


def add_device(parser: Any) -> None:
    """``--device`` and ``--threads``; ``atoll.cli.main`` passes them to ``use_device`` and ``choose_threads``."""
    text = "device to compute on: auto, cpu, cuda, cuda:N or mps (default: auto, a CUDA GPU if there is one)"
    parser.add_argument("--device", default="auto", metavar="NAME", help=text)
    text = (
        "threads on the CPU: a number, or auto to measure what is fastest unless OMP_NUM_THREADS is set (default: auto)"
    )
    parser.add_argument("--threads", default="auto", metavar="N", help=text)


def _add_flag(parser: argparse.ArgumentParser, flag: Flag) -> None:
    name = f"--{flag.name.replace('_', '-')}"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag.help.replace("%", "%%")}
    if flag.kind == "bool":
        parser.add_argument(name, action=argparse.BooleanOptionalAction, **common)
    elif flag.kind == "choice":
        parser.add_argument(name, choices=flag.choices, **common)
    elif flag.kind == "list":
        parser.add_argument(name, action="extend", type=lambda word: word.split(","), metavar="NAME,...", **common)
    elif flag.kind in ("int", "float"):
        kind, metavar = (whole_number, "N") if flag.kind == "int" else (number, "X")
        parser.add_argument(name, type=kind, metavar=metavar, **common)
    else:
        parser.add_argument(name, metavar="TEXT", **common)


def settings_from(options: argparse.Namespace, settings: type[Settings], **more: Any) -> Settings:
    """The settings that the flags describe."""
    names = {item.name for item in dataclasses.fields(settings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return settings(**given, **more)


def run_measurement(
    options: argparse.Namespace, kind: str, show: Callable[[dict[str, Any]], None], **more: Any
) -> None:
    """Measure every run and print the results."""
    measure_runs(options, kind, show, **more)


def measure_runs(
    options: argparse.Namespace, kind: str, show: Callable[[dict[str, Any]], None], **more: Any
) -> dict[str, Any]:
    """Measure every run, print the results, and return them by run."""
    from atoll.distributed import is_main, process_group
    from atoll.measure import measurement
    from atoll.runs.run import open_run

    question = settings_from(options, measurement(kind).settings, **more)
    checkpoint = parse_checkpoint(options.checkpoint)
    places = dict(options.locations)
    runs = {
        str(folder): open_run(folder, trust=options.trust, data=places) for folder in options.runs
    }  # all, before any work
    results: dict[str, Result] = {}
    with process_group(), progress_bar("") as bar:
        bar.disable = bar.disable or not is_main()
        for name, run in runs.items():
            warn_about_selection(run, checkpoint, options.weights, name)
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
            trees = {name: {**result.to_json(), "folder": str(result.folder)} for name, result in results.items()}
            print_json(options.verb, {"results": trees})
        else:
            show(results)
    return results


def warn_about_selection(run: Run, checkpoint: Which, weights: str, name: str) -> None:
    """Print a warning if the best checkpoint was selected on few points."""
    from atoll.distributed import is_main

    if is_main() and (warning := run.selection_warning(checkpoint, weights)):
        error_console.print(f"{name}: {warning}", style="yellow", markup=False, soft_wrap=True)


def parse_checkpoint(word: str) -> Which:
    """What ``--checkpoint`` names.

    >>> parse_checkpoint("best"), parse_checkpoint("120")
    ('best', 120)
    """
    from atoll.runs.run import check_which

    which = int(word) if word.isdecimal() else word
    check_which(which, "--checkpoint")
    return cast("Which", which)
