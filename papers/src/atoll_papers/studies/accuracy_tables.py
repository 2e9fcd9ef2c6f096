"""Tables of robust accuracy: a book of recipes, every row and seed trained, best and last checkpoint attacked."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.runs.recipe import rows
from atoll.runs.run import Run
from atoll.studies.base import SCALES, Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS, accuracies, evaluated

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
    """What a scale consists of.

    Args:
        books: of recipes.
        patterns: which rows of them, as for file names.
        seeds: how many.
        points: test points that are attacked; None for all.
        autoattack: its version.
        overrides: for every recipe.
    """

    books: tuple[str, ...]
    patterns: tuple[str, ...] = ("*",)
    seeds: int = 3
    points: int | None = None
    autoattack: str = "standard"
    overrides: tuple[str, ...] = ()

    def recipes(self) -> dict[str, str]:
        """By the name of the row, which is theirs without the book."""
        named = {recipe.partition("/")[2]: recipe for book in self.books for recipe in rows(book)}
        matching = {name for name in named for pattern in self.patterns if fnmatch.fnmatchcase(name, pattern)}
        return {name: recipe for name, recipe in named.items() if name in matching}

    def cells(self) -> list[Cell]:
        return [
            Cell(name, seed, recipe, self.overrides)
            for name, recipe in self.recipes().items()
            for seed in range(self.seeds)
        ]


class AccuracyTable(Study):
    """A subclass says what is compared.

    Attributes:
        grids: by scale.
        claim: that a method raises accuracy under AutoAttack.
        compared: by scale, how rows with the method end, and those that they are compared with.
    """

    grids: Mapping[Scale, Grid]
    claim: str
    compared: Mapping[Scale, tuple[str, str]]

    def cells(self, scale: Scale) -> list[Cell]:
        return self.grids[scale].cells()

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        grid, weights = self.grids[scale], "swa" if cell.row.endswith("swa") else "raw"
        numbers: Numbers = {}
        for which in ("best", "last"):
            found = accuracies(run, which=which, weights=weights, points=grid.points, autoattack=grid.autoattack)
            numbers |= {f"{which} {name}": value for name, value in found.items()}
        train = accuracies(run, which="last", weights=weights, split="train", points=grid.points)
        return numbers | {"gap": train["PGD-20"] - numbers["last PGD-20"]}

    def conclude(self, found: Found) -> StudyReport:
        table = Table(COLUMNS, {row: [found.mean(row, key) for key in KEYS] for row in found.rows})
        grid = self.grids[found.scale]
        books = " and ".join(f"`{book}`" for book in grid.books)
        words = (
            f"Recipes of {books}. {evaluated(grid.points, grid.autoattack)} Last is after the last epoch; the gap is"
            " that of the last checkpoint to training images, as many."
        )
        verdict = claim_increase(self.claim, found, self.pairs(found), "last AutoAttack")
        return StudyReport({"Accuracy in %": table}, [verdict], words=[words])

    def pairs(self, found: Found) -> Sequence[tuple[str, str]]:
        """Rows with the method, each with the one it is compared with."""
        method, base = self.compared[found.scale]
        ours = [row for row in found.rows if row.rpartition("-")[2] == method]
        return [(row, row.removesuffix(method) + base) for row in ours]


class TrHTable(AccuracyTable):
    name = "trh-table"
    title = "TrH beside other methods for flat minima"
    shows = "TrH, tables 1, 7 and 8"
    claim = "TrH raises accuracy under AutoAttack"
    compared = dict.fromkeys(SCALES, ("trh", "base"))
    grids = {  # noqa: RUF012
        "smoke": Grid(("digits-flat",), ("at-base", "at-trh"), 1, 20, "fast", TINY_DIGITS),
        "cpu": Grid(("mnist-flat",), ("*",), 3, 500, "fast", SMALL_MNIST),
        "paper": Grid(("trh-cifar", "trh-imagenet")),
    }


class RATTable(AccuracyTable):
    name = "rat-table"
    title = "Randomized adversarial training beside its base losses"
    shows = "RAT, tables 1-3, 5 and 8"
    claim = "RAT raises accuracy under AutoAttack"
    compared = {"smoke": ("rat", "base"), "cpu": ("rat", "base"), "paper": ("both", "0th")}  # noqa: RUF012
    grids = {  # noqa: RUF012
        "smoke": Grid(("digits-flat",), ("at-base", "at-rat"), 1, 20, "fast", TINY_DIGITS),
        "cpu": Grid(("mnist-flat",), ("at-base", "at-rat", "trades-base", "trades-rat"), 3, 500, "fast", SMALL_MNIST),
        "paper": Grid(("rat",)),
    }
