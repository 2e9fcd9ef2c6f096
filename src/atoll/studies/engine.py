"""Run a study: train and measure every cell once; a failed cell does not stop the others.

Files of a study::

    cells/NAME/          the run of a cell, with its numbers among its results; studies of a family may share them
    cells/NAME.json      the numbers of a cell that trains nothing
    README.md            command and versions, tables, figures, claims
    *.csv  *.png         each table and figure; without a figure, a plot of the first table
    raw.json             all numbers and failures
"""

from __future__ import annotations

import fnmatch
import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.config import to_plain
from atoll.data.fingerprint import first_few
from atoll.distributed import launch, requested_device, torchrun_world_size, use_device
from atoll.errors import AtollError, DamagedError, InputError, check_count
from atoll.files import finite, read_record, remove_stale, write_atomic, write_figure, write_json, write_record
from atoll.registry import class_path
from atoll.runs.recipe import expand_overrides
from atoll.runs.run import Run
from atoll.runs.train import environment, train
from atoll.studies.base import STUDIES, Cell, Numbers, Scale, Study, StudyReport, StudyResults
from atoll.studies.cell import CellSettings, load_cell, store_cell
from atoll.studies.table import Column, Table
from atoll.threads import keep_threads

# Options with paths of the user, which reports do not show.
PRIVATE = (".path", ".root", ".extra", ".pretrained")


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of a cell: its numbers, or the reason why it failed."""

    cell: Cell
    numbers: Numbers | None = None
    reason: str = ""


@dataclass(frozen=True)
class CellRunner:
    """Everything a worker needs to finish a cell, on any machine that shares the folder; see ``run_study``."""

    study: Study
    scale: Scale
    folder: Path
    overrides: tuple[str, ...] = ()
    cells: Path | None = None
    processes: int = 1
    device: str = "auto"
    threads: int = 1  # of every process, whichever engine runs it, because the number can change the last bits of a sum

    def run_folder(self, name: str) -> Path:
        return (self.cells or self.folder / "cells") / name

    def run(self, name: str) -> Run:
        """Return the run of a cell; it is trusted, because the user started the study that trains it."""
        return Run(self.run_folder(name), trust=True)

    def settings(self, cell: Cell) -> CellSettings:
        """Return everything the numbers of a cell depend on; with another definition, they are measured again."""
        study = self.study.family or self.study.name
        definition = {"study": study, "scale": self.scale, "user": self.overrides_for(cell), **cell.to_json()}
        return CellSettings(
            study=self.study.name, scale=self.scale, row=cell.row, cell_seed=cell.seed, definition=definition
        )

    def overrides_for(self, cell: Cell) -> list[str]:
        """Return the overrides of the user for a cell, with full keys."""
        pairs = map(split_pattern, self.overrides)
        overrides = [override for pattern, override in pairs if fnmatch.fnmatchcase(cell.row, pattern)]
        return expand_overrides(cell.recipe, cell.overrides, overrides) if cell.recipe and overrides else overrides

    def load(self, cell: Cell) -> Numbers | None:
        """Load the numbers of a finished cell; returns None if it is not finished."""
        settings = self.settings(cell)
        if cell.recipe is not None:
            result = load_cell(self.run(cell.name), settings)
            return None if result is None else result.numbers
        try:
            record = read_record(self.run_folder(f"{cell.name}.json"), "a cell")
        except (FileNotFoundError, DamagedError):  # measured again
            return None
        numbers: Numbers | None = record.get("numbers")
        return numbers if record.get("definition") == settings.definition else None

    def __call__(self, cell: Cell) -> CellOutcome:
        """Train, measure and store a cell, resuming an interrupted training; errors are returned as a reason."""
        log = self.run_folder(f"{cell.name}.error.txt")
        try:
            numbers = self.load(cell)
            if numbers is None:
                with use_device(self.device), keep_threads(self.threads):
                    numbers = self._measure(cell)
                log.unlink(missing_ok=True)
            return CellOutcome(cell, numbers)
        except Exception as error:  # other cells continue after any error
            write_atomic(log, traceback.format_exc().encode())
            reason = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            return CellOutcome(cell, reason=reason or type(error).__name__)

    def _measure(self, cell: Cell) -> Numbers:
        dependencies = {name: self.run(name) for name in cell.depends_on}
        settings = self.settings(cell)
        if cell.recipe is None:
            numbers: Numbers = to_plain(self.study.measure(cell, None, self.scale, dependencies))
            path = self.run_folder(f"{cell.name}.json")
            write_record(path, "a cell", {"definition": settings.definition, "numbers": numbers})
            return numbers
        overrides = merge_overrides(self.study.overrides(cell, dependencies), self.overrides_for(cell))
        folder = self.run_folder(cell.name)
        training = partial(_train, self.threads, cell.recipe, f"seed={cell.seed}", *overrides, out=folder, resume=True)
        if self.processes == 1:
            run = training()
        else:
            launch(self.processes, training)
            run = self.run(cell.name)
        return store_cell(run, settings, lambda: self.study.measure(cell, run, self.scale, dependencies)).numbers


def _train(threads: int, *arguments: Any, **options: Any) -> Run:
    """``train`` with a number of threads, also in a separate process."""
    with keep_threads(threads):
        return train(*arguments, **options)


def split_pattern(override: str) -> tuple[str, str]:
    """Split an override into the pattern of rows it applies to and the override itself.

    >>> split_pattern("*-vit_l16-*:pretrained=ViT-L_16.npz"), split_pattern("model={class_path: MLP}")
    (('*-vit_l16-*', 'pretrained=ViT-L_16.npz'), ('*', 'model={class_path: MLP}'))
    """
    key, equals, value = override.partition("=")
    pattern, colon, name = key.rpartition(":")
    return pattern if colon else "*", f"{name}{equals}{value}"


def merge_overrides(cell: Sequence[str], user: Sequence[str]) -> list[str]:
    """Merge the overrides of a cell with those of the user, which take precedence.

    A new class drops the arguments of the old one, so classes and whole sections of the user come first.  Another data
    set then gets the limit of the cell.

    >>> merge_overrides(["data.limit=100"], ["data.class_path=Npz", "data.path=mnist.npz"])
    ['data.class_path=Npz', 'data.limit=100', 'data.path=mnist.npz']
    """
    keys = {override: override.partition("=")[0] for override in user}
    classes = [override for override, key in keys.items() if key.endswith("class_path") or "." not in key]
    replaced = {override.partition("=")[0] for override in classes}
    own = [override for override in cell if override.partition("=")[0] not in replaced]
    return [*classes, *own, *(override for override in user if override not in classes)]


class Engine(Protocol):
    """Runs the cells of a study, each after the cells it depends on."""

    def __call__(self, runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]: ...


def run_sequentially(runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
    """Run one cell after another in this process."""
    failed: set[str] = set()
    for cell in sort_cells(cells):
        outcome = dependency_failure(cell, failed) or runner(cell)
        if outcome.numbers is None:
            failed.add(cell.name)
        yield outcome


def dependency_failure(cell: Cell, failed: set[str]) -> CellOutcome | None:
    """Return the outcome of a cell that depends on a failed cell, or None if it does not."""
    missing = [name for name in cell.depends_on if name in failed]
    return CellOutcome(cell, reason=f"depends on {', '.join(missing)}, which failed") if missing else None


def sort_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Sort cells so that each comes after those it depends on; the order is otherwise unchanged.

    >>> [cell.name for cell in sort_cells([Cell("b", depends_on=("a-0",)), Cell("a"), Cell("c")])]
    ['a-0', 'b-0', 'c-0']
    """
    known = {cell.name: cell for cell in cells}
    if len(known) < len(cells):
        raise InputError("cells: expected unique names, got duplicates")
    done: dict[str, Cell] = {}

    def add(cell: Cell, above: tuple[str, ...]) -> None:
        if cell.name in above:
            raise InputError(f"cells: expected no cycle, got {' -> '.join((*above, cell.name))}")
        for name in cell.depends_on:
            if name not in known:
                raise InputError(f"cell {cell.name}: expected to depend on cells of the same study, got {name}")
            if name not in done:
                add(known[name], (*above, cell.name))
        done.setdefault(cell.name, cell)

    for cell in cells:
        add(cell, ())
    return list(done.values())


def select_cells(
    cells: Sequence[Cell], rows: Sequence[str] = (), seeds: Sequence[int] | None = None
) -> tuple[list[Cell], str]:
    """Select cells by patterns of rows and by seeds, with the cells they depend on, and describe the selection.

    >>> cells = [Cell("a"), Cell("a", 1), Cell("b", 1, depends_on=("a-0",)), Cell("c", 1)]
    >>> [cell.name for cell in select_cells(cells, rows=["b*"])[0]]
    ['a-0', 'b-1']
    >>> select_cells(cells, ["[bc]"], [1])[1]
    'rows [bc], seeds 1: 3 of 4 cells, 1 of them because others depend on them'
    """
    for pattern in rows:
        if not any(fnmatch.fnmatchcase(cell.row, pattern) for cell in cells):
            known = first_few(list(dict.fromkeys(cell.row for cell in cells)), 5)
            raise InputError(f"rows: expected a pattern that matches rows of the study ({known}), got {pattern!r}")
    for seed in seeds or ():
        if all(cell.seed != seed for cell in cells):
            known = ", ".join(map(str, sorted({cell.seed for cell in cells})))
            raise InputError(f"seeds: expected seeds of the study ({known}), got {seed}")
    selected = {
        cell.name
        for cell in cells
        if (not rows or any(fnmatch.fnmatchcase(cell.row, pattern) for pattern in rows))
        and (seeds is None or cell.seed in seeds)
    }
    if not selected:
        raise InputError("rows and seeds: expected a selection of at least one cell, got none")
    needed = set(selected)
    for cell in reversed(sort_cells(cells)):
        if cell.name in needed:
            needed.update(cell.depends_on)
    parts = [f"rows {', '.join(rows)}"] if rows else []
    parts += [] if seeds is None else [f"seeds {', '.join(map(str, seeds))}"]
    more = f", {len(needed - selected)} of them because others depend on them" if needed - selected else ""
    description = f"{', '.join(parts)}: {len(needed)} of {len(cells)} cells{more}" if parts else ""
    return [cell for cell in cells if cell.name in needed], description


def run_study(
    study: Study,
    scale: Scale,
    folder: Path | str,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    engine: Engine = run_sequentially,
    cells_folder: Path | str | None = None,
    processes: int = 1,
    threads: int | None = None,
    on_done: Callable[[CellOutcome, int, int], None] | None = None,
) -> tuple[StudyResults, StudyReport]:
    """Run all unfinished cells and write the report.

    Args:
        study: the study to run.
        scale: ``smoke``, ``cpu`` or ``paper``.
        folder: folder of the study; rerun the study in the same folder to resume it.
        rows: patterns of rows such as ``*-trh``; only they run, with the cells they depend on (default: all).
        seeds: only these seeds run, with the cells they depend on (default: all).
        overrides: overrides for every recipe, such as the path of the data; ``PATTERN:key.sub=value`` applies only to
            rows that match the pattern.
        engine: runs the cells.
        cells_folder: folder of the runs, for studies of a family that share them.
        processes: number of processes that train a cell.
        threads: number of threads of each of them, on any engine (default: those of this process, shared between them).
        on_done: called after each cell with its outcome, the number of finished cells, and the total.
    """
    check_count(1, processes=processes, threads=threads)
    if torchrun_world_size() > 1:
        raise InputError("run a study without torchrun; set `processes` to train each cell on several processes")
    folder = Path(folder)
    everything = study.cells(scale)
    cells, selection = select_cells(everything, rows, seeds)
    for override in overrides:
        pattern, _ = split_pattern(override)
        if not any(fnmatch.fnmatchcase(cell.row, pattern) for cell in everything):
            expected = f"expected a pattern that matches rows of {study.name} before the colon"
            raise InputError(f"{override}: {expected}, got {pattern!r}")
    where = None if cells_folder is None else Path(cells_folder)
    threads = threads or max(1, torch.get_num_threads() // processes)
    runner = CellRunner(study, scale, folder, tuple(overrides), where, processes, requested_device(), threads)
    for cell in cells:
        check_required(study, scale, cell, runner.overrides_for(cell))
    remove_stale([*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")])
    outcomes: dict[Cell, CellOutcome] = {}
    for outcome in engine(runner, cells):
        outcomes[outcome.cell] = outcome
        if on_done is not None:
            on_done(outcome, len(outcomes), len(cells))
    numbers = {cell: values for cell in cells if (values := outcomes[cell].numbers) is not None}
    failed = {cell: outcomes[cell].reason for cell in cells if cell not in numbers}
    if not numbers:
        raise AtollError(f"study {study.name}: all cells failed; the first error was: {next(iter(failed.values()))}")
    results = StudyResults(scale, numbers, failed, {cell: runner.run(cell.name) for cell in numbers if cell.recipe})
    report = study.report(results)
    tables = {title: add_failure_column(table, results) for title, table in report.tables.items()}
    notes = [f"This report is partial ({selection}).", *report.notes] if selection else report.notes
    report = replace(report, tables=tables, notes=notes)
    arguments = [word for pattern in rows for word in ("--rows", pattern)]
    arguments += [] if seeds is None else ["--seeds", ",".join(map(str, seeds))]
    arguments += [] if processes == 1 else ["--processes", str(processes)]
    write_study(study, results, report, folder, overrides, arguments, selection)
    return results, report


def check_required(study: Study, scale: Scale, cell: Cell, overrides: Sequence[str]) -> None:
    """Raise an InputError if the user did not provide an override that is required to reproduce the paper."""
    given = {override.partition("=")[0] for override in overrides}
    for key, what in study.required(cell, scale).items():
        if key not in given:
            raise InputError(
                f"study {study.name}: row {cell.row} at scale {scale} requires {key}=FILE, {what};"
                f" use {key}=null to train without it"
            )


def add_failure_column(table: Table, results: StudyResults) -> Table:
    """Add a column with the reasons of failures to a table, if cells of its rows failed.

    >>> results = StudyResults("smoke", {}, {Cell("a", 0): "no data", Cell("a", 2): "no data"})
    >>> add_failure_column(Table([Column("x")], {"a": [None], "b": [None]}), results).texts()
    [['', 'x', 'failed'], ['a', '-', 'seeds 0, 2: no data'], ['b', '-', '-']]
    """
    seeds: dict[str, dict[str, list[str]]] = {}
    for cell, reason in results.failed.items():
        seeds.setdefault(cell.row, {}).setdefault(" ".join(reason.split()), []).append(str(cell.seed))
    if not seeds.keys() & table.rows.keys():
        return table
    texts = {
        row: "; ".join(f"seed{'s' * (len(of) > 1)} {', '.join(of)}: {reason}" for reason, of in reasons.items())
        for row, reasons in seeds.items()
    }
    rows = {row: [*values, texts.get(row)] for row, values in table.rows.items()}
    return Table([*table.columns, Column("failed")], rows)


def write_study(
    study: Study,
    results: StudyResults,
    report: StudyReport,
    folder: Path,
    overrides: Sequence[str] = (),
    arguments: Sequence[str] = (),
    selection: str = "",
) -> None:
    """Write README.md, a CSV file per table, a PNG file per figure, and raw.json."""
    lines = [f"# {study.title}", "", *provenance(study, results, overrides, arguments), ""]
    lines += [f"{study.reference}. Mean ± standard error over seeds.", ""]
    for note in report.notes:
        lines += [note, ""]
    for number, (title, table) in enumerate(report.tables.items()):
        name = "table" if number == 0 else f"table-{number + 1}"
        write_atomic(folder / f"{name}.csv", table.csv().encode())
        lines += [f"{title}:", "", table.markdown(), ""]
    first = next(iter(report.tables.values()), None)
    figures = report.figures or ({} if first is None else {"table": first.figure()})
    for name, figure in figures.items():
        write_figure(folder / f"{name}.png", figure, dpi=90)
        lines += [f"![{name}]({name}.png)", ""]
    if results.failed:
        reasons = [f"- {cell.name}: {' '.join(reason.split())}" for cell, reason in results.failed.items()]
        lines += ["Failed cells:", "", *reasons, ""]
    lines += ["## Claims", "", *(f"- {claim}" for claim in report.claims)]
    write_atomic(folder / "README.md", ("\n".join(lines) + "\n").encode())
    write_json(
        folder / "raw.json",
        {
            "study": study.name,
            "scale": results.scale,
            "selection": selection,
            "cells": [{**cell.to_json(), "numbers": finite(numbers)} for cell, numbers in results.numbers.items()],
            "failed": [{**cell.to_json(), "reason": reason} for cell, reason in results.failed.items()],
            "claims": [vars(claim) for claim in report.claims],
            "environment": environment(),
        },
    )


def provenance(
    study: Study, results: StudyResults, overrides: Sequence[str], arguments: Sequence[str] = ()
) -> list[str]:
    """Return how a page was created: command, date, versions, scale, seeds, and the number of failed cells."""
    command = ["atoll", "study", study_name(study), "--scale", results.scale, *arguments]
    for override in overrides:
        key, _, value = override.partition("=")
        private = f".{key.rpartition(':')[2]}".endswith(PRIVATE) and value != "null"
        command.append(f"{key}=..." if private else override)
    used, cells = environment(), [*results.numbers, *results.failed]
    seeds = ", ".join(map(str, sorted({cell.seed for cell in cells})))
    return [
        f"    {shlex.join(command)}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, atoll {used['atoll']}, torch {used['torch']}. Scale `{results.scale}`, seeds"
        f" {seeds}, {len(results.failed)} of {len(cells)} cells failed.",
    ]


def study_name(study: Study) -> str:
    """Return the name of a study for ``atoll study``: its name if it is registered, otherwise its class."""
    return study.name if study.name in STUDIES.members() else class_path(type(study))
