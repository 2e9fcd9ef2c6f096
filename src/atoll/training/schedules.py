"""Learning-rate schedules: a factor on the base rate as a function of time.

Stateless, so a resumed run needs nothing but its position.  Time is in epochs and fractional; the trainer asks
before every step.  These are the baselines of the WCI paper (table 1) and of the other papers' recipes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from atoll.errors import InputError
from atoll.registry import Registry

SCHEDULES = Registry("schedule", "schedules", "atoll.training.schedules.Schedule", "atoll.training.schedules")


class Schedule(ABC):
    """Base of all schedules.

    Args:
        warmup: epochs over which the factor rises linearly to its scheduled value.
    """

    registry: ClassVar[Registry] = SCHEDULES

    def __init__(self, *, warmup: float = 0.0) -> None:
        if not 0 <= warmup < math.inf:
            raise InputError(f"warmup: expected a number of epochs >= 0, got {warmup}")
        self.warmup = warmup

    def __call__(self, epoch: float, epochs: int) -> float:
        """Factor at ``epoch`` (fractional) of ``epochs``."""
        rise = min(1.0, epoch / self.warmup) if self.warmup else 1.0
        return rise * self.factor(epoch, epochs)

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """The schedule itself, without warm-up."""


@SCHEDULES.register()
class Constant(Schedule):
    """Always 1."""

    def factor(self, epoch: float, epochs: int) -> float:
        return 1.0


@SCHEDULES.register()
class Piecewise(Schedule):
    """Times ``gamma`` at each milestone, a share of the run (Rice et al., 2020: 1/2 and 3/4).

    >>> [Piecewise()(epoch, 200) for epoch in (99, 100, 150)]
    [1.0, 0.1, 0.01]
    """

    def __init__(self, *, milestones: Sequence[float] = (0.5, 0.75), gamma: float = 0.1, warmup: float = 0.0) -> None:
        super().__init__(warmup=warmup)
        if any(not 0 <= m <= 1 for m in milestones):
            raise InputError(f"milestones: expected shares of the run in [0, 1], got {list(milestones)}")
        self.milestones = tuple(milestones)
        self.gamma = gamma

    def factor(self, epoch: float, epochs: int) -> float:
        # Rounded: 0.1 ** 2 is 0.010000000000000002.
        return round(self.gamma ** sum(epoch >= m * epochs for m in self.milestones), 12)


@SCHEDULES.register()
class OneDrop(Piecewise):
    """A single drop, half-way by default.

    >>> OneDrop()(100, 200)
    0.1
    """

    def __init__(self, *, at: float = 0.5, gamma: float = 0.1, warmup: float = 0.0) -> None:
        super().__init__(milestones=(at,), gamma=gamma, warmup=warmup)


@SCHEDULES.register()
class Cosine(Schedule):
    """Half a cosine from 1 to ``floor`` (Loshchilov & Hutter, 2017); with warm-up it starts after it.

    >>> Cosine()(100, 200)
    0.5
    """

    def __init__(self, *, floor: float = 0.0, warmup: float = 0.0) -> None:
        super().__init__(warmup=warmup)
        self.floor = floor

    def factor(self, epoch: float, epochs: int) -> float:
        if epoch < self.warmup:
            return 1.0
        progress = min(1.0, (epoch - self.warmup) / max(epochs - self.warmup, 1e-9))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


@SCHEDULES.register()
class Linear(Schedule):
    """A straight line from 1 to ``floor``.

    >>> Linear()(50, 200)
    0.75
    """

    def __init__(self, *, floor: float = 0.0, warmup: float = 0.0) -> None:
        super().__init__(warmup=warmup)
        self.floor = floor

    def factor(self, epoch: float, epochs: int) -> float:
        return 1 - (1 - self.floor) * min(1.0, epoch / epochs)


@SCHEDULES.register()
class SuperConvergence(Schedule):
    """Linear rise to 1 at ``peak`` of the run, then linear fall to 0 (Smith & Topin, 2018).

    >>> [round(SuperConvergence(start=0.0, peak=0.4)(epoch, 10), 6) for epoch in (2, 4, 7)]
    [0.5, 1.0, 0.5]
    """

    def __init__(self, *, start: float = 0.04, peak: float = 0.4) -> None:
        super().__init__()
        if not 0 < peak < 1:
            raise InputError(f"peak: expected a share of the run in (0, 1), got {peak}")
        self.start = start
        self.peak = peak

    def factor(self, epoch: float, epochs: int) -> float:
        progress = min(1.0, epoch / epochs)
        if progress <= self.peak:
            return self.start + (1 - self.start) * progress / self.peak
        return (1 - progress) / (1 - self.peak)


@SCHEDULES.register()
class Exponential(Schedule):
    """Constant until ``start`` of the run, then exponential decay to ``final`` (the GloRo recipe for MNIST).

    >>> round(Exponential(start=0.5, final=1e-2)(75, 100), 6)
    0.1
    """

    def __init__(self, *, start: float = 0.5, final: float = 1e-3, warmup: float = 0.0) -> None:
        super().__init__(warmup=warmup)
        if not 0 <= start < 1 or not 0 < final <= 1:
            raise InputError(f"start, final: expected start in [0, 1) and final in (0, 1], got {start}, {final}")
        self.start = start
        self.final = final

    def factor(self, epoch: float, epochs: int) -> float:
        progress = (min(1.0, epoch / epochs) - self.start) / (1 - self.start)
        return float(self.final ** max(0.0, progress))
