"""Reproduce a table or figure of a paper: train what it compares, measure it, and say whether its claim held.

atoll study
atoll study trh-two-moons --scale smoke
atoll study trh-table --scale cpu --out runs/studies/trh
atoll study trh-table --scale paper --engine ray --gpus 8 --processes 8
atoll study locality-accuracy --scale cpu --cells runs/studies/locality
atoll study locality-robustness --scale cpu --cells runs/studies/locality

Finished cells are kept: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from atoll.cli.output import console, print_json, print_table, progress_bar
from atoll.studies import STUDIES
from atoll.studies.base import SCALES, Study
from atoll.studies.engine import Engine, Outcome, run_sequentially, run_study
from atoll.studies.ray import RayEngine


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the study; without one, all are listed")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="values for every recipe of the study; PATTERN:key.sub=value is for rows of such a name",
    )
    parser.add_argument(
        "--scale", default="smoke", choices=SCALES, help="seconds, minutes on two cores, or as published"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/studies/NAME-SCALE)")
    parser.add_argument(
        "--cells", type=Path, metavar="DIR", help="folder of the runs, which some studies can share (default: in --out)"
    )
    parser.add_argument("--engine", default="sequential", choices=["sequential", "ray"], help="who runs the cells")
    parser.add_argument("--address", help="of the Ray cluster (default: RAY_ADDRESS, or this machine)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that train a cell, as under torchrun (default: 1)"
    )
    parser.add_argument("--cpus", type=float, help="cores for a cell, with Ray (default: one a process)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs for a cell, with Ray (default: 0)")


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        _list(options.json)
        return 0
    study: Study = STUDIES.resolve(options.name).cls()
    folder = options.out or Path("runs") / "studies" / f"{study.name}-{options.scale}"
    ray = RayEngine(options.address, options.cpus, options.gpus)
    engine: Engine = ray if options.engine == "ray" else run_sequentially
    with progress_bar("cells") as bar:
        task = bar.add_task(study.name, total=len(study.cells(options.scale)), note="")

        def on_done(outcome: Outcome, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, note=outcome.cell.name)
            if outcome.numbers is None:
                line = f"{outcome.cell.name} failed: {outcome.reason}"
                bar.console.print(line, style="yellow", markup=False, soft_wrap=True)

        found, findings = run_study(
            study,
            options.scale,
            folder,
            overrides=options.overrides,
            engine=engine,
            cells_folder=options.cells,
            processes=options.processes,
            on_done=on_done,
        )
    if options.json:
        verdicts = [vars(verdict) for verdict in findings.verdicts]
        failed = {cell.name: reason for cell, reason in found.failed.items()}
        print_json({"study": study.name, "folder": str(folder), "verdicts": verdicts, "failed": failed})
        return 0
    for title, table in findings.tables.items():
        titles, *rows = table.texts()
        print_table(title, titles, rows)
    for verdict in findings.verdicts:
        text = f"{verdict.claim}: {verdict.outcome}, {verdict.words}."
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if found.failed:
        console.print(f"{len(found.failed)} cells failed; their reasons are in README.md", style="yellow")
    console.print(f"everything is in {folder}", markup=False, soft_wrap=True)
    return 0


def _list(as_json: bool) -> None:
    classes: list[Any] = [member.cls for member in STUDIES.members().values()]
    rows = {study.name: [study.title, study.shows] for study in classes}
    if as_json:
        print_json({name: {"title": title, "shows": shows} for name, (title, shows) in rows.items()})
    else:
        print_table("studies", ["name", "what it is", "of"], [[name, *texts] for name, texts in rows.items()])
