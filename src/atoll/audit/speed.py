"""How fast a model is on this machine, measured in a few seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.attacks.evaluate import automatic_batch_size
from atoll.certify.smoothing import Smoothed
from atoll.corruptions import COMMON, SEVERITIES, corrupt
from atoll.corruptions.base import check_images
from atoll.data.base import to_float
from atoll.errors import InputError
from atoll.measure import select
from atoll.modules import evaluation_mode
from atoll.subject import Subject
from atoll.threads import input_gradient, settle_threads

ROUNDS = 3
LONGEST = 64  # rows of the batch that is timed


@dataclass(frozen=True)
class Speed:
    """Durations in seconds per image, and what can be measured at all.

    Args:
        forward: a forward pass.
        gradient: a forward pass and the gradient with respect to the input.
        noisy: a forward pass at one noise sample of randomized smoothing, with drawing the noise.
        corruptions: applying all corruptions at all severities; None if the inputs are not images.
        points: number of test points.
        rows: batch size of attacks.
    """

    forward: float
    gradient: float
    noisy: float
    corruptions: float | None
    points: int
    rows: int


def measure_speed(subject: Subject, device: torch.device) -> Speed:
    """Time a few passes over test points; the medians of three rounds after one that warms up."""
    split = select(subject.data, "test", None)
    rows = min(LONGEST, len(split))
    x = to_float(split.fetch(torch.arange(rows))).to(device)
    model = subject.model.to(device)

    def forward() -> None:
        with torch.no_grad():
            _wait(model(x))

    def gradient() -> None:
        _wait(input_gradient(model, x))

    def noisy() -> None:
        smoothed.counts(x[0], len(x), "speed")

    settle_threads(None, device, model, lambda count: x[:count], rows)
    smoothed = Smoothed(model, 0.25)
    with evaluation_mode(model):
        batch = automatic_batch_size(model, x[:1])
        x = x[:batch]
        return Speed(
            forward=_median(forward) / len(x),
            gradient=_median(gradient) / len(x),
            noisy=_median(noisy) / len(x),
            corruptions=_corruptions(x[:16].cpu()),
            points=len(split),
            rows=batch,
        )


def _median(call: Callable[[], None]) -> float:
    call()
    return statistics.median(_seconds(call) for _ in range(ROUNDS))


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _wait(tensor: Tensor) -> None:
    """Wait until the device has computed a tensor."""
    tensor.flatten()[0].item()


def _corruptions(x: Tensor) -> float | None:
    try:
        check_images(x.shape)
    except InputError:
        return None

    def apply() -> None:
        for name in (name for group in COMMON.values() for name in group):
            corrupt(x, name, 3)

    return _median(apply) * len(SEVERITIES) / len(x)
