"""What a piece of work costs: seconds, interleaved and compared by the median of ratios; peak memory."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Callable

import torch

from atoll.data.augment import HorizontalFlip, RandomCrop
from atoll.data.base import Data, MemorySplit, Splits
from atoll.errors import AtollError


class Noise(Data):
    """Random images of ten classes: the cost of a step does not depend on what is on them.

    Args:
        shape: of an image.
        size: how many.

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
    """Of one call, until a GPU is done with it, too."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alternate(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """Seconds of both sides, which take turns, so that a busy moment of the machine hits both."""
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
    """Median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in alternate(ours, theirs, rounds))


def added(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> float:
    """Seconds that our side takes more: the median over neighbouring runs."""
    return statistics.median(a - b for a, b in alternate(ours, theirs, rounds))


def peak_memory(
    make: Callable[[], Callable[[], object]], repeats: int = 2, *, whole: bool = False, device: str = "cpu"
) -> int:
    """Bytes by which the work raises the memory of a fresh process that has done it once before.

    With ``whole`` that includes what it is made of (model, optimizer, averages), not only what a step adds.  The memory
    is that of the ``device``; for a CPU, Linux keeps the account.
    """
    # Freed blocks go back to the system at once; otherwise the peak depends on how the heap happens to be split up.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    before = {name: os.environ.get(name) for name in settings}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak, args=(make, repeats, whole, device, there))
    try:
        os.environ.update(settings)  # which only a process that starts takes note of
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    there.close()  # so that the end of the process is the end of the pipe
    try:
        result: int = here.recv()
    except EOFError:
        raise AtollError("the process whose memory was measured died; its own words are above") from None
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
    made = [make()]
    made[0]()  # lazy imports and the optimizer's state are not the step's own memory
    if whole:
        made.clear()
        gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # sets the high-water mark to what is in use now; getrusage's would be the parent's
    before = _high_water(device)
    work = made[0] if made else make()
    for _ in range(repeats):
        work()
    pipe.send(_high_water(device) - before)


def _high_water(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
