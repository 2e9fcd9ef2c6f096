"""Reproduce a table or figure of a paper: train and measure what it compares, and check its claims.

atoll study
atoll study trh-two-moons --scale smoke
atoll study trh-table --scale cpu --out runs/studies/trh
atoll study trh-lambda pretrained=ViT-L_16.npz data.root=imagenet --scale paper --engine ray --gpus 8 --processes 8
atoll study locality-accuracy --scale cpu --cells runs/studies/locality
atoll study my_study.py:MyStudy

If a paper has weights or images that are not included, --scale paper asks for them. Finished cells are stored. Run the
same command again to resume. If a cell fails, the others continue, and the exit code is 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from atoll.cli.output import print_json, print_lines, print_table, progress_bar
from atoll.errors import InputError
from atoll.studies import STUDIES, StudyReport, StudyResults
from atoll.studies.base import SCALES, Study
from atoll.studies.engine import CellOutcome, Engine, run_sequentially, run_study
from atoll.studies.ray import RayEngine


def arguments(parser: argparse.ArgumentParser) -> None:
    name = "name of the study, or file.py:Class (default: list all)"
    overrides = "overrides for every recipe of the study; PATTERN:key.sub=value is for rows that match"
    scale = "seconds, minutes on two cores, or as published, as far as the study's reference says"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help=overrides)
    parser.add_argument("--scale", default="smoke", choices=SCALES, help=scale)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/studies/NAME-SCALE)")
    parser.add_argument(
        "--cells", type=Path, metavar="DIR", help="folder of the runs, which some studies can share (default: in --out)"
    )
    parser.add_argument("--engine", default="sequential", choices=["sequential", "ray"], help="what runs the cells")
    parser.add_argument("--address", help="address of the Ray cluster (default: RAY_ADDRESS, or this machine)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that train a cell, as under torchrun"
    )
    parser.add_argument("--cpus", type=float, help="cores per cell, with Ray (default: one per process)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per cell, with Ray (default: 0)")


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        _list(options.json)
        return 0
    try:
        study: Study = STUDIES.resolve(options.name).cls()
    except InputError as error:
        raise InputError(f"study: {error}") from None
    folder = options.out or Path("runs") / "studies" / f"{study.name}-{options.scale}"
    ray = RayEngine(options.address, options.cpus, options.gpus)
    engine: Engine = ray if options.engine == "ray" else run_sequentially
    with progress_bar("cells") as bar:
        task = bar.add_task(study.name, total=len(study.cells(options.scale)), note="")

        def on_done(outcome: CellOutcome, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, note=outcome.cell.name)
            if outcome.numbers is None:
                line = f"{outcome.cell.name} failed: {outcome.reason}"
                bar.console.print(line, style="yellow", markup=False, soft_wrap=True)

        results, report = run_study(
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
        claims = [vars(claim) for claim in report.claims]
        failed = {cell.name: reason for cell, reason in results.failed.items()}
        print_json({"study": study.name, "folder": str(folder), "claims": claims, "failed": failed})
    else:
        _print(results, report, folder)
    return 1 if results.failed else 0


def _print(results: StudyResults, report: StudyReport, folder: Path) -> None:
    for title, table in report.tables.items():
        titles, *rows = table.texts()
        print_table(title, titles, rows)
    print_lines(*(f"{claim.claim}: {claim.outcome}, {claim.message}." for claim in report.claims))
    if results.failed:
        print_lines(f"{len(results.failed)} cells failed; README.md lists the reasons", style="yellow")
    print_lines(f"results are in {folder}")


def _list(as_json: bool) -> None:
    classes: list[Any] = [member.cls for member in STUDIES.members().values()]
    rows = {study.name: [study.title, study.reference] for study in classes}
    if as_json:
        print_json({name: {"title": title, "reference": reference} for name, (title, reference) in rows.items()})
    else:
        print_table("studies", ["name", "title", "reference"], [[name, *texts] for name, texts in rows.items()])
