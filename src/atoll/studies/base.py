"""The definition of a study: a grid of recipes, measurements of each run, tables, and claims to check."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, SupportsIndex

import torch
from matplotlib.figure import Figure

from atoll.registry import Registry, class_path
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.table import Table

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
Outcome = Literal["supported", "contradicted", "inconclusive", "not testable"]
Numbers = dict[str, Any]  # measurements of a cell as plain JSON


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        row: row of the table; the seeds of a row are averaged.
        seed: seed of the recipe.
        recipe: recipe to train; None if the cell trains nothing.
        overrides: overrides such as ``key.sub=value``, applied to the recipe.
        depends_on: names of cells whose runs must finish first.

    >>> Cell("AT + TrH", seed=2).name
    'at-trh-2'
    """

    row: str
    seed: int = 0
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the folder of the cell."""
        return re.sub(r"[^a-z0-9.]+", "-", self.row.lower()).strip("-") + f"-{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"overrides": list(self.overrides), "depends_on": list(self.depends_on)}


@dataclass(frozen=True)
class StudyResults:
    """The numbers of all cells.

    Args:
        scale: scale of the study.
        numbers: numbers of the cells that succeeded.
        failed: reasons why the other cells failed.
        runs: runs of the cells that succeeded, except those without training.
    """

    scale: Scale
    numbers: Mapping[Cell, Numbers]
    failed: Mapping[Cell, str] = field(default_factory=dict)
    runs: Mapping[Cell, Run] = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        """The rows, in the order of the cells."""
        return list(dict.fromkeys(cell.row for cell in (*self.numbers, *self.failed)))

    def of(self, row: str) -> list[Numbers]:
        """Return the numbers of a row, one entry per seed."""
        return [numbers for cell, numbers in self.numbers.items() if cell.row == row]

    def values(self, row: str, name: str) -> list[float]:
        """Return one number of a row, with one value per seed that has it."""
        return list(self.by_seed(row, name).values())

    def by_seed(self, row: str, name: str) -> dict[int, float]:
        """Return one number of a row by seed, without seeds that have no value (None, NaN)."""
        values = {cell.seed: numbers.get(name) for cell, numbers in self.numbers.items() if cell.row == row}
        return {seed: value for seed, value in values.items() if value is not None and not math.isnan(value)}

    def mean(self, row: str, name: str, factor: float = 1.0) -> Estimate | None:
        """Return the mean over seeds with its standard error, or None if no seed has a value."""
        values = self.values(row, name)
        return Estimate.mean_of(factor * torch.tensor(values, dtype=torch.float64)) if values else None

    def paired(self, row: str, other: str, name: str, of: Callable[[float], float] = float) -> list[float]:
        """Return differences of a number (or a function of it) between two rows, for the seeds that both have.

        >>> results = StudyResults("smoke", {Cell("a"): {"x": 4.0}, Cell("b"): {"x": 2.0}, Cell("a", 1): {"x": 3.0}})
        >>> results.paired("a", "b", "x"), results.paired("a", "b", "x", of=lambda x: x**2)
        ([2.0], [12.0])
        """
        first, second = (self.by_seed(which, name) for which in (row, other))
        return [of(first[seed]) - of(second[seed]) for seed in first if seed in second]


@dataclass(frozen=True)
class Claim:
    """A claim and whether the numbers of a study support it, as decided by ``atoll.studies.claims``.

    Args:
        claim: the claim, as a sentence.
        outcome: ``not testable`` if numbers are missing.
        message: the numbers behind the outcome.
        smallest_effect: half the length of the longest interval; smaller effects cannot be detected.
        seeds_needed: number of seeds that would decide an inconclusive claim; None if more than 1000.

    >>> print(Claim("TrH raises robust accuracy", "supported", "by 2.1 points on average"))
    TrH raises robust accuracy: **supported**, by 2.1 points on average.
    """

    claim: str
    outcome: Outcome
    message: str
    smallest_effect: float | None = None
    seeds_needed: int | None = None

    def __str__(self) -> str:
        return f"{self.claim}: **{self.outcome}**, {self.message}."


@dataclass(frozen=True)
class StudyReport:
    """The report of a study: tables by title, claims, figures by name, and paragraphs of notes."""

    tables: Mapping[str, Table]
    claims: Sequence[Claim]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    notes: Sequence[str] = ()


STUDIES = Registry("study", "studies", "atoll.studies.base.Study", "atoll.studies")


class Study(ABC):
    """Base class of studies, which reproduce tables and figures of a paper; ``atoll.studies.engine`` runs them."""

    registry: ClassVar[Registry] = STUDIES

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]  # the tables and figures it reproduces
    # Studies of a family measure the same numbers for cells with the same name, so they can share a folder of cells.
    family: ClassVar[str | None] = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle a study of a file (``my_study.py:MyStudy``) by path, so that workers load it from the file."""
        path = class_path(type(self))
        return (_restore, (path, vars(self))) if ".py:" in path else super().__reduce_ex__(protocol)

    @abstractmethod
    def cells(self, scale: Scale) -> list[Cell]:
        """Return the cells of the study at a scale."""

    def overrides(self, cell: Cell, dependencies: Mapping[str, Run]) -> tuple[str, ...]:
        """Return the overrides of the recipe of a cell, which may depend on other runs, such as initial weights."""
        return cell.overrides

    def required(self, cell: Cell, scale: Scale) -> Mapping[str, str]:
        """Return overrides that the user must provide, by key, with a description, such as weights that Atoll lacks."""
        return {}

    @abstractmethod
    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Measure the numbers of a cell by name, from its finished run and the runs it depends on."""

    @abstractmethod
    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        """Return tables by title."""

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        """Check the claims of the study."""
        return ()

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Return figures by name; if there are none, the first table is plotted."""
        return {}

    def notes(self, results: StudyResults) -> Sequence[str]:
        """Return paragraphs that explain what was measured and how."""
        return ()

    def report(self, results: StudyResults) -> StudyReport:
        """Return the complete report."""
        return StudyReport(self.tables(results), self.claims(results), self.figures(results), self.notes(results))


def _restore(path: str, attributes: dict[str, Any]) -> Study:
    study: Study = object.__new__(STUDIES.resolve(path).cls)
    vars(study).update(attributes)
    return study
