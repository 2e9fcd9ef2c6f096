"""The numbers of a cell of a study, stored as a result of its run, so that reports show them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from atoll.config import to_plain
from atoll.display import TextTable, cell
from atoll.errors import InputError
from atoll.files import open_for_writing
from atoll.measure import (
    MEASUREMENTS,
    SEEDS,
    Context,
    Environment,
    Measurement,
    Ranges,
    Result,
    Settings,
    load_result,
    save_result,
)
from atoll.runs.run import Run
from atoll.subject import Subject


@dataclass(frozen=True, kw_only=True)
class CellSettings(Settings):
    """Settings of a cell: the study and the cell."""

    kind: ClassVar[str] = "cell"
    ranges: ClassVar[Ranges] = {"cell_seed": SEEDS}
    study: str
    scale: str
    row: str
    cell_seed: int
    # Everything the numbers depend on: study or family, scale, recipe, overrides.
    definition: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CellResult(Result):
    """The numbers of a cell by name.  The subject is the last checkpoint; some numbers may describe other ones."""

    kind: ClassVar[str] = "cell"
    settings: CellSettings
    numbers: dict[str, Any]

    def table(self) -> TextTable:
        rows = [[name, cell(value)] for name, value in self.numbers.items() if isinstance(value, float | int | str)]
        return TextTable(
            f"{self.settings.study}: {self.settings.row}, seed {self.settings.cell_seed}", ["", "value"], rows
        )


@MEASUREMENTS.register("cell", own_name=False)
class MeasureCell(Measurement):
    """Numbers of a cell of a study; measured by ``atoll study``."""

    settings = CellSettings
    result = CellResult

    def measure(self, subject: Subject, settings: CellSettings, context: Context) -> dict[str, Any]:
        raise InputError(f"cell: can only be measured by its study; run `atoll study {settings.study}`")


def load_cell(run: Run, settings: CellSettings) -> CellResult | None:
    """Load the result of a finished cell; returns None if there is none, or if the run was trained again since."""
    if not run.is_finished:
        return None
    results = (r for r in run.results("cell") if isinstance(r, CellResult) and not r.stale)
    return next((result for result in results if result.settings.definition == settings.definition), None)


def store_cell(run: Run, settings: CellSettings, measure: Callable[[], dict[str, Any]]) -> CellResult:
    """Measure a cell and store its numbers with the run."""
    began = time.monotonic()
    numbers = measure()
    subject = run.subject("last")
    result = CellResult(
        subject=subject.record,
        inputs="",  # numbers may be measured on different points
        points=0,
        settings=settings,
        environment=Environment.current(),
        seconds=time.monotonic() - began,
        numbers=to_plain(numbers),
    )
    digest = hashlib.sha256(json.dumps(settings.definition, sort_keys=True).encode()).hexdigest()[:16]
    folder = run.folder / "results" / "cell" / digest
    with open_for_writing(folder, run.folder):
        save_result(result, folder)
    stored = load_result(folder)
    assert isinstance(stored, CellResult)
    return stored
