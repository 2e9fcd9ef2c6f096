"""Studies on a real Ray of two workers, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from atoll.studies import run_study
from atoll.studies.ray import RayEngine
from atoll.training.checkpoint import Checkpoints
from studies.toy import Toy, Trained
from support import children, script_environment, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", script_environment()["PYTHONPATH"])  # where workers find the toy
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@pytest.mark.usefixtures("cluster")
class TestOnRay:
    @pytest.mark.slow
    def test_a_killed_worker_is_replaced(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        results, _ = run_study(Toy(log, dies="b-1"), "smoke", tmp_path / "study", engine=RayEngine())
        alone, _ = run_study(Toy(tmp_path / "other"), "smoke", tmp_path / "alone")
        assert results.numbers == alone.numbers
        assert not results.failed
        lines = [line.split() for line in log.read_text().splitlines()]
        assert sum(name == "b-1" for name, *_ in lines) == 2  # killed, then retried
        assert len({pid for _, pid, *_ in lines}) >= 2  # processes
        assert lines.index(next(line for line in lines if line[0] == "a-0")) < lines.index(
            next(line for line in lines if line[0] == "c-0")
        )

    def test_failures_are_reported(self, tmp_path: Path) -> None:
        results, _ = run_study(Toy(tmp_path / "log", fails=("a-0",)), "smoke", tmp_path / "study", engine=RayEngine())
        assert {cell.name for cell in results.failed} == {"a-0", "c-0"}
        assert len(results.numbers) == 5

    @pytest.mark.slow
    def test_a_killed_worker_takes_its_processes_along_and_its_training_resumes(self, tmp_path: Path) -> None:
        study = Trained(epochs=40)
        cells = tmp_path / "killed" / "cells" / "even-0" / "checkpoints"
        lost: list[int] = []

        def kill() -> None:
            wait_for(lambda: len(Checkpoints(cells).steps()) >= 2, seconds=120)
            (worker,) = (pid for pid in processes() if command(pid).startswith("ray::_finish"))
            lost.extend(child for child in children(worker) if "spawn_main" in command(child))
            os.kill(worker, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        results, _ = run_study(study, "smoke", tmp_path / "killed", engine=RayEngine(), processes=2)
        killer.join()
        assert len(lost) == 2
        assert not set(lost) & set(processes())
        alone, _ = run_study(study, "smoke", tmp_path / "alone", processes=2)
        assert results.numbers == alone.numbers  # every weight, bit for bit


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and command(int(path.name))]


def command(pid: int) -> str:
    """Nothing if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
