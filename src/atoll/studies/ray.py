"""The cells of a study spread over a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import InputError
from atoll.studies.base import Cell
from atoll.studies.engine import CellRunner, Outcome, missing, ordered

RETRIES = 3


@dataclass(frozen=True)
class RayEngine:
    """An engine: every cell is a Ray task, on as many machines as the cluster has; they share the study's folder.

    A task whose worker dies is started again by Ray, and its training goes on from its last checkpoint.

    Args:
        address: of the cluster; None for the one that ``RAY_ADDRESS`` names, or a new one on this machine.
        cpus: cores for a cell; one for each of its processes if None.
        gpus: GPUs for a cell.
    """

    address: str | None = None
    cpus: float | None = None
    gpus: float = 0

    def __call__(self, work: CellRunner, cells: Sequence[Cell]) -> Iterator[Outcome]:
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            # Workers have folders of their own to be in.
            where = replace(work, folder=work.folder.resolve(), cells=work.run_folder("").resolve())
            yield from self._spread(ray, where, ordered(cells))
        finally:
            if ours:
                ray.shutdown()

    def _spread(self, ray: Any, work: CellRunner, cells: Sequence[Cell]) -> Iterator[Outcome]:
        cpus = work.processes if self.cpus is None else self.cpus
        task = ray.remote(num_cpus=cpus, num_gpus=self.gpus, max_retries=RETRIES)(_finish)
        waiting = list(cells)
        running: dict[Any, Cell] = {}
        done: set[str] = set()
        failed: set[str] = set()
        while waiting or running:
            for cell in list(waiting):
                if lost := missing(cell, failed):
                    waiting.remove(cell)
                    failed.add(cell.name)
                    yield lost
                elif done.issuperset(cell.needs):
                    waiting.remove(cell)
                    running[task.remote(work, cell)] = cell
            if not running:
                continue
            (ready,), _ = ray.wait(list(running), num_returns=1)
            cell = running.pop(ready)
            try:
                outcome: Outcome = ray.get(ready)
            except ray.exceptions.RayError as error:
                outcome = Outcome(cell, reason=f"its worker was lost {RETRIES + 1} times: {type(error).__name__}")
            (failed if outcome.numbers is None else done).add(cell.name)
            yield outcome


def _finish(work: CellRunner, cell: Cell) -> Outcome:
    return work(cell)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray: expected Ray to be installed; pip install 'atoll[ray]'") from None
    return ray
