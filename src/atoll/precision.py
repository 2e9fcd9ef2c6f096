"""Precisions for mixed-precision training, tried in a child process."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import InputError

PRECISIONS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class PrecisionCheck:
    """A precision on one device.

    Args:
        name: as in ``trainer.precision``.
        works: whether a forward and a backward pass finish.
        speed: images per second relative to float32; None if it does not work.
        reason: why it does not work.
    """

    name: str
    works: bool
    speed: float | None = None
    reason: str = ""


# In a child process, because some processors stop a program that uses instructions they lack.
PROBE = """
import sys, time, torch
device, name = sys.argv[1:]
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
                          torch.nn.Linear(64 * 16 * 16, 10)).to(device)
x = torch.rand(32, 32, 16, 16, device=device)
def run(enabled):
    began = time.perf_counter()
    with torch.autocast(device, getattr(torch, name), enabled=enabled):
        net(x).float().sum().backward()
    total = sum(p.grad.sum() for p in net.parameters()).item()
    assert total == total
    return time.perf_counter() - began
seconds = [[run(enabled) for enabled in (False, True)] for _ in range(6)][1:]
full, half = (sorted(column)[2] for column in zip(*seconds))
print(full / half)
"""
LONGEST = 20.0  # seconds of a probe
PATIENCE = 120.0  # seconds of a probe before a training, which may share the machine


def probe(device: str, name: str, longest: float | None = None) -> PrecisionCheck:
    """Try a precision in a child process.

    Args:
        device: the type of a device.
        name: a key of ``PRECISIONS``.
        longest: number of seconds after which the process is ended.
    """
    longest = LONGEST if longest is None else longest
    command = [sys.executable, "-c", PROBE, device, PRECISIONS[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest, check=False)
    except subprocess.TimeoutExpired:
        return PrecisionCheck(name, False, reason=f"no answer within {longest:g} s")
    if done.returncode < 0:
        return PrecisionCheck(name, False, reason=f"the process was stopped by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        return PrecisionCheck(name, False, reason=(done.stderr.strip().splitlines() or ["failed"])[-1][:200])
    return PrecisionCheck(name, True, speed=round(float(done.stdout), 3))


def check_precision(device: str, name: str) -> None:
    """Raise an InputError if a device cannot train with a precision.

    GPUs report this themselves.  CPUs are tried, because some of them stop a program that uses bf16.

    >>> check_precision("cpu", "fp16")
    Traceback (most recent call last):
    atoll.errors.InputError: precision: fp16 requires a GPU; use bf16 or float32 on the CPU
    """
    if device != "cpu" or name == "float32":
        return
    if name != "bf16":
        raise InputError(f"precision: {name} requires a GPU; use bf16 or float32 on the CPU")
    result = _probe_once(device, name)
    if not result.works:
        raise InputError(f"precision: {name} does not work on this processor ({result.reason}); use float32")


@functools.cache
def _probe_once(device: str, name: str) -> PrecisionCheck:
    return probe(device, name, PATIENCE)
