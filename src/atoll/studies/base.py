"""What a study is: a grid of recipes, what to measure of each run, how to tabulate it, and the claim to check."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from matplotlib.figure import Figure

from atoll.registry import Registry
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.table import Table

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
Answer = Literal["held", "held in part", "did not hold", "not testable"]
Numbers = dict[str, Any]  # what was measured of a cell, as plain JSON


@dataclass(frozen=True)
class Cell:
    """One run of a study and what is measured of it.

    Args:
        row: of the table; seeds of a row are averaged.
        seed: of the recipe.
        recipe: what is trained; None if there is nothing to train.
        overrides: ``key.sub=value``, after the recipe's own values.
        needs: names of cells whose runs have to be there first.

    >>> Cell("AT + TrH", seed=2).name
    'at-trh-2'
    """

    row: str
    seed: int = 0
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return re.sub(r"[^a-z0-9.]+", "-", self.row.lower()).strip("-") + f"-{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"overrides": list(self.overrides), "needs": list(self.needs)}


@dataclass(frozen=True)
class Found:
    """What is known after all cells were tried.

    Args:
        scale: of the study.
        numbers: of the cells that went well.
        failed: the reasons of those that did not.
        runs: of the cells that went well and were trained.
    """

    scale: Scale
    numbers: Mapping[Cell, Numbers]
    failed: Mapping[Cell, str] = field(default_factory=dict)
    runs: Mapping[Cell, Run] = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        """In the order of the cells."""
        return list(dict.fromkeys(cell.row for cell in (*self.numbers, *self.failed)))

    def of(self, row: str) -> list[Numbers]:
        """What was measured in a row, seed by seed."""
        return [numbers for cell, numbers in self.numbers.items() if cell.row == row]

    def values(self, row: str, name: str) -> list[float]:
        """One number of a row, seed by seed; without those that could not be measured (None, NaN)."""
        return list(self._by_seed(row, name).values())

    def _by_seed(self, row: str, name: str) -> dict[int, float]:
        known = {cell.seed: numbers.get(name) for cell, numbers in self.numbers.items() if cell.row == row}
        return {seed: value for seed, value in known.items() if value is not None and not math.isnan(value)}

    def mean(self, row: str, name: str, factor: float = 1.0) -> Estimate | None:
        """The mean over seeds, with its standard error; None if no seed has it."""
        values = self.values(row, name)
        return Estimate.mean_of(factor * torch.tensor(values, dtype=torch.float64)) if values else None

    def paired(self, row: str, other: str, name: str, of: Callable[[float], float] = float) -> list[float]:
        """A number of one row minus the same of another, for the seeds that have it in both; or so a function of it.

        >>> found = Found("smoke", {Cell("a"): {"x": 4.0}, Cell("b"): {"x": 2.0}, Cell("a", 1): {"x": 3.0}})
        >>> found.paired("a", "b", "x"), found.paired("a", "b", "x", of=lambda x: x**2)
        ([2.0], [12.0])
        """
        first, second = (self._by_seed(which, name) for which in (row, other))
        return [of(first[seed]) - of(second[seed]) for seed in first if seed in second]


@dataclass(frozen=True)
class Claim:
    """Whether a claim held here.

    >>> print(Claim("TrH raises robust accuracy", "held", "by 2.1 points on average"))
    TrH raises robust accuracy: **held**, by 2.1 points on average.
    """

    claim: str
    outcome: Answer
    words: str

    def __str__(self) -> str:
        return f"{self.claim}: **{self.outcome}**, {self.words}."


@dataclass(frozen=True)
class StudyReport:
    """What a study shows: tables by title, verdicts, pictures by name, and paragraphs around them."""

    tables: Mapping[str, Table]
    verdicts: Sequence[Claim]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    words: Sequence[str] = ()


STUDIES = Registry("study", "studies", "atoll.studies.base.Study", "atoll.studies")


class Study(ABC):
    """A table or figure of a paper as one command; see ``atoll.studies.engine`` for how it is run."""

    registry: ClassVar[Registry] = STUDIES

    name: ClassVar[str]
    title: ClassVar[str]
    shows: ClassVar[str]  # which tables and figures of which paper
    # Studies of one family measure the same of cells of the same name, so that one can use what another has done.
    family: ClassVar[str | None] = None

    @abstractmethod
    def cells(self, scale: Scale) -> list[Cell]:
        """The grid."""

    def overrides(self, cell: Cell, needed: Mapping[str, Run]) -> tuple[str, ...]:
        """Of a cell's recipe; for those that depend on the runs that it needs, such as where it starts from."""
        return cell.overrides

    @abstractmethod
    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """What is measured of a finished run; ``needed`` are the runs of the cells that it needs, by name."""

    @abstractmethod
    def conclude(self, found: Found) -> StudyReport:
        """Tables, pictures, verdicts."""
