"""How things are measured: interleaved, repeated, and compared by the median of ratios."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: a measured ratio and the most (or least) it may be, or None for a report."""

    name: str
    ratio: float
    limit: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def held(self) -> bool:
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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


def peak_memory(make: Callable[[], Callable[[], object]], repeats: int = 2, *, whole: bool = False) -> int:
    """Bytes by which the work raises the memory of a fresh process that has done it once before.

    With ``whole`` that includes what it is made of (model, optimizer, averages), not only what a step adds.
    """
    # Freed blocks go back to the system at once; otherwise the peak depends on how the heap happens to be split up.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak, args=(make, repeats, whole, there))
    process.start()
    result: int = here.recv()
    process.join()
    return result


def _peak(
    make: Callable[[], Callable[[], object]],
    repeats: int,
    whole: bool,
    pipe: multiprocessing.connection.Connection,
) -> None:
    work: Callable[[], object] | None = make()
    work()  # lazy imports and the optimizer's state are not the step's own memory
    if whole:
        work = None
        gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the high-water mark to what is in use now; getrusage's would be the parent's
    before = _high_water()
    work = work or make()
    for _ in range(repeats):
        work()
    pipe.send(_high_water() - before)


def _high_water() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
