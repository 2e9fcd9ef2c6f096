"""How a study is run: every cell trained and measured once, kept, and a failure of one no obstacle to the others.

In its folder::

    cells/NAME/          the run of a cell; studies of one family may share a folder of cells
    cells/NAME.json      what was measured of it; its presence means that the cell is done
    README.md            tables, pictures, verdicts
    *.csv  *.png         each table and picture; where there is no picture, one of the first table
    raw.json             everything that was measured, and what failed
"""

from __future__ import annotations

import fnmatch
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from atoll.distributed import launch, started
from atoll.errors import AtollError, InputError
from atoll.files import finite, write_atomic, write_json
from atoll.runs.run import Run
from atoll.runs.train import environment, train
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.table import Column, Table

# Where somebody's files are is nobody else's business.
PRIVATE = (".path", ".root", ".extra", "pretrained")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: with numbers, or with the reason why not."""

    cell: Cell
    numbers: Numbers | None = None
    reason: str = ""


@dataclass(frozen=True)
class CellRunner:
    """All that a worker needs to finish a cell; may be sent to another process or machine that shares the folder.

    Args:
        study: what it is a cell of.
        scale: of the study.
        folder: of the study.
        overrides: of the user, for every recipe, or, as ``PATTERN:key.sub=value``, for rows of such a name.
        cells: where the runs are; in the folder of the study if None.
        processes: that train a cell.
    """

    study: Study
    scale: Scale
    folder: Path
    overrides: tuple[str, ...] = ()
    cells: Path | None = None
    processes: int = 1

    def run_folder(self, name: str) -> Path:
        return (self.cells or self.folder / "cells") / name

    def definition(self, cell: Cell) -> dict[str, Any]:
        """What numbers belong to: with another definition they are measured anew."""
        study = self.study.family or self.study.name
        return {"study": study, "scale": self.scale, "user": self.overrides_for(cell), **cell.to_json()}

    def overrides_for(self, cell: Cell) -> list[str]:
        """The user's overrides for a cell."""
        pairs = map(split_pattern, self.overrides)
        return [override for pattern, override in pairs if fnmatch.fnmatchcase(cell.row, pattern)]

    def kept(self, cell: Cell) -> Numbers | None:
        """The numbers of a cell that is done."""
        try:
            record = json.loads(self.run_folder(f"{cell.name}.json").read_text())
            numbers: Numbers = record["numbers"]
            return numbers if record["definition"] == self.definition(cell) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __call__(self, cell: Cell) -> Outcome:
        """Train, measure, keep; a training that was interrupted goes on.  Any error becomes a reason."""
        try:
            numbers = self.kept(cell)
            if numbers is None:
                numbers = self._measure(cell)
                write_json(
                    self.run_folder(f"{cell.name}.json"), {"definition": self.definition(cell), "numbers": numbers}
                )
            return Outcome(cell, numbers)
        except Exception as error:  # whatever it is, the other cells go on
            log = self.run_folder(f"{cell.name}.error.txt")
            write_atomic(log, traceback.format_exc().encode())
            told = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            return Outcome(cell, reason=told or type(error).__name__)

    def _measure(self, cell: Cell) -> Numbers:
        run = None
        needed = {name: Run(self.run_folder(name)) for name in cell.needs}
        if cell.recipe is not None:
            overrides = merged(self.study.overrides(cell, needed), self.overrides_for(cell))
            run = Run(self.run_folder(cell.name))
            training = partial(train, cell.recipe, f"seed={cell.seed}", *overrides, out=run.folder, resume=True)
            training() if self.processes == 1 else launch(self.processes, training)
        return self.study.measure(cell, run, self.scale, needed)


def split_pattern(override: str) -> tuple[str, str]:
    """For which rows of a study an override is, and what remains of it.

    >>> split_pattern("*-vit_l16-*:pretrained=ViT-L_16.npz"), split_pattern("model={class_path: MLP}")
    (('*-vit_l16-*', 'pretrained=ViT-L_16.npz'), ('*', 'model={class_path: MLP}'))
    """
    key, equals, value = override.partition("=")
    pattern, colon, name = key.rpartition(":")
    return pattern if colon else "*", f"{name}{equals}{value}"


def merged(cell: Sequence[str], user: Sequence[str]) -> list[str]:
    """Overrides of a cell, then those of the user, who has the last word.

    Another class drops the arguments of the one before, so classes and whole sections that the user names come first:
    other data then have the limit that the cell gives them.

    >>> merged(["data.limit=100"], ["data.class_path=Npz", "data.path=mnist.npz"])
    ['data.class_path=Npz', 'data.limit=100', 'data.path=mnist.npz']
    """
    keys = {override: override.partition("=")[0] for override in user}
    classes = [override for override, key in keys.items() if key.endswith("class_path") or "." not in key]
    named = {override.partition("=")[0] for override in classes}
    own = [override for override in cell if override.partition("=")[0] not in named]
    return [*classes, *own, *(override for override in user if override not in classes)]


class Engine(Protocol):
    """Runs the cells of a study, in any order that has every cell after those that it needs."""

    def __call__(self, work: CellRunner, cells: Sequence[Cell]) -> Iterator[Outcome]: ...


def run_sequentially(work: CellRunner, cells: Sequence[Cell]) -> Iterator[Outcome]:
    """One cell after the other, in this process."""
    failed: set[str] = set()
    for cell in ordered(cells):
        outcome = missing(cell, failed) or work(cell)
        if outcome.numbers is None:
            failed.add(cell.name)
        yield outcome


def missing(cell: Cell, failed: set[str]) -> Outcome | None:
    """What becomes of a cell that needs one that failed."""
    lost = [name for name in cell.needs if name in failed]
    return Outcome(cell, reason=f"needs {', '.join(lost)}, which failed") if lost else None


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Every cell after those that it needs, otherwise as they are.

    >>> [cell.name for cell in ordered([Cell("b", needs=("a-0",)), Cell("a"), Cell("c")])]
    ['a-0', 'b-0', 'c-0']
    """
    known = {cell.name: cell for cell in cells}
    if len(known) < len(cells):
        raise InputError("cells: expected different names, got the same twice")
    done: dict[str, Cell] = {}

    def add(cell: Cell, above: tuple[str, ...]) -> None:
        if cell.name in above:
            raise InputError(f"cells: expected no circle, got {' needs '.join((*above, cell.name))}")
        for name in cell.needs:
            if name not in known:
                raise InputError(f"cell {cell.name}: expected to need cells of the same study, got {name}")
            if name not in done:
                add(known[name], (*above, cell.name))
        done.setdefault(cell.name, cell)

    for cell in cells:
        add(cell, ())
    return list(done.values())


def run_study(
    study: Study,
    scale: Scale,
    folder: Path | str,
    *,
    overrides: Sequence[str] = (),
    engine: Engine = run_sequentially,
    cells_folder: Path | str | None = None,
    processes: int = 1,
    on_done: Callable[[Outcome, int, int], None] | None = None,
) -> tuple[Found, StudyReport]:
    """Run all cells that are not done yet, then write down what they show.

    Args:
        study: what to run.
        scale: ``smoke``, ``cpu`` or ``paper``.
        folder: where everything is kept; the same folder again goes on where it was.
        overrides: for every recipe, such as where the data are; ``PATTERN:key.sub=value`` is for rows of such a name.
        engine: who runs the cells.
        cells_folder: where the runs of the cells are, if studies of a family are to share them.
        processes: that train a cell, on the machine that runs it.
        on_done: called after each cell with its outcome, how many are done, and of how many.
    """
    if processes < 1:
        raise InputError(f"processes: expected at least 1, got {processes}")
    if started() > 1:
        raise InputError("a study is started once, without torchrun; its `processes` train each cell")
    folder = Path(folder)
    cells = study.cells(scale)
    for override in overrides:
        pattern, _ = split_pattern(override)
        if not any(fnmatch.fnmatchcase(cell.row, pattern) for cell in cells):
            raise InputError(f"{override}: expected rows of {study.name} before the colon, got {pattern!r}")
    where = None if cells_folder is None else Path(cells_folder)
    work = CellRunner(study, scale, folder, tuple(overrides), where, processes)
    outcomes: dict[Cell, Outcome] = {}
    for outcome in engine(work, cells):
        outcomes[outcome.cell] = outcome
        if on_done is not None:
            on_done(outcome, len(outcomes), len(cells))
    found = Found(
        scale,
        {cell: numbers for cell in cells if (numbers := outcomes[cell].numbers) is not None},
        {cell: outcomes[cell].reason for cell in cells if outcomes[cell].numbers is None},
        {cell: Run(work.run_folder(cell.name)) for cell in cells if outcomes[cell].numbers is not None and cell.recipe},
    )
    if not found.numbers:
        raise AtollError(f"study {study.name}: every cell failed; the first: {next(iter(found.failed.values()))}")
    findings = study.conclude(found)
    findings = replace(
        findings, tables={title: add_failure_column(table, found) for title, table in findings.tables.items()}
    )
    write_study(study, found, findings, folder, overrides)
    return found, findings


def add_failure_column(table: Table, found: Found) -> Table:
    """A table with a column for why cells failed, if some of its rows have such.

    >>> found = Found("smoke", {}, {Cell("a", 0): "no data", Cell("a", 2): "no data"})
    >>> add_failure_column(Table([Column("x")], {"a": [None], "b": [None]}), found).texts()
    [['', 'x', 'failed'], ['a', '-', 'seeds 0, 2: no data'], ['b', '-', '-']]
    """
    seeds: dict[str, dict[str, list[str]]] = {}
    for cell, reason in found.failed.items():
        seeds.setdefault(cell.row, {}).setdefault(" ".join(reason.split()), []).append(str(cell.seed))
    if not seeds.keys() & table.rows.keys():
        return table
    words = {
        row: "; ".join(f"seed{'s' * (len(of) > 1)} {', '.join(of)}: {reason}" for reason, of in reasons.items())
        for row, reasons in seeds.items()
    }
    return Table(
        [*table.columns, Column("failed")], {row: [*values, words.get(row)] for row, values in table.rows.items()}
    )


def write_study(study: Study, found: Found, findings: StudyReport, folder: Path, overrides: Sequence[str] = ()) -> None:
    """README.md, a CSV per table, a PNG per picture, raw.json."""
    said = "".join(f" {o}" for o in overrides if not o.partition("=")[0].endswith(PRIVATE))
    lines = [f"# {study.title}", "", f"{study.shows}. Scale `{found.scale}`; mean ± standard error over seeds.", ""]
    lines += [f"    atoll study {study.name} --scale {found.scale}{said}", ""]
    for words in findings.words:
        lines += [words, ""]
    for number, (title, table) in enumerate(findings.tables.items()):
        name = "table" if number == 0 else f"table-{number + 1}"
        write_atomic(folder / f"{name}.csv", table.csv().encode())
        lines += [f"{title}:", "", table.markdown(), ""]
    first = next(iter(findings.tables.values()), None)
    figures = findings.figures or ({} if first is None else {"table": first.figure()})
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=90)
        lines += [f"![{name}]({name}.png)", ""]
    if found.failed:
        lines += ["Cells that failed:", ""]
        lines += [f"- {cell.name}: {' '.join(reason.split())}" for cell, reason in found.failed.items()]
        lines += [""]
    lines += ["## Whether the claims held here", "", *(f"- {verdict}" for verdict in findings.verdicts)]
    write_atomic(folder / "README.md", ("\n".join(lines) + "\n").encode())
    write_json(
        folder / "raw.json",
        {
            "study": study.name,
            "scale": found.scale,
            "cells": [{**cell.to_json(), "numbers": finite(numbers)} for cell, numbers in found.numbers.items()],
            "failed": [{**cell.to_json(), "reason": reason} for cell, reason in found.failed.items()],
            "verdicts": [vars(verdict) for verdict in findings.verdicts],
            "environment": environment(),
        },
    )
