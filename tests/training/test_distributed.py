"""Two processes do what one does; a lost one ends the run with something to resume from."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.training.checkpoint import Checkpoints
from support import METHODS, children, on_two_processes, run_command, script_environment, wait_for
from training import two_processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RECIPE = [
    "digits-at", "data.limit=256", "model.widths=[4,4]", "attack.steps=2", "trainer.epochs=3", "trainer.batch_size=32",
    "trainer.validation_steps=1", "trainer.test_steps=1",
]  # fmt: skip

# The command, and then a look at what is left of its process group: a thread of it may abort the process at its exit.
COMMAND = """
import sys
from atoll.cli import main
from support import gloo_threads
code = main(sys.argv[1:])
assert not gloo_threads(), gloo_threads()
sys.exit(code)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The same on one process and on two."""
    folder = tmp_path_factory.mktemp("processes")
    two_processes.main(folder / "one")
    on_two_processes(lambda: two_processes.main(folder / "two"), folder)
    return load_file(folder / "one"), load_file(folder / "two")


def test_two_half_batches_give_the_gradient_of_the_whole_batch(results):
    one, two = results
    assert one.keys() == two.keys()
    names = [name for name in one if name.startswith("gradient")]
    assert len(names) > 50
    for name in names:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_two_processes_train_to_the_same_weights(results):
    one, two = results
    names = [name for name in one if name.startswith("trained")]
    assert {name.split("/")[1] for name in names} == METHODS.keys()
    for name in names:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_all_processes_end_the_run_if_one_diverges(results):
    assert [int(result["stopped"]) for result in results] == [1, 1]


def test_an_evaluation_that_is_shared_out_gives_the_same_counts(results):
    one, two = results
    assert {"evaluated/clean", "evaluated/robust"} <= one.keys()
    assert all(int(one[name]) == int(two[name]) for name in one if name.startswith("evaluated"))


@pytest.mark.slow  # the tests above train on two processes as well
def test_torchrun_trains_and_only_one_process_writes(tmp_path):
    arguments = ["train", *RECIPE, "--out", str(tmp_path / "run"), "--json"]
    command = [*TORCHRUN, "--no-python", sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one process printed, once
    assert result["test"][-1]["clean"]["total"] == 360
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in lines if r["kind"] == "epoch"] == [1, 2, 3]


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_and_it_can_be_resumed(tmp_path):
    """Kill one of two processes; the run ends with an error, and resuming gives what an undisturbed run gives."""
    arguments = [*RECIPE, "trainer.epochs=6", "trainer.checkpoint_minutes=0.001"]
    run_command("train", *arguments, "--out", str(tmp_path / "straight"), processes=2, check=True)
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "atoll", "train", *arguments, "--out", str(tmp_path / "killed")],
        env=script_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        checkpoints = Checkpoints(tmp_path / "killed" / "checkpoints")
        wait_for(lambda: len(checkpoints.steps()) and checkpoints.steps()[-1] >= 5)
        worker = next(pid for pid in children(process.pid) if environment_of(pid).get("RANK") == "1")
        os.kill(worker, signal.SIGKILL)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "killed" / "result.json").exists()
    run_command("train", "--resume", "--out", str(tmp_path / "killed"), processes=2, check=True)
    finals = []
    for name in ("straight", "killed"):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints")
        finals.append(load_file(checkpoints.path(checkpoints.steps()[-1]) / "model.safetensors"))
    assert all(torch.equal(finals[0][k], finals[1][k]) for k in finals[0])


def environment_of(pid: int) -> dict[str, str]:
    content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(item.decode().split("=", 1) for item in content if b"=" in item)
