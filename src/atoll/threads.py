"""The number of threads on CPUs: measured, recorded with what is computed, and the same after a resume.

Small networks are slower with more threads, on a busy machine several times.  The number can also change the last bits
of a sum, so an interrupted computation must continue with the number that it began with.

The library does not change the number.  Only a block of ``choose_threads``, which the commands use, does.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.distributed import torchrun_world_size
from atoll.errors import DamagedError, InputError
from atoll.files import read_record, write_record
from atoll.modules import evaluation_mode, preserve_buffers

RECORD = "threads"
ROUNDS = 15  # at most, to compare two numbers of threads
SECONDS = 0.2  # after which no other round begins
LONGEST = 0.05  # seconds of a pass; fewer inputs are measured if it takes longer
GAIN = 0.8  # more threads must take at most this share of the time


@dataclass(frozen=True)
class _Request:
    """What a command asked for, the number of threads before, and the numbers measured so far."""

    words: str
    before: int
    known: dict[object, int] = field(default_factory=dict)


_request: ContextVar[_Request | None] = ContextVar("threads", default=None)


@contextmanager
def choose_threads(request: str) -> Iterator[None]:
    """Inside the block, ``settle_threads`` chooses the number of threads; afterwards it is the same as before.

    Args:
        request: a number, or ``auto``: as ``OMP_NUM_THREADS`` says, otherwise measured.
    """
    if request != "auto" and not (request.isdecimal() and 1 <= int(request) <= 1024):
        raise InputError(f"threads: expected auto or a number from 1 to 1024, got {request!r}")
    before = torch.get_num_threads()
    token = _request.set(_Request(request, before))
    try:
        if request != "auto":
            torch.set_num_threads(int(request))
        yield
    finally:
        _request.reset(token)
        torch.set_num_threads(before)


@contextmanager
def keep_threads(number: int | None = None) -> Iterator[None]:
    """Inside the block, ``settle_threads`` does nothing: the number belongs to a larger computation.

    Args:
        number: the number inside the block, which is then restored; None for the one before.
    """
    before, token = torch.get_num_threads(), _request.set(None)
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        _request.reset(token)
        if number is not None:
            torch.set_num_threads(before)


def settle_threads(
    recorded: int | None, device: torch.device, model: nn.Module, inputs: Callable[[int], Tensor], rows: int
) -> None:
    """Set the number of threads of a computation that begins or resumes, if a command asked for it.

    Processes of torchrun keep theirs, and so do computations on other devices, where the number hardly matters.

    Args:
        recorded: the number that the computation began with; None if it begins now.
        device: where it runs.
        model: the model of its passes.
        inputs: returns the first inputs, given their number.
        rows: the number of inputs in a pass.
    """
    request = _request.get()
    if request is None or torchrun_world_size() > 1:
        return
    if recorded is not None:
        if request.words not in ("auto", str(recorded)):
            words = f"this began with {recorded} and must continue with {recorded}, got {request.words}"
            raise InputError(f"threads: {words}")
        torch.set_num_threads(recorded)
    elif request.words == "auto":
        torch.set_num_threads(request.before)  # an earlier computation may have changed it
        if "OMP_NUM_THREADS" not in os.environ and device.type == "cpu":
            key = (type(model), tuple(parameter.shape for parameter in model.parameters()), rows)
            # Whatever is wrong with the model, the computation itself reports it.
            with suppress(Exception), torch.random.fork_rng(devices=[]), preserve_buffers(model):
                if key not in request.known:
                    request.known[key] = measure_threads(passes_of(model, inputs, rows))
                torch.set_num_threads(request.known[key])


def passes_of(model: nn.Module, inputs: Callable[[int], Tensor], rows: int) -> Callable[[], object]:
    """Return a function that runs a forward pass and computes the gradient with respect to the inputs.

    Args:
        model: the model; its state does not change.
        inputs: returns the first inputs, given their number.
        rows: the number of inputs; fewer if a pass would take too long.
    """
    first = inputs(1)
    seconds = min(_seconds(lambda: input_gradient(model, first)) for _ in range(2))
    x = inputs(max(1, min(rows, int(LONGEST / max(seconds, 1e-6)))))
    return lambda: input_gradient(model, x)


def input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """A forward pass in evaluation mode, and the gradient of all logits with respect to the input."""
    inputs = x.detach().clone().requires_grad_()
    with evaluation_mode(model), torch.enable_grad():
        logits: Tensor = model(inputs)
        return torch.autograd.grad(logits.sum(), inputs)[0] if logits.requires_grad else logits


def measure_threads(run: Callable[[], object]) -> int:
    """Return the number of threads with which a function is clearly the fastest.

    Begins with one thread and doubles the number as long as that clearly pays: in most rounds, and by at least a fifth
    in the median.  The rounds alternate between both numbers, so that other processes slow down both.
    """
    most, number = torch.get_num_threads(), 1
    try:
        while number < most:
            more = min(2 * number, most)
            ratios = _compare(run, number, more)
            faster = sum(ratio < 1 for ratio in ratios)
            if statistics.median(ratios) > GAIN or 4 * faster < 3 * len(ratios):
                break
            number = more
    finally:
        torch.set_num_threads(most)
    return number


def _compare(run: Callable[[], object], number: int, more: int) -> list[float]:
    """Durations with more threads, relative to those with fewer, in every round."""
    ratios: list[float] = []
    began = time.perf_counter()
    while not ratios or (len(ratios) < ROUNDS and time.perf_counter() - began < SECONDS):
        seconds = []
        for threads in (number, more):
            torch.set_num_threads(threads)
            run()  # the threads may have to start
            seconds.append(_seconds(run))
        ratios.append(seconds[1] / seconds[0])
    return ratios


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def recorded_threads(path: Path, kind: str) -> int | None:
    """The number of threads in a record; None if there is none that can be read."""
    try:
        number = read_record(path, kind, old=True).get("threads")
    except (FileNotFoundError, DamagedError):
        return None
    return number if isinstance(number, int) and 1 <= number <= 1024 else None


@contextmanager
def record_threads(folder: Path) -> Iterator[None]:
    """Record the number of threads in a folder until what happens inside the block is finished.

    If it fails before it has stored anything else, nothing is recorded.
    """
    path = threads_path(folder)
    if not path.exists():
        write_record(path, RECORD, {"threads": torch.get_num_threads()})
    try:
        yield
    except BaseException:
        if list(folder.iterdir()) == [path]:
            path.unlink()
        raise
    path.unlink(missing_ok=True)


def threads_path(folder: Path) -> Path:
    """Where the number of threads of an unfinished computation is recorded."""
    return folder / "threads.json"
