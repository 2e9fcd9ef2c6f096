"""Where computations run."""

import signal

import pytest
import torch

from atoll import distributed
from atoll.distributed import default_device, launch, parse_device, use_device
from atoll.errors import InputError


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
