"""Metrics of a run: running means, and observers that record them without changing the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.distributed import all_sum, gather, rank, world_size
from atoll.files import append_record, read_records, record_line, write_atomic

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer

Record = Mapping[str, Any]


class Observer:
    """Base class of observers.  A record has a ``kind``: ``step``, ``epoch`` or ``test``."""

    def start(self, trainer: Trainer) -> None:
        """Called when the run starts or resumes at ``trainer.step``."""

    def progress(self, trainer: Trainer) -> None:
        """Called after every step; must be cheap, and should read ``trainer.sums`` only occasionally."""

    def record(self, record: Record) -> None:
        """Called with every record of metrics."""

    def end(self) -> None: ...


@dataclass
class RunningMeans:
    """Sums over an epoch, kept on the device because reading them after every step would stall a GPU."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.values[name] = self.values.get(name, 0.0) + value.detach().double().sum()

    def means(self) -> dict[str, float]:
        """Return means per example over all processes."""
        return RunningMeans({name: all_sum(value.clone()) for name, value in self.values.items()}).local_means()

    def local_means(self) -> dict[str, float]:
        """Return means per example over this process."""
        totals = {name: float(value) for name, value in self.values.items()}
        count = totals.pop("count", 0.0)
        return {name: total / count for name, total in totals.items()} if count else {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums of every process, in all processes."""
        everywhere = gather({name: float(value) for name, value in self.values.items()})
        return {
            name: torch.tensor([values[name] for values in everywhere], dtype=torch.float64) for name in everywhere[0]
        }

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the sums of this process; with another number of processes, the first one gets all sums."""
        for name, value in state.items():
            sums = value.reshape(-1)  # version 0.1 stored a number
            if len(sums) != world_size():
                sums = torch.cat([sums.sum()[None], sums.new_zeros(world_size() - 1)])
            self.values[name] = sums[rank()].to(device)


class JsonLines(Observer):
    """Appends every record to a file; on resume, drops records that are newer than the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, trainer: Trainer) -> None:
        """Keep the records up to the checkpoint, and damaged lines, which a report mentions."""
        records, damaged = read_records(self.path, old=True)
        lines = [record_line(record) for record in records if _is_metric(record) and self._stays(record, trainer)]
        write_atomic(self.path, b"".join([*damaged, *lines]))

    @staticmethod
    def _stays(record: Record, trainer: Trainer) -> bool:
        """Whether to keep a record on resume, because the run will not write it again.

        A checkpoint at the last step of an epoch is older than the record of the epoch.  Runs of 0 epochs are evaluated
        again.
        """
        if record["kind"] == "epoch":
            return bool(0 < record["epoch"] <= trainer.epoch)
        return bool(record["kind"] == "step" and record["step"] <= trainer.step)

    def record(self, record: Record) -> None:
        append_record(self.path, record)


def read_metrics(path: Path, epochs: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a metrics file, and return its records with what is damaged or missing.

    Args:
        path: the file.
        epochs: number of epochs that it must contain at least.
    """
    records, damaged = read_records(path, old=True)
    metrics = [record for record in records if _is_metric(record)]
    unreadable = len(damaged) + len(records) - len(metrics)
    faults = [f"{unreadable} unreadable lines are left out"] if unreadable else []
    missing = set(range(1, epochs + 1)) - {record["epoch"] for record in metrics if record["kind"] == "epoch"}
    return metrics, [*faults, *([f"{len(missing)} of {epochs} epochs are missing"] if missing else [])]


def _is_metric(record: Record) -> bool:
    numbers = (record.get(name) for name in ("step", "epoch"))
    return isinstance(record.get("kind"), str) and all(isinstance(number, int | float) for number in numbers)


class TensorBoard(Observer):
    """Writes scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.writer = SummaryWriter(str(self.folder), purge_step=trainer.step + 1 if trainer.step else None)

    def record(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, float | int) and name not in ("step", "epoch"):
                self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def end(self) -> None:
        self.writer.close()
