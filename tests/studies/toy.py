"""Quick studies, in a module that Ray's workers can import."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from atoll.errors import InputError
from atoll.runs.run import Run
from atoll.studies import Cell, Claim, Column, Study, StudyResults, Table
from atoll.studies.base import Numbers, Scale


class Toy(Study):
    """Rows a and b with three seeds; cells in ``fails`` raise, the process of ``dies`` is killed once."""

    name = "toy"
    title = "A toy"
    reference = "Nothing"

    def __init__(self, log: Path, fails: tuple[str, ...] = (), dies: str = "") -> None:
        self.log, self.fails, self.dies = log, fails, dies

    def cells(self, scale: Scale) -> list[Cell]:
        last = [Cell("c", depends_on=("a-0",))]
        return [*last, *(Cell(row, seed) for row in ("a", "b") for seed in range(3))]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        with self.log.open("a") as file:
            file.write(f"{cell.name} {os.getpid()} {' '.join(dependencies)}\n")
        if cell.name in self.fails:
            raise InputError(f"{cell.name} <b>fails</b> | here")
        if cell.name == self.dies and self.log.read_text().count(cell.name) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return {"x": {"a": 1.0, "b": 2.0, "c": 3.0}[cell.row] + 0.1 * cell.seed}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"x": Table([Column("x", "high")], {row: [results.mean(row, "x")] for row in results.rows})}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [Claim("b is more than a", "supported", "by 1")]


class Trained(Study):
    """A short run, and one whose batches cannot be split between two processes."""

    name = "trained"
    title = "A training"
    reference = "Nothing"

    def __init__(self, epochs: int = 2) -> None:
        self.epochs = epochs

    def cells(self, scale: Scale) -> list[Cell]:
        short = (f"trainer.epochs={self.epochs}", "trainer.checkpoint_minutes=0.001", "trainer.test_steps=0")
        tiny = ("data.limit=128", "model.widths=[4,4]", "attack.steps=2", *short)
        return [Cell("even", 0, "digits-at", tiny), Cell("odd", 0, "digits-at", (*tiny, "trainer.batch_size=33"))]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        environment = json.loads((run.folder / "environment.json").read_text())
        weights = torch.cat([p.flatten() for p in run.model("last").parameters()])
        used = {name: environment[name] for name in ("processes", "threads")}
        return {**used, "measured with": torch.get_num_threads(), "weights": weights.tolist()}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"processes": Table([Column("n")], {r: [results.mean(r, "processes")] for r in results.rows})}
