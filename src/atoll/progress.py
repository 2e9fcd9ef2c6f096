"""Progress bars for terminals and notebooks.  The library shows them only if asked."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from atoll.distributed import is_main

_SECONDS = 0.2  # between two updates in a notebook


class ProgressBar(Progress):
    """A bar on standard error that is gone when it is done; in a notebook, an output of the cell that stays.

    Tasks have a ``note``, a text behind the bar.  (In notebooks, rich itself would need ipywidgets.)

    Args:
        unit: of what is counted.
        console: where to print.
    """

    def __init__(self, unit: str = "", console: Console | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not is_main(),
        )
        self._cell: Any = None  # output of a notebook's cell
        self._shown = 0.0

    def start(self) -> None:
        if self.disable or not self.console.is_jupyter:
            super().start()
            return
        notebook: Any = importlib.import_module("IPython.display")
        self._cell = notebook.display(self, display_id=True)

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        if self._cell is not None and time.monotonic() - self._shown > _SECONDS:
            self._shown = time.monotonic()
            self._cell.update(self)

    def stop(self) -> None:
        if self._cell is None:
            super().stop()
        else:
            self._cell.update(self)


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str, float, int], None]]:
    """A bar; yields what to call with what is under way, how much is done, and of how much."""
    with ProgressBar() as bar:
        task = bar.add_task(title, total=None, note="")

        def report(what: str, done: float, total: int) -> None:
            bar.update(task, completed=int(done), total=total, note=what)

        yield report
