"""Cost of a function call: alternating timings, compared by the median ratio, and peak memory."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
import unittest.mock
from collections.abc import Callable

import torch

from atoll.data.augment import HorizontalFlip, RandomCrop
from atoll.data.base import Data, MemorySplit, Splits
from atoll.errors import AtollError


class Noise(Data):
    """Random images with ten classes; the cost of a step does not depend on their content.

    >>> Noise((1, 8, 8), 4).tensors("train")[0].shape
    torch.Size([4, 1, 8, 8])
    """

    classes = tuple("0123456789")

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        augment = [RandomCrop(padding=4), HorizontalFlip()] if shape[0] == 3 else []
        super().__init__(validation=0.0, augment=augment)
        self.image_shape, self.size = shape, size

    def load(self) -> Splits:
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (self.size, *self.image_shape), generator=draw, dtype=torch.uint8)
        split = MemorySplit(images, torch.arange(self.size) % 10)
        return Splits(split, split)


def seconds(work: Callable[[], object]) -> float:
    """Duration of one call in seconds, including GPU work."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alternate(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """Durations of both functions in seconds; the calls alternate, so that a busy machine slows down both."""
    ours(), theirs()
    times = []
    for number in range(rounds):
        if number % 2:
            second, first = seconds(theirs), seconds(ours)
        else:
            first, second = seconds(ours), seconds(theirs)
        times.append((first, second))
    return times


def ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> float:
    """Median ratio of neighboring calls."""
    return statistics.median(a / b for a, b in alternate(ours, theirs, rounds))


def added(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> float:
    """Additional time of the first function in seconds: the median over neighboring calls."""
    return statistics.median(a - b for a, b in alternate(ours, theirs, rounds))


def peak_memory(
    make: Callable[[], Callable[[], object]], repeats: int = 2, *, whole: bool = False, device: str = "cpu"
) -> int:
    """Bytes by which a call raises the peak memory of a new process that has already made the call once.

    With ``whole``, this includes the state of the call (model, optimizer, averages), not only what a step adds.
    Measures the memory of the ``device``.  For a CPU, this works only on Linux.
    """
    # Return freed blocks to the system at once; otherwise the peak depends on heap fragmentation.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak, args=(make, repeats, whole, device, there))
    with unittest.mock.patch.dict(os.environ, settings):  # read only when a process starts
        process.start()
    there.close()  # so that the pipe ends with the process
    try:
        result: int = here.recv()
    except EOFError:
        raise AtollError("the process that measures memory died; see its output above") from None
    finally:
        process.join()
    return result


def _peak(
    make: Callable[[], Callable[[], object]],
    repeats: int,
    whole: bool,
    device: str,
    pipe: multiprocessing.connection.Connection,
) -> None:
    calls = [make()]
    calls[0]()  # lazy imports and the optimizer's state should not count
    if whole:
        calls.clear()
        gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark; getrusage would report the parent's
    before = _high_water(device)
    work = calls[0] if calls else make()
    for _ in range(repeats):
        work()
    pipe.send(_high_water(device) - before)


def _high_water(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
