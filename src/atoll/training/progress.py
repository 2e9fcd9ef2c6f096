"""What people see while a model is trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from atoll.progress import ProgressBar
from atoll.training.observers import Observer, Record

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


class TrainingProgress(Observer):
    """A bar over the whole run: images per second, accuracy of the epoch so far, time left; a line per epoch.

    Args:
        console: where to print; standard error, or the output of a notebook's cell, if None.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console

    def start(self, trainer: Trainer) -> None:
        self.bar = ProgressBar("steps", self.console)
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
            self.bar.update(self.task, completed=record["step"])
            line = f"epoch {record['epoch']:>3.0f}  {describe(record)}"
            self.bar.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        self.bar.stop()


def describe(metrics: Mapping[str, Any]) -> str:
    """Metrics of an epoch in one line.

    >>> describe({"train_loss": 0.25, "validation_clean": 0.9, "lr": 0.1})
    'loss 0.2500  validation clean 90.00 %'
    """
    parts = []
    for name, value in metrics.items():
        if name.endswith(("_clean", "_robust", "_vra_estimate")):
            parts.append(f"{name.replace('_', ' ')} {100 * value:5.2f} %")
        elif name == "train_loss":
            parts.append(f"loss {value:.4f}")
    return "  ".join(parts)
