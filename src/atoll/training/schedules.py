"""Learning-rate schedules: a factor on the base rate as a function of time.

Schedules are stateless, so a resumed run only needs its position.  Time is measured in (fractional) epochs; the trainer
sets the learning rate before every step.  These are the baselines of the WCI paper (table 1) and the schedules of the
other papers' recipes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from atoll.errors import InputError, check_range
from atoll.registry import Registry

SCHEDULES = Registry("schedule", "schedules", "atoll.training.schedules.Schedule", "atoll.training.schedules")


@dataclass(kw_only=True)
class Schedule(ABC):
    """Base class of schedules.

    Args:
        warmup: number of epochs over which the factor rises linearly from 0 to its scheduled value.
    """

    registry: ClassVar[Registry] = SCHEDULES

    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_range("[0, inf)", warmup=self.warmup)

    def __call__(self, epoch: float, epochs: int) -> float:
        """Return the factor at ``epoch`` (fractional) of ``epochs``."""
        rise = min(1.0, epoch / self.warmup) if self.warmup else 1.0
        return rise * self.factor(epoch, epochs)

    def check(self, epochs: int) -> None:
        """Raise an InputError unless the warm-up ends within the run; a run without training has none."""
        if epochs and self.warmup > epochs:
            raise InputError(f"warmup: expected at most the number of epochs, {epochs:,}, got {self.warmup:g}")

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor without warm-up."""


@SCHEDULES.register()
class Constant(Schedule):
    """Constant learning rate."""

    def factor(self, epoch: float, epochs: int) -> float:
        return 1.0


@SCHEDULES.register()
@dataclass(kw_only=True)
class Piecewise(Schedule):
    """Multiplies the learning rate by ``gamma`` at each milestone, a share of the run (Rice et al., 2020: 1/2 and 3/4).

    >>> [Piecewise()(epoch, 200) for epoch in (99, 100, 150)]
    [1.0, 0.1, 0.01]
    """

    milestones: Sequence[float] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1]", **{f"milestones[{i}]": m for i, m in enumerate(self.milestones)})

    def factor(self, epoch: float, epochs: int) -> float:
        # Rounded, because 0.1 ** 2 is 0.010000000000000002.
        return round(self.gamma ** sum(epoch >= m * epochs for m in self.milestones), 12)


@SCHEDULES.register()
@dataclass(kw_only=True)
class OneDrop(Schedule):
    """Multiplies the learning rate by ``gamma`` once, halfway through the run by default.

    >>> OneDrop()(100, 200)
    0.1
    """

    at: float = 0.5
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1]", at=self.at)

    def factor(self, epoch: float, epochs: int) -> float:
        return round(self.gamma, 12) if epoch >= self.at * epochs else 1.0


@SCHEDULES.register()
@dataclass(kw_only=True)
class Cosine(Schedule):
    """Cosine annealing from 1 to ``floor`` (Loshchilov & Hutter, 2017), after the warm-up if there is one.

    >>> Cosine()(100, 200)
    0.5
    """

    floor: float = 0.0

    def factor(self, epoch: float, epochs: int) -> float:
        if epoch < self.warmup:
            return 1.0
        progress = min(1.0, (epoch - self.warmup) / max(epochs - self.warmup, 1e-9))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


@SCHEDULES.register()
@dataclass(kw_only=True)
class Linear(Schedule):
    """Linear decay from 1 to ``floor``.

    >>> Linear()(50, 200)
    0.75
    """

    floor: float = 0.0

    def factor(self, epoch: float, epochs: int) -> float:
        return 1 - (1 - self.floor) * min(1.0, epoch / epochs)


@SCHEDULES.register()
@dataclass(kw_only=True)
class SuperConvergence(Schedule):
    """Linear increase from ``start`` to 1 at ``peak`` of the run, then linear decay to 0 (Smith & Topin, 2018).

    >>> [round(SuperConvergence(start=0.0, peak=0.4)(epoch, 10), 6) for epoch in (2, 4, 7)]
    [0.5, 1.0, 0.5]
    """

    start: float = 0.04
    peak: float = 0.4
    warmup: float = field(default=0.0, init=False)  # the schedule includes its own warm-up

    def __post_init__(self) -> None:
        check_range("(0, 1)", peak=self.peak)

    def factor(self, epoch: float, epochs: int) -> float:
        progress = min(1.0, epoch / epochs)
        if progress <= self.peak:
            return self.start + (1 - self.start) * progress / self.peak
        return (1 - progress) / (1 - self.peak)


@SCHEDULES.register()
@dataclass(kw_only=True)
class Exponential(Schedule):
    """Constant until ``start`` of the run, then exponential decay to ``final`` (the GloRo recipe for MNIST).

    >>> round(Exponential(start=0.5, final=1e-2)(75, 100), 6)
    0.1
    """

    start: float = 0.5
    final: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1)", start=self.start)
        check_range("(0, 1]", final=self.final)

    def factor(self, epoch: float, epochs: int) -> float:
        progress = (min(1.0, epoch / epochs) - self.start) / (1 - self.start)
        return float(self.final ** max(0.0, progress))
