"""Where computations run, and what processes tell each other."""

import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from atoll import distributed
from atoll.attacks import PGD, ThreatModel
from atoll.attacks.evaluate import evaluate
from atoll.certify import GloRo
from atoll.certify.evaluate import certify
from atoll.distributed import (
    all_sum,
    barrier,
    check_same,
    default_device,
    fail_together,
    gather,
    launch,
    open_shared,
    parse_device,
    process_group,
    raise_on_lost_worker,
    use_device,
)
from atoll.errors import InputError, TrainingError
from atoll.models import MLP
from support import TinyData, on_two_processes, wait_for


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, as far as PyTorch's answers go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "environment", "device"),
    [
        ("auto", {}, "cuda:0"),
        ("cuda", {}, "cuda:0"),
        ("cuda:1", {}, "cuda:1"),
        ("cpu", {}, "cpu"),
        ("auto", {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "cuda:1"),
        ("cuda", {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "cuda:1"),
        ("cpu", {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "cpu"),
    ],
)
def test_names_of_devices(gpus, monkeypatch, name, environment, device):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert parse_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "processes", "sentence"),
    [
        ("cuda:2", 1, "cuda:2 is not available; expected one of cuda:0, cuda:1"),
        ("cuda:1", 2, "cuda:1 is one GPU, but torchrun started 2 processes; use cuda"),
        ("gpu", 1, "expected auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
        ("cuda:x", 1, "expected auto, cpu, cuda, cuda:N or mps, got 'cuda:x'"),
        ("cpu:0", 1, "expected auto, cpu, cuda, cuda:N or mps, got 'cpu:0'"),
        ("", 1, "expected auto, cpu, cuda, cuda:N or mps, got ''"),
    ],
)
def test_devices_that_do_not_exist_are_one_sentence(gpus, monkeypatch, name, processes, sentence):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(InputError, match=f"device: {sentence}"), use_device(name):
        pass


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_the_machine_lacks_is_one_sentence(no_gpus, name):
    assert parse_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match=rf"device: {name} is not available .*; use cpu or auto"):
        parse_device(name)


def test_more_processes_than_gpus_is_the_same_sentence_in_all_of_them(gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(InputError, match="torchrun started 3 processes on this machine, but PyTorch finds only 2"):
            parse_device("auto")
    assert parse_device("cpu") == torch.device("cpu")


def test_mps_is_for_one_process(no_gpus, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert parse_device("mps") == torch.device("mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="mps is for one process, but torchrun started 2"):
        parse_device("mps")


def test_blocks_nest_and_end(gpus):
    def fail():
        assert default_device() == torch.device("cpu")
        raise ValueError("stop")

    with use_device("cuda:1"):
        with pytest.raises(ValueError, match="stop"), use_device("cpu"):
            fail()
        assert default_device() == torch.device("cuda:1")
    assert default_device() == torch.device("cuda:0")


def test_launched_processes_use_the_device(gpus, monkeypatch):
    """Each process of a launch has a GPU of its own."""

    def elastic_launch(config, entry):
        def start(*arguments):
            monkeypatch.setenv("LOCAL_RANK", "1")
            with use_device("auto"):  # nothing of this process reaches the others
                entry(*arguments)

        return start

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setattr(distributed.signal, "signal", lambda *_: signal.SIG_DFL)
    devices: list[torch.device] = []
    for name in ("cpu", "cuda"):
        with use_device(name):
            launch(2, lambda: devices.append(default_device()))
    assert devices == [torch.device("cpu"), torch.device("cuda:1")]


def test_processes_on_gpus_sum_results_on_the_cpu(tmp_path, monkeypatch, request):
    """NCCL sums only tensors on GPUs, and so does its stand-in."""
    init = dist.init_process_group

    def stand_in(backend, **options):
        devices = backend if ":" in backend else f"cuda:{backend}"
        init(devices.replace("nccl", "gloo"), **options)

    split, attacks = TinyData().test, {"PGD": PGD(ThreatModel("linf", 0.1), steps=2)}
    certifier = GloRo.proven(MLP((1, 8, 8), 3, hidden=(4,)))
    model = certifier.model
    alone = evaluate(model, split, attacks, batch_size=8), certify(certifier, split)
    request.getfixturevalue("gpus")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", stand_in)

    def refused():
        init("cuda:gloo")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            all_sum(torch.ones(2))
        dist.destroy_process_group()

    def share():
        with process_group():
            assert default_device() == torch.device("cuda", distributed.rank())
            assert gather(distributed.rank()) == [0, 1]
            evaluation = evaluate(model, split, attacks, folder=tmp_path / "attack", batch_size=8)
            certification = certify(certifier, split)
        assert evaluation.accuracy == alone[0].accuracy
        assert torch.equal(certification.radius, alone[1].radius)

    (tmp_path / "attack").mkdir()
    on_two_processes(refused, tmp_path)
    on_two_processes(share, tmp_path)


def test_processes_fail_together(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "DELAY", 0.1)

    def fail(error):
        with fail_together():
            if distributed.rank() == 1:
                raise error

    def share():
        with process_group():
            for error, message in ((InputError("no data"), "no data"), (KeyError("x"), "KeyError: 'x'")):
                expected = type(error) if distributed.rank() else InputError
                with pytest.raises(expected) as caught:
                    fail(error)
                assert caught.value is error or str(caught.value) == f"process 1 of 2: {message}"
            check_same(recipe={"a": 1, "b": 2})
            with pytest.raises(InputError, match="process 1 of 2 has another recipe and data than process 0"):
                check_same(recipe=distributed.rank(), data=distributed.rank(), version=1)
            run = tmp_path / "run"
            with open_shared(run, run):
                with pytest.raises(InputError, match="in use by another process"), open_shared(run, run):
                    pass
                assert not list(run.iterdir())
                barrier()
            own = tmp_path / str(distributed.rank())
            with pytest.raises(InputError, match="1 is not the folder of process 0"), open_shared(own, own):
                pass

    on_two_processes(share, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=20))  # also for the start of both processes

    def hang():
        with process_group():
            barrier()
            if dist.get_rank() == 0:
                with (
                    pytest.raises(TrainingError, match="another process of this run does not answer; resume"),
                    raise_on_lost_worker("resume"),
                ):
                    barrier()
                (tmp_path / "done").touch()
            else:
                wait_for((tmp_path / "done").exists)

    on_two_processes(hang, tmp_path)
