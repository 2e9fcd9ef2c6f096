"""Reproduce a table or figure of a paper: train and measure what it compares, and check its claims.

Without a name, the command lists all studies. KEY=VALUE changes all recipes of the study; PATTERN:KEY=VALUE changes
those of the rows that match the pattern. --rows and --seeds run a part of the study.

Some papers need weights or images that are not included; --scale paper asks for them. Finished cells are cached. Rerun
the same command to resume. If a cell fails, the others continue, and the exit code is 1.

Examples:
  atoll study
  atoll study trh-two-moons --scale smoke
  atoll study trh-table --scale cpu --out runs/studies/trh
  atoll study trh-table --scale cpu --rows 'linf-*' --seeds 0,1
  atoll study trh-lambda pretrained=ViT-L_16.npz data.root=imagenet --scale paper --engine ray --gpus 8 --processes 8
  atoll study locality-accuracy --scale cpu --cells runs/studies/locality
  atoll study my_study.py:MyStudy
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.answers import print_json
from atoll.cli.index import look_up
from atoll.cli.measure import add_device
from atoll.cli.output import print_lines, print_table, progress_bar
from atoll.cli.values import number, path, whole_number
from atoll.errors import InputError

if TYPE_CHECKING:
    from atoll.studies import StudyReport, StudyResults
    from atoll.studies.base import Study
    from atoll.studies.engine import CellOutcome, Engine


def arguments(parser: argparse.ArgumentParser) -> None:
    name = "name of the study, or file.py:Class (default: list all studies)"
    scale = "seconds (smoke), minutes on two cores (cpu), or as published (paper); default: smoke"
    cells = "folder of the runs, which studies of a family can share (default: cells in --out)"
    rows = "run only rows that match, such as '*-trh', and what they depend on; repeat for more (default: all)"
    engine = "run the cells one after another (sequential, the default) or on a Ray cluster (ray)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="value to use instead of the recipes'")
    scales = look_up("constants", "atoll.studies.base.SCALES")
    parser.add_argument("--scale", default="smoke", choices=scales, help=scale)
    parser.add_argument("--rows", action="append", default=[], metavar="PATTERN", help=rows)
    parser.add_argument("--seeds", type=seeds, metavar="N,...", help="run only these seeds (default: all)")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="folder of the study (default: runs/studies/NAME-SCALE)"
    )
    parser.add_argument("--cells", type=path, metavar="DIR", help=cells)
    parser.add_argument("--engine", default="sequential", choices=["sequential", "ray"], help=engine)
    parser.add_argument(
        "--address", metavar="HOST", help="address of the Ray cluster (default: RAY_ADDRESS, or this machine)"
    )
    parser.add_argument(
        "--processes", type=whole_number, default=1, metavar="N", help="processes that train each cell (default: 1)"
    )
    parser.add_argument(
        "--cpus", type=number, metavar="X", help="CPU cores per cell, with Ray (default: one per thread)"
    )
    parser.add_argument("--gpus", type=number, default=0, metavar="X", help="GPUs per cell, with Ray (default: 0)")
    add_device(parser)


def seeds(word: str) -> list[int]:
    """The value of ``--seeds``."""
    return [whole_number(part) for part in word.split(",")]


def computes(options: argparse.Namespace) -> bool:
    """Whether the command runs a study, instead of listing all."""
    return options.name is not None


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        _list(options.json)
        return 0
    if "=" in options.name:
        raise InputError(f"expected the name of a study before {options.name}; `atoll study` lists all studies")
    from atoll.studies import STUDIES
    from atoll.studies.engine import run_sequentially, run_study
    from atoll.studies.ray import RayEngine

    study: Study = STUDIES.resolve(options.name).cls()
    folder = options.out or Path("runs") / "studies" / f"{study.name}-{options.scale}"
    ray = RayEngine(options.address, options.cpus, options.gpus)
    engine: Engine = ray if options.engine == "ray" else run_sequentially
    with progress_bar("cells") as bar:
        task = bar.add_task(study.name, total=None, note="")

        def on_done(outcome: CellOutcome, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, note=outcome.cell.name)
            if outcome.numbers is None:
                line = f"{outcome.cell.name} failed: {outcome.reason}"
                bar.console.print(line, style="yellow", markup=False, soft_wrap=True)

        results, report = run_study(
            study,
            options.scale,
            folder,
            rows=options.rows,
            seeds=options.seeds,
            overrides=options.overrides,
            engine=engine,
            cells_folder=options.cells,
            processes=options.processes,
            # The same on all engines and machines; many cells are so small that more threads would be slower.
            threads=1 if options.threads == "auto" and "OMP_NUM_THREADS" not in os.environ else None,
            on_done=on_done,
        )
    if options.json:
        claims = [vars(claim) for claim in report.claims]
        failed = {cell.name: reason for cell, reason in results.failed.items()}
        print_json("study", {"study": study.name, "folder": str(folder), "claims": claims, "failed": failed})
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
    print_lines(f"results: {folder}")


def _list(as_json: bool) -> None:
    rows = look_up("tables", "studies")
    if as_json:
        studies = {name: {"title": title, "reference": reference} for name, (title, reference) in rows.items()}
        print_json("study", {"studies": studies})
    else:
        print_table("studies", ["name", "title", "reference"], [[name, *texts] for name, texts in rows.items()])
