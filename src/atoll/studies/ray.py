"""Runs the cells of a study on a Ray cluster."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import InputError
from atoll.files import temporary_path
from atoll.studies.base import Cell
from atoll.studies.engine import CellOutcome, CellRunner, dependency_failure, sort_cells

RETRIES = 3
CONNECT = 25.0  # seconds until a cluster must answer; Ray itself tries for two minutes and then ends the process
ANSWER = 300.0  # seconds until a machine must have imported the package
_CONNECT = "import ray, sys; ray.init(sys.argv[1], include_dashboard=False, log_to_driver=False)"


@dataclass(frozen=True)
class RayEngine:
    """Runs every cell as a Ray task.  All machines of the cluster must share the folder of the study.

    Ray restarts a task whose worker dies; the training then resumes from its last checkpoint.  Raises an InputError
    before any work if the cluster does not answer, if no machine can run a cell, or if a machine lacks the package.

    Args:
        address: address of the cluster; None to use ``RAY_ADDRESS`` or to start a cluster on this machine.
        cpus: number of cores per cell; one per thread of each process if None.
        gpus: number of GPUs per cell.
    """

    address: str | None = None
    cpus: float | None = None
    gpus: float = 0

    def __call__(self, runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        ray = _ray()
        starts_ray = not ray.is_initialized()
        if starts_ray:
            address = self.address or os.environ.get("RAY_ADDRESS")
            if address not in (None, "local"):
                _check_address(address)
            ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            # Absolute paths, because workers have other working directories.
            absolute = replace(runner, folder=runner.folder.resolve(), cells=runner.run_folder("").resolve())
            _check_machines(ray, absolute, self._find_machines(ray, runner))
            yield from self._run(ray, absolute, sort_cells(cells))
        finally:
            if starts_ray:
                ray.shutdown()

    def _cpus(self, runner: CellRunner) -> float:
        return runner.processes * runner.threads if self.cpus is None else self.cpus

    def _find_machines(self, ray: Any, runner: CellRunner) -> dict[str, str]:
        """Return the machines that can run a cell, by the id that Ray gives them."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        needed = {"CPU": self._cpus(runner), "GPU": self.gpus}
        fit = {
            node["NodeID"]: node["NodeManagerHostname"]
            for node in nodes
            if all(node["Resources"].get(name, 0) >= count for name, count in needed.items())
        }
        if not fit:
            texts = [f"{node['Resources'].get('CPU', 0):g} and {node['Resources'].get('GPU', 0):g}" for node in nodes]
            raise InputError(
                f"a cell needs {needed['CPU']:g} CPUs and {needed['GPU']:g} GPUs on one machine, but the machines of"
                f" the cluster have {', '.join(sorted(set(texts)))}; change --cpus, --gpus, --processes or"
                " OMP_NUM_THREADS"
            )
        return fit

    def _run(self, ray: Any, runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        task = ray.remote(num_cpus=self._cpus(runner), num_gpus=self.gpus, max_retries=RETRIES)(_finish)
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
            except ray.exceptions.RayTaskError as error:  # before the cell began
                outcome = CellOutcome(cell, reason=f"the worker failed: {str(error).strip().splitlines()[-1]}")
            except ray.exceptions.RayError as error:
                outcome = CellOutcome(cell, reason=f"the worker died {RETRIES + 1} times: {type(error).__name__}")
            (failed if outcome.numbers is None else done).add(cell.name)
            yield outcome


def _finish(runner: CellRunner, cell: Cell) -> CellOutcome:
    return runner(cell)


def _check_address(address: str) -> None:
    """Raise an InputError if no cluster answers, which only another process can find out in a limited time."""
    command = [sys.executable, "-c", _CONNECT, address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT, check=False)
    except subprocess.TimeoutExpired:
        fault = f"no answer within {CONNECT:g} seconds"
    else:
        if not answer.returncode:
            return
        fault = (answer.stderr.strip().splitlines() or ["it ended without an answer"])[-1]
    raise InputError(
        f"address: cannot connect to a Ray cluster at {address} ({fault}); start one with `ray start --head`"
    )


def _check_machines(ray: Any, runner: CellRunner, machines: dict[str, str]) -> None:
    """Raise an InputError if a machine cannot load the study, has another version, or does not see the folder."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def probe(content: bytes, versions: dict[str, str], mark: str) -> str | None:
        # Ray pickles this function by value, as a machine may lack the package.
        import importlib.metadata
        import os
        import pickle

        try:
            for name, version in versions.items():
                if (own := importlib.metadata.version(name)) != version:
                    return f"it has {name} {own} instead of {version}"
            pickle.loads(content)
        except Exception as error:
            return f"it cannot load the study ({type(error).__name__}: {error})"
        return None if os.path.exists(mark) else f"it does not see the folder {os.path.dirname(mark)}"

    runner.folder.mkdir(parents=True, exist_ok=True)
    mark = temporary_path(runner.folder / "shared")
    mark.touch()
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(probe)
        versions = {name: importlib.metadata.version(name) for name in ("atoll", "torch")}
        arguments = ray.cloudpickle.dumps(runner), versions, str(mark)
        answers = {
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments): name
            for node, name in machines.items()
        }
        while answers:
            ready, _ = ray.wait(list(answers), num_returns=1, timeout=ANSWER)
            machine = answers.pop(ready[0]) if ready else next(iter(answers.values()))
            try:
                fault = ray.get(ready[0]) if ready else f"it does not answer within {ANSWER:g} seconds"
            except ray.exceptions.RayError as error:
                fault = f"its worker failed ({str(error).strip().splitlines()[-1]})"
            if fault:
                raise InputError(f"machine {machine} of the Ray cluster cannot run the study: {fault}")
    finally:
        mark.unlink(missing_ok=True)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--engine ray requires Ray; run `pip install 'atoll[ray]'`") from None
    return ray
