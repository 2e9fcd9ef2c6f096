"""Two processes do what one does; a lost one ends the run with something to resume from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll import distributed
from atoll.cli import main
from atoll.distributed import all_sum, process_group, rank
from atoll.errors import AtollError, Interrupted
from atoll.files import open_for_writing
from atoll.training import trainer as trainer_module
from atoll.training.checkpoint import Checkpoints
from atoll.training.observers import JsonLines, Observer, read_metrics
from pretend import DEVICE, accelerator
from support import (
    METHODS,
    SMALL,
    assert_identical,
    children,
    on_two_processes,
    run_command,
    script_environment,
    tiny_trainer,
    wait_for,
    weights,
)
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


class StopOne(Observer):
    """A signal that arrives at one process only, in the middle of the second epoch."""

    def progress(self, trainer):
        if trainer.step == 6:
            trainer.stop()


def final_weights(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    return load_file(checkpoints.path(checkpoints.steps()[-1]) / "model.safetensors")


def recorded(folder):
    return tiny_trainer(folder=folder, observers=[JsonLines(folder / "metrics.jsonl")])


def test_a_run_of_two_processes_stops_at_one_step_and_resumes_to_the_same_weights_and_losses(tmp_path):
    straight, resumed, alone = (tmp_path / name for name in ("straight", "resumed", "alone"))

    def share():
        with process_group():
            recorded(straight).fit()
            for folder in (resumed, alone):
                trainer = recorded(folder)
                if rank() == 1:
                    trainer.observers = (StopOne(),)
                with pytest.raises(Interrupted, match="Interrupted at step 7"):
                    trainer.fit()
            recorded(resumed).fit(resume=True)

    on_two_processes(share, tmp_path)
    assert_identical(final_weights(resumed), final_weights(straight))
    records, faults = read_metrics(straight / "metrics.jsonl", 3)
    assert not faults
    # The loss of the second epoch includes what both processes did before the interruption.
    assert read_metrics(resumed / "metrics.jsonl", 3)[0] == records
    recorded(alone).fit(resume=True)
    ours = read_metrics(alone / "metrics.jsonl", 3)[0]
    losses = [[record["train_loss"] for record in run if record["kind"] == "epoch"] for run in (records, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("other", ["empty", "stale", "changed", "only the second has checkpoints"])
def test_processes_with_different_checkpoints_do_not_train(tmp_path, other):
    """Each process has a folder of its own, as on machines without a shared disk."""
    trainer = tiny_trainer(folder=tmp_path / "0", epochs=2)
    trainer.fit()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    assert Checkpoints(tmp_path / "1" / "checkpoints").steps() == [5, 10]
    if other == "stale":
        shutil.rmtree(tmp_path / "1" / "checkpoints" / "00000010")
    elif other == "changed":
        shutil.rmtree(tmp_path / "1")
        tiny_trainer("trades", folder=tmp_path / "1", epochs=2).fit()
    else:
        shutil.rmtree(tmp_path / ("1" if other == "empty" else "0"))
    before = files(tmp_path / "0") | files(tmp_path / "1")

    def share():
        with process_group():
            trainer = tiny_trainer(folder=tmp_path / str(rank()), epochs=3)
            own = f"{tmp_path}/1/checkpoints differs from that of process 0, which "
            own += "starts anew" if "only" in other else "resumes from step 10"
            with pytest.raises(AtollError, match="use a disk that all machines share") as caught:
                trainer.fit(resume=True)
            assert str(caught.value).startswith(own if rank() else f"process 1 of 2: {own}")
            assert trainer.step == 0
            del trainer

    on_two_processes(share, tmp_path)
    assert files(tmp_path / "0") | files(tmp_path / "1") == before


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(tmp_path, *words, own_folders=False):
    """Run a command on two processes that both refuse it; returns what each of them prints."""

    def command():
        if own_folders:
            os.chdir(tmp_path / os.environ["RANK"])
        assert main(list(words)) == 1

    on_two_processes(command, tmp_path)
    return [" ".join((tmp_path / f"errors-{number}").read_text().split()) for number in range(2)]


def test_all_processes_refuse_a_folder_that_another_run_uses(tmp_path):
    with open_for_writing(tmp_path / "run", tmp_path):
        sentences = refused(tmp_path, "train", *SMALL, "--out", str(tmp_path / "run"))
    assert sentences == [f"atoll train: {tmp_path}/run is in use by another process; wait until it has finished", ""]
    assert not (tmp_path / "run").exists()


def test_all_processes_refuse_a_folder_that_they_do_not_share(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(distributed, "DELAY", 0.1)
    for number in range(2):
        shutil.copytree(trained, tmp_path / str(number) / "old")
    before = files(tmp_path / "0") | files(tmp_path / "1")
    expected = "atoll train: process 1 of 2: {} is not the folder of process 0; use a disk that all machines share"
    for words in (["train", *SMALL, "--out", "new"], ["train", "--resume", "--out", "old"]):
        assert refused(tmp_path, *words, own_folders=True) == [expected.format(words[-1]), ""]
    first, second = refused(tmp_path, "attack", "old", "--attacks", "FGSM", "--points", "9", own_folders=True)
    assert "is not the folder of process 0; use a disk that all machines share" in first
    assert second == ""
    assert files(tmp_path / "0") | files(tmp_path / "1") == before


def test_all_processes_refuse_different_commands(tmp_path):
    def command():
        seed = os.environ["RANK"]
        assert main(["train", *SMALL, f"seed={seed}", "--out", str(tmp_path / "run")]) == 1

    on_two_processes(command, tmp_path)
    sentence = " ".join((tmp_path / "errors-0").read_text().split())
    assert "process 1 of 2 has another recipe than process 0; use the same command" in sentence
    assert not (tmp_path / "run").exists()


class Averaged(nn.Module):
    """DistributedDataParallel for tensors that only Python knows."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    @staticmethod
    def average(parameter):
        all_sum(parameter.grad).div_(2)

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)


@pytest.mark.slow
def test_two_processes_train_on_accelerators_as_on_cpus(tmp_path, monkeypatch):
    """Every sum is on the device of its tensors, or the pretend accelerator would refuse the result."""
    monkeypatch.setattr(trainer_module, "DistributedDataParallel", Averaged)

    def share():
        results = []
        with process_group():
            for device in ("cpu", DEVICE):
                with accelerator() as counts:
                    methods = ("rat", "awp", "s2o", "swa", "measure-wci")
                    trainer = tiny_trainer("trades", methods=methods, device=device, batch_norm=True, epochs=1)
                    trainer.fit()
                    accuracy = trainer.validate(trainer.data.test, 2)
                    results.append((accuracy, {name: value.cpu() for name, value in weights(trainer.model).items()}))
                    del trainer
            assert counts.by_operation["allreduce_"] > 200
        assert results[0][0] == results[1][0]
        assert_identical(results[0][1], results[1][1])

    on_two_processes(share, tmp_path)


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
    assert_identical(final_weights(tmp_path / "killed"), final_weights(tmp_path / "straight"))


def environment_of(pid: int) -> dict[str, str]:
    content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(item.decode().split("=", 1) for item in content if b"=" in item)
