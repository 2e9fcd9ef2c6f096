"""Training and evaluation on several processes, with torchrun and torch.distributed.

Without a process group, all functions behave as in a world of one process.

Tensors are summed on the device they are on: Gloo sums those on CPUs, NCCL those on GPUs.  Everything else that
processes tell each other goes through ``gather``.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.errors import AtollError, InputError, TrainingError, describe
from atoll.files import json_digest, open_for_writing, temporary_path

T = TypeVar("T")

TIMEOUT = timedelta(days=1)
"""How long a process waits for the others.

A process that dies is noticed at once.  This limit ends a run whose process hangs, so it is longer than any work that
only some processes have: downloads, writing files, or the hardest points of an evaluation.
"""

DELAY = 60.0
"""Seconds until a file that one machine has written must be visible on the others, which may cache folders."""

_requested: ContextVar[str] = ContextVar("device", default="auto")


def torchrun_world_size() -> int:
    """Return the number of processes that torchrun started, even before they join; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def default_device() -> torch.device:
    """Where to compute: as ``use_device`` says, otherwise the GPU of this process if there is one, else the CPU."""
    return parse_device(requested_device())


def requested_device() -> str:
    """The name that ``use_device`` was given, for workers on other machines; ``auto`` outside of it."""
    return _requested.get()


@contextmanager
def use_device(name: str) -> Iterator[None]:
    """Compute on a device: everything inside the block that asks for ``default_device`` gets it.

    Results do not depend on the device beyond rounding, so it is part of neither recipes nor digests.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` (under torchrun, each process uses its own GPU), ``cuda:1`` or ``mps``.

    >>> with use_device("cpu"):
    ...     default_device()
    device(type='cpu')
    """
    parse_device(name)  # an unavailable device is an error here, before any work
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def parse_device(name: str) -> torch.device:
    """The device that a name stands for; an InputError if it is not available.

    >>> parse_device("gpu")
    Traceback (most recent call last):
    atoll.errors.InputError: device: expected auto, cpu, cuda, cuda:N or mps, got 'gpu'
    """
    kind, colon, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise InputError(f"device: expected auto, cpu, cuda, cuda:N or mps, got {name!r}")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("device: mps is not available on this machine; use cpu or auto")
        if torchrun_world_size() > 1:
            raise InputError(
                f"device: mps is for one process, but torchrun started {torchrun_world_size()}; use cpu or auto"
            )
        return torch.device("mps")
    if not torch.cuda.is_available():
        raise InputError(f"device: {name} is not available because PyTorch finds no CUDA GPU; use cpu or auto")
    if colon and torchrun_world_size() > 1:
        raise InputError(f"device: {name} is one GPU, but torchrun started {torchrun_world_size()} processes; use cuda")
    index, count = int(number or os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > count:  # the same error in all processes
        raise InputError(
            f"device: torchrun started {local} processes on this machine, but PyTorch finds only {count} CUDA GPUs;"
            " start one process per GPU, or use cpu"
        )
    if index >= count:
        known = ", ".join(f"cuda:{i}" for i in range(count))
        raise InputError(f"device: cuda:{index} is not available; expected one of {known}")
    return torch.device("cuda", index)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started; does nothing without torchrun.

    Raises a TrainingError if another process dies, or does not answer within ``TIMEOUT``.

    Gloo's threads stop when the last reference to the group is gone.  A thread that frees a Python tensor while the
    interpreter exits aborts the process (pytorch/pytorch#190489), so delete trainers inside the group.
    """
    if torchrun_world_size() == 1 or dist.is_initialized():
        yield
        return
    # If DistributedDataParallel imported this later, its default arguments would keep a reference to the group.
    import torch.distributed.nn

    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with raise_on_lost_worker("rerun the command to resume"):
        # Results of evaluations are on the CPU, where NCCL cannot sum.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        try:
            yield
        finally:
            dist.destroy_process_group()
            gc.collect()
            # Last, because this waits for the threads without holding the interpreter lock, which they may need.
            del backend


def launch(processes: int, call: Callable[[], object]) -> None:
    """Call a function in several processes on this machine, started by torchrun's launcher, and wait for them.

    They compute on the device of ``use_device``.  If one fails, the others are stopped and its error is raised.  If
    this process dies, they stop as well (on Linux, even after SIGKILL).

    Args:
        processes: number of processes.
        call: a picklable function that joins the others with ``process_group``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # In the main thread, the launcher replaces the handlers of these signals and does not restore them.
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals if in_main_thread}
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            *(1, 1, processes),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(logs),
        )
        try:
            elastic_launch(config, _launched)(call, requested_device())
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            message = failure.message  # the exception or the exit status
            message = message["message"] if isinstance(message, dict) else message
            raise TrainingError(f"process {number} of {processes} failed: {message}") from error
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _launched(call: Callable[[], object], device: str) -> None:
    # SIGINT arrives when the launching process is gone; exit at once, because there is nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does, because processes share the cores
        torch.set_num_threads(1)
    with use_device(device):
        call()


@contextmanager
def raise_on_lost_worker(hint: str) -> Iterator[None]:
    """Raise a TrainingError with a hint when a collective fails because another process died or hangs."""
    try:
        yield
    except RuntimeError as error:
        # torch raises a RuntimeError: Gloo and NCCL have no exception type that is stable across versions.
        signs = ("Connection closed", "Connection reset", "gloo", "NCCL", "ProcessGroup", "Broken pipe", "Socket")
        if torchrun_world_size() > 1 and (
            isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
        ):
            happened = "does not answer" if "imed out" in str(error) else "died"
            raise TrainingError(f"another process of this run {happened}; {hint}") from error
        raise


def is_main() -> bool:
    """Whether this process writes and prints; also valid before and after the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def all_sum(values: Tensor) -> Tensor:
    """Sum ``values`` over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def gather(value: T) -> list[T]:
    """Return a plain value of every process, in the order of processes."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until all processes reach this point."""
    all_sum(torch.zeros(1))  # dist.barrier may choose a GPU


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise the error of a block in all processes, so that none waits for one that has failed.

    The block must not wait for other processes.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # any error would make the others wait
        error = caught
    for number, fault in enumerate(gather(None if error is None else _sentence(error))):
        if fault is not None:
            raise error or InputError(f"process {number} of {world_size()}: {fault}")


def _sentence(error: Exception) -> str:
    if isinstance(error, AtollError):
        return str(error)
    return describe(error) or f"{type(error).__name__}: {error}"


def check_same(**values: object) -> None:
    """Raise an InputError in all processes if plain values differ between them."""
    everywhere = gather({name: json_digest(value) for name, value in values.items()})
    for number, digests in enumerate(everywhere):
        if different := [name for name, digest in digests.items() if digest != everywhere[0][name]]:
            raise InputError(
                f"process {number} of {world_size()} has another {' and '.join(different)} than process 0; use the same"
                " command, versions and files for all processes"
            )


@contextmanager
def open_shared(folder: Path, inside: Path) -> Iterator[None]:
    """Open a folder with ``open_for_writing`` for all processes; the first one holds the lock.

    Raises an InputError in all processes if one of them does not see the same folder.
    """
    with ExitStack() as stack:
        with fail_together():
            if is_main():
                stack.enter_context(open_for_writing(folder, inside))
        if world_size() > 1:
            _check_shared(folder)
        yield


def _check_shared(folder: Path) -> None:
    mark = folder / gather(temporary_path(folder / uuid.uuid4().hex).name)[0]
    try:
        with fail_together():
            if is_main():
                mark.touch()
        with fail_together():
            end = time.monotonic() + DELAY
            while not mark.exists():
                if time.monotonic() > end:
                    raise InputError(f"{folder} is not the folder of process 0; use a disk that all machines share")
                time.sleep(0.1)
    finally:
        if is_main():
            mark.unlink(missing_ok=True)


class _Sum(torch.autograd.Function):
    # The version in torch.distributed.nn is deprecated, and its replacement is private.
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return all_sum(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return differentiable_sum(gradient)  # so that the gradient is differentiable as well


def differentiable_sum(values: Tensor) -> Tensor:
    """Return the sum over all processes, with gradients of any order."""
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch normalization over the batches of all processes.

    Unlike ``torch.nn.SyncBatchNorm``, it also runs on CPUs.  Gradients flow through the shared statistics.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(x)
        count = x.numel() // x.shape[1] * world_size()  # every process has an equal share of the batch
        mean = differentiable_sum(x.sum((0, 2, 3))) / count
        centered = x - mean[:, None, None]
        variance = differentiable_sum(centered.square().sum((0, 2, 3))) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, rate)
                self.running_var.lerp_(variance * count / (count - 1), rate)
        normal: Tensor = centered * (variance + self.eps).rsqrt()[:, None, None]
        return normal * self.weight[:, None, None] + self.bias[:, None, None] if self.affine else normal


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Make batch norm layers share statistics across processes: ``nn.SyncBatchNorm`` on GPUs, ours on CPUs."""
    if world_size() == 1:
        return model
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm  # same parameters and buffers, different forward
    return model
