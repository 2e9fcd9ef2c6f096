"""Runs the cells of a study on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import InputError
from atoll.studies.base import Cell
from atoll.studies.engine import CellOutcome, CellRunner, dependency_failure, sort_cells

RETRIES = 3


@dataclass(frozen=True)
class RayEngine:
    """Runs every cell as a Ray task.  All machines of the cluster must share the folder of the study.

    Ray restarts a task whose worker dies; the training then resumes from its last checkpoint.

    Args:
        address: address of the cluster; None to use ``RAY_ADDRESS`` or to start a cluster on this machine.
        cpus: number of cores per cell; one per process if None.
        gpus: number of GPUs per cell.
    """

    address: str | None = None
    cpus: float | None = None
    gpus: float = 0

    def __call__(self, runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        ray = _ray()
        starts_ray = not ray.is_initialized()
        if starts_ray:
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            # Absolute paths, because workers have other working directories.
            absolute = replace(runner, folder=runner.folder.resolve(), cells=runner.run_folder("").resolve())
            yield from self._run(ray, absolute, sort_cells(cells))
        finally:
            if starts_ray:
                ray.shutdown()

    def _run(self, ray: Any, runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        cpus = runner.processes if self.cpus is None else self.cpus
        task = ray.remote(num_cpus=cpus, num_gpus=self.gpus, max_retries=RETRIES)(_finish)
        waiting = list(cells)
        running: dict[Any, Cell] = {}
        done: set[str] = set()
        failed: set[str] = set()
        while waiting or running:
            for cell in list(waiting):
                if failure := dependency_failure(cell, failed):
                    waiting.remove(cell)
                    failed.add(cell.name)
                    yield failure
                elif done.issuperset(cell.depends_on):
                    waiting.remove(cell)
                    running[task.remote(runner, cell)] = cell
            if not running:
                continue
            (ready,), _ = ray.wait(list(running), num_returns=1)
            cell = running.pop(ready)
            try:
                outcome: CellOutcome = ray.get(ready)
            except ray.exceptions.RayError as error:
                outcome = CellOutcome(cell, reason=f"the worker died {RETRIES + 1} times: {type(error).__name__}")
            (failed if outcome.numbers is None else done).add(cell.name)
            yield outcome


def _finish(runner: CellRunner, cell: Cell) -> CellOutcome:
    return runner(cell)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray requires Ray; run `pip install 'atoll[ray]'`") from None
    return ray
