"""Processor time of a small training on a busy machine compared with an idle one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.measure import Row

WORDS = ("digits-flat/trades-trh", "trainer.epochs=8")


def train(busy: int) -> tuple[float, float]:
    """Processor time and duration of a training, with a number of processes that do nothing but count."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, "-m", "atoll", "train", *WORDS, "--out", f"{folder}/run", "--json"]
            subprocess.run(command, env=clean, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = time.perf_counter() - began
    finally:
        for loop in loops:
            loop.kill()
        # Their processor time is only added when they are waited for.
        for loop in loops:
            loop.wait()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def run() -> Iterator[Row]:
    cores = os.cpu_count() or 1
    idle, alone = train(0)
    busy, shared = train(cores)
    note = f"{busy:.1f} and {idle:.1f} s of processor time; {shared:.1f} and {alone:.1f} s"
    yield Row(f"training beside {cores} busy processes / alone, processor time", busy / idle, 1.3, note=note)
