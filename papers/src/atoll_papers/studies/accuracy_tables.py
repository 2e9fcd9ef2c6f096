"""Tables of robust accuracy: train all variants of a recipe grid, attack the best and the last checkpoint."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.runs.recipe import variants
from atoll.runs.run import Run
from atoll.studies.base import SCALES, Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS, accuracies, describe_evaluation

COLUMNS = (
    Column("best: clean", "high"),
    Column("PGD-20", "high"),
    Column("AutoAttack", "high"),
    Column("last: clean", "high"),
    Column("PGD-20", "high"),
    Column("AutoAttack", "high"),
    Column("gap: train - test, PGD-20", "low"),
)
KEYS = ("best clean", "best PGD-20", "best AutoAttack", "last clean", "last PGD-20", "last AutoAttack", "gap")


@dataclass(frozen=True)
class Grid:
    """Recipes and attacks of a scale.

    Args:
        grids: names of recipe grids.
        patterns: which variants, as patterns of file names.
        seeds: number of seeds.
        points: number of test points to attack; None for all.
        autoattack: version of AutoAttack.
        overrides: overrides for every recipe.
    """

    grids: tuple[str, ...]
    patterns: tuple[str, ...] = ("*",)
    seeds: int = 3
    points: int | None = None
    autoattack: str = "standard"
    overrides: tuple[str, ...] = ()

    def recipes(self) -> dict[str, str]:
        """Recipes by row, which is the name of the variant."""
        by_row = {recipe.partition("/")[2]: recipe for grid in self.grids for recipe in variants(grid)}
        matching = {name for name in by_row for pattern in self.patterns if fnmatch.fnmatchcase(name, pattern)}
        return {name: recipe for name, recipe in by_row.items() if name in matching}

    def cells(self) -> list[Cell]:
        return [
            Cell(name, seed, recipe, self.overrides)
            for name, recipe in self.recipes().items()
            for seed in range(self.seeds)
        ]


class AccuracyTable(Study):
    """Base of studies that compare a method with its base.

    Attributes:
        grids: grids by scale.
        claim: the claim that the method raises accuracy under AutoAttack.
        compared: endings of the rows with the method and of the rows that they are compared with, by scale.
    """

    grids: Mapping[Scale, Grid]
    claim: str
    compared: Mapping[Scale, tuple[str, str]]

    def cells(self, scale: Scale) -> list[Cell]:
        return self.grids[scale].cells()

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        grid, weights = self.grids[scale], "swa" if cell.row.endswith("swa") else "raw"
        numbers: Numbers = {}
        for which in ("best", "last"):
            part = accuracies(run, which=which, weights=weights, points=grid.points, autoattack=grid.autoattack)
            numbers |= {f"{which} {name}": value for name, value in part.items()}
        train = accuracies(run, which="last", weights=weights, split="train", points=grid.points)
        return numbers | {"gap": train["PGD-20"] - numbers["last PGD-20"]}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        rows = {row: [results.mean(row, key) for key in KEYS] for row in results.rows}
        return {"Accuracy in %": Table(COLUMNS, rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [claim_increase(self.claim, results, self.pairs(results), "last AutoAttack")]

    def notes(self, results: StudyResults) -> Sequence[str]:
        grid = self.grids[results.scale]
        names = " and ".join(f"`{name}`" for name in grid.grids)
        return [
            f"Recipes of {names}. {describe_evaluation(grid.points, grid.autoattack)} Last is after the last epoch. The"
            " gap compares the last checkpoint on training images and on equally many test images."
        ]

    def pairs(self, results: StudyResults) -> Sequence[tuple[str, str]]:
        """Rows with the method, each with the row it is compared with."""
        method, base = self.compared[results.scale]
        ours = [row for row in results.rows if row.rpartition("-")[2] == method]
        return [(row, row.removesuffix(method) + base) for row in ours]


class TrHTable(AccuracyTable):
    """Robust accuracy of TrH and of other methods for flat minima."""

    name = "trh-table"
    title = "TrH beside other methods for flat minima"
    reference = "TrH, tables 1, 7 and 8"
    claim = "TrH raises accuracy under AutoAttack"
    compared = dict.fromkeys(SCALES, ("trh", "base"))
    grids = {  # noqa: RUF012
        "smoke": Grid(("digits-flat",), ("at-base", "at-trh"), 1, 20, "fast", TINY_DIGITS),
        "cpu": Grid(("mnist-flat",), ("*",), 3, 500, "fast", SMALL_MNIST),
        "paper": Grid(("trh-cifar", "trh-imagenet")),
    }


class RATTable(AccuracyTable):
    """Robust accuracy of randomized adversarial training and of its base losses."""

    name = "rat-table"
    title = "Randomized adversarial training beside its base losses"
    reference = "RAT, tables 1-3, 5 and 8"
    claim = "RAT raises accuracy under AutoAttack"
    compared = {"smoke": ("rat", "base"), "cpu": ("rat", "base"), "paper": ("both", "0th")}  # noqa: RUF012
    grids = {  # noqa: RUF012
        "smoke": Grid(("digits-flat",), ("at-base", "at-rat"), 1, 20, "fast", TINY_DIGITS),
        "cpu": Grid(("mnist-flat",), ("at-base", "at-rat", "trades-base", "trades-rat"), 3, 500, "fast", SMALL_MNIST),
        "paper": Grid(("rat",)),
    }
