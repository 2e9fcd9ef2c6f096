"""What the commands print for people: tables on standard output, progress on standard error."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from atoll.training.observers import Observer, Record

if TYPE_CHECKING:
    from atoll.stats import Accuracy, SampledAccuracy
    from atoll.training.trainer import Trainer

console = Console()
error_console = Console(stderr=True)


def print_lines(*lines: str, style: str | None = None) -> None:
    """Lines as they are, whatever names of users they contain."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; numbers (all columns but the first) are aligned right when every cell starts with a digit.

    Numbers are never broken: a table that is too wide goes on below, with its first column again.
    """
    places = range(len(columns))
    numeric = [i > 0 and bool(rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in places]
    longest = [max((len(row[i]) for row in rows), default=0) for i in places]
    # What a column needs: numbers are not broken, text may be, but not into letters.
    needs = [
        max(longest[i], len(columns[i])) if numeric[i] else min(16, max(longest[i], len(columns[i]))) for i in places
    ]
    if len(_groups(needs, console.width)) > 1:  # titles in several lines
        needs = [max([longest[i], *map(len, columns[i].split())]) if numeric[i] else needs[i] for i in places]
    for number, group in enumerate(_groups(needs, console.width)):
        table = Table(title=title if number == 0 else None, title_justify="left", title_style="bold")
        for i in group:
            name = "\n".join(textwrap.wrap(columns[i], needs[i])) if numeric[i] else columns[i]
            justify: JustifyMethod = "right" if numeric[i] else "left"
            table.add_column(name, justify=justify, no_wrap=numeric[i], overflow="fold", min_width=needs[i])
        for row in rows:
            # Names come from users; they are text, not rich's markup.
            table.add_row(*[row[i].replace("[", "\\[") for i in group])
        console.print(table)


def _groups(needs: Sequence[int], width: int) -> list[list[int]]:
    """Columns side by side, the first one in every group.

    >>> _groups([10, 20, 20, 20], 60), _groups([10, 90], 60)
    ([[0, 1, 2], [0, 3]], [[0, 1]])
    """
    groups, left = [[0]], 0
    for i, need in enumerate(needs[1:], 1):
        left -= need + 3  # with the frame
        if left < 0 and len(groups[-1]) > 1:
            groups.append([0])
        if len(groups[-1]) == 1:
            left = width - 1 - (needs[0] + 3) - (need + 3)
        groups[-1].append(i)
    return groups


def progress_bar(unit: str) -> Progress:
    """A bar on standard error, gone when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=error_console,
        transient=True,
    )


class TrainingProgress(Observer):
    """A bar over the whole run: images per second, accuracy of the epoch so far, time left; a line per epoch."""

    def start(self, trainer: Trainer) -> None:
        self.bar = progress_bar("steps")
        total = trainer.settings.epochs * trainer.steps_per_epoch
        self.task = self.bar.add_task("training", total=total, completed=trainer.step, note="")
        self.bar.start()
        self.began, self.first, self.epochs = time.monotonic(), trainer.step, trainer.settings.epochs
        self.shown = 0.0
        for note in trainer.data.notes:
            self.bar.console.print(note, style="dim", markup=False, soft_wrap=True)
        for fault in trainer.damaged:
            self.bar.console.print(f"passed over: {fault}", style="yellow", markup=False)
        if trainer.step:
            self.bar.console.print(f"resumed at step {trainer.step}", style="dim")

    def progress(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if now - self.shown < 0.2:
            return
        self.shown = now
        done = trainer.step + 1 - self.first
        speed = done * trainer.settings.batch_size / (now - self.began)
        means = trainer.sums.local_means()
        parts = [f"{100 * means[name]:.1f} % {name}" for name in ("clean", "robust") if name in means]
        note = f"epoch {trainer.epoch + 1}/{self.epochs}  {speed:,.0f} images/s  {'  '.join(parts)}"
        self.bar.update(self.task, completed=trainer.step + 1, note=note)

    def record(self, record: Record) -> None:
        if record["kind"] == "epoch":
            line = f"epoch {record['epoch']:>3.0f}  {describe(record)}"
            self.bar.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        self.bar.stop()


def describe(metrics: Mapping[str, Any]) -> str:
    """Metrics of an epoch in one line."""
    parts = []
    for name, value in metrics.items():
        if name.endswith(("_clean", "_robust", "_vra_estimate")):
            parts.append(f"{name.replace('_', ' ')} {100 * value:5.2f} %")
        elif name == "train_loss":
            parts.append(f"loss {value:.4f}")
    return "  ".join(parts)


def percent(accuracy: Accuracy | SampledAccuracy) -> str:
    """``87.50``, an accuracy in percent."""
    return f"{100 * accuracy.value:.2f}"


def percent_interval(accuracy: Accuracy | SampledAccuracy) -> list[str]:
    """The same, and its 95 % interval: ``84.2-90.3``."""
    low, high = accuracy.interval
    return [percent(accuracy), f"{100 * low:.1f}-{100 * high:.1f}"]
