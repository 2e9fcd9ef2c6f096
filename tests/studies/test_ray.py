"""Studies on a real Ray of two workers: killed workers, and clusters that cannot run a study."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from atoll.cli import main
from atoll.errors import InputError
from atoll.studies import ray as module
from atoll.studies import run_study
from atoll.studies.ray import RayEngine
from atoll.threads import keep_threads
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

    def test_a_failed_cell_is_in_the_exit_code(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        study = tmp_path / "fails.py"
        study.write_text(
            "from pathlib import Path\n"
            "from studies.toy import Toy\n"
            "class Fails(Toy):\n"
            f"    def __init__(self): super().__init__(Path({str(tmp_path / 'log')!r}), fails=('a-0',))\n"
        )
        command = ["study", f"{study}:Fails", "--out", str(tmp_path / "study"), "--engine", "ray", "--json"]
        assert main([*command, "--rows", "b", "--seeds", "0,2"]) == 0
        assert not json.loads(capsys.readouterr().out)["failed"]
        assert main(command) == 1
        assert json.loads(capsys.readouterr().out)["failed"].keys() == {"a-0", "c-0"}

    def test_cells_are_selected_on_ray(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        results, _ = run_study(Toy(log), "smoke", tmp_path / "study", rows=["c"], engine=RayEngine())
        assert [cell.name for cell in results.numbers] == ["c-0", "a-0"]

    @pytest.mark.parametrize("request_of", [{"cpus": 3}, {"gpus": 1}, {"cpus": 0.5, "gpus": 0.5}])
    def test_an_impossible_request_is_refused(self, tmp_path: Path, request_of: dict[str, float]) -> None:
        expected = r"a cell needs .* on one machine, but the machines of the cluster have 2 and 0; change --cpus"
        with pytest.raises(InputError, match=expected):
            run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", engine=RayEngine(**request_of))
        with pytest.raises(InputError, match="a cell needs 6 CPUs and 0 GPUs"):
            run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", processes=2, threads=3, engine=RayEngine())
        assert not (tmp_path / "log").exists()

    def test_a_machine_that_cannot_load_the_study_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only this process finds the module of the study, like a package that a machine lacks."""
        (tmp_path / "missing_package.py").write_text("from studies.toy import Toy\nclass Mine(Toy): pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        study = importlib.import_module("missing_package").Mine(tmp_path / "log")
        expected = r"machine .* cannot run the study: it cannot load the study \(ModuleNotFoundError: No module named"
        with pytest.raises(InputError, match=expected):
            run_study(study, "smoke", tmp_path / "study", engine=RayEngine())
        installed = importlib.metadata.version
        other = {"atoll": "0.0"}
        monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or installed(name))
        with pytest.raises(InputError, match=r"it has atoll .* instead of 0\.0"):
            run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", engine=RayEngine())
        assert not (tmp_path / "log").exists()

    def test_a_machine_without_the_folder_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "temporary_path", lambda path: tmp_path / "here")
        monkeypatch.setattr(Path, "touch", lambda path: None)
        with pytest.raises(InputError, match=f"cannot run the study: it does not see the folder {tmp_path}"):
            run_study(Toy(tmp_path / "log"), "smoke", tmp_path / "study", engine=RayEngine())

    @pytest.mark.slow
    def test_cells_have_the_threads_of_this_process_and_the_same_bits(self, tmp_path: Path) -> None:
        """Ray sets OMP_NUM_THREADS to the number of cores of a cell."""
        study = Trained(epochs=1)
        with keep_threads(2):
            alone, _ = run_study(study, "smoke", tmp_path / "alone")
            results, _ = run_study(study, "smoke", tmp_path / "ray", engine=RayEngine(cpus=1))
            assert torch.get_num_threads() == 2
        assert results.numbers == alone.numbers
        assert [(numbers["threads"], numbers["measured with"]) for numbers in results.numbers.values()] == [(2, 2)] * 2

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


@pytest.mark.parametrize("address", ["nonsense", pytest.param("127.0.0.1:9", marks=pytest.mark.slow)])
def test_a_cluster_that_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    """Ray itself would try for two minutes and then end this process."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("connected"))
    monkeypatch.setattr(module, "CONNECT", 15.0)
    command = ["study", "trh-two-moons", "--out", str(tmp_path / "study"), "--engine", "ray", "--address", address]
    assert main(command) == 1
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    reason = "no answer within 15 seconds" if "9" in address else "Invalid address format"
    assert f"cannot connect to a Ray cluster at {address} (" in sentence
    assert reason in sentence
