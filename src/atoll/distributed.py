"""More than one process: torchrun starts them, torch.distributed carries the data, nothing here is home-made.

All functions work without a process group too, where they describe a world of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.errors import TrainingError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def default_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes torchrun started (gloo on CPUs, NCCL on GPUs); nothing to do without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def lost_worker_stops_the_run(where: str) -> Iterator[None]:
    """Turn a broken collective into one sentence: torch reports a dead peer as a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        # Gloo and NCCL have no exception type of their own that holds across versions.
        signs = (
            "Connection closed",
            "Connection reset",
            "gloo",
            "NCCL",
            "ProcessGroup",
            "Broken pipe",
            "Socket",
        )
        if world_size() > 1 and any(sign in str(error) for sign in signs):
            raise TrainingError(f"another process of this run was lost; {where}") from error
        raise


def is_main() -> bool:
    """Whether this process is the one that writes and prints; also right before and after the process group."""
    return int(os.environ.get("RANK", "0")) == 0


def barrier() -> None:
    """Wait until all processes are here."""
    if world_size() > 1:
        dist.barrier()


def all_sum(values: Tensor) -> Tensor:
    """The sum of ``values`` over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def differentiable_sum(values: Tensor) -> Tensor:
    """The sum over all processes, with a gradient."""
    from torch.distributed.nn.functional import all_reduce

    total: Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return total


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch normalisation over the batches of all processes.

    ``torch.nn.SyncBatchNorm`` runs on GPUs only; this one runs anywhere.  Statistics are sums over the processes, and
    gradients flow back through them.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(x)
        count = x.numel() // x.shape[1] * world_size()  # every process has the same share of the batch
        mean = differentiable_sum(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        variance = differentiable_sum(centred.square().sum((0, 2, 3))) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, rate)
                self.running_var.lerp_(variance * count / (count - 1), rate)
        normal: Tensor = centred * (variance + self.eps).rsqrt()[:, None, None]
        return normal * self.weight[:, None, None] + self.bias[:, None, None] if self.affine else normal


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Batch norm layers that share their statistics over the processes: torch's own on GPUs, ours elsewhere."""
    if world_size() == 1:
        return model
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm  # same parameters and buffers, another forward
    return model
