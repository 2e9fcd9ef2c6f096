"""Tables of robust accuracy: train all variants of a recipe grid, attack the best and the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.runs.run import Run
from atoll.studies.base import SCALES, Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import ROBUST, Grid, RecipeStudy, Setting, accuracies, describe_evaluation, mean_table

COLUMNS = {
    "best clean": Column("best: clean", "high"),
    "best PGD-20": Column("PGD-20", "high"),
    "best AutoAttack": Column("AutoAttack", "high"),
    "last clean": Column("last: clean", "high"),
    "last PGD-20": Column("PGD-20", "high"),
    "last AutoAttack": Column("AutoAttack", "high"),
    "gap": Column("gap: train - test, PGD-20", "low"),
}


class AccuracyTable(RecipeStudy[Setting]):
    """Base of studies that compare a method with its base.

    Attributes:
        claim: the claim that the method raises accuracy under AutoAttack.
        compared: endings of the rows with the method and of the rows that they are compared with, by scale.
    """

    claim: str
    compared: Mapping[Scale, tuple[str, str]]

    def measure_run(self, run: Run, cell: Cell, setting: Setting) -> Numbers:
        weights = "swa" if cell.row.endswith("swa") else "raw"
        numbers: Numbers = {}
        for which in ("best", "last"):
            part = accuracies(run, which=which, weights=weights, points=setting.points, autoattack=setting.attacks)
            numbers |= {f"{which} {name}": value for name, value in part.items()}
        train = accuracies(run, which="last", weights=weights, split="train", points=setting.points)
        return numbers | {"gap": train["PGD-20"] - numbers["last PGD-20"]}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"Accuracy in %": mean_table(results, COLUMNS)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [claim_increase(self.claim, results, self.pairs(results), "last AutoAttack")]

    def notes(self, results: StudyResults) -> Sequence[str]:
        setting = self.settings[results.scale]
        grids = dict.fromkeys(recipe.partition("/")[0] for recipe, *_ in setting.recipes.values())
        names = " and ".join(f"`{grid}`" for grid in grids)
        return [
            f"Recipes of {names}. {describe_evaluation(setting.points, setting.attacks)} Last is after the last epoch."
            " The gap compares the last checkpoint on training images and on equally many test images."
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
    settings = {  # noqa: RUF012
        "smoke": Setting(Grid("digits-flat", patterns=("at-base", "at-trh")), **ROBUST["smoke"]),
        "cpu": Setting(Grid("mnist-flat"), **ROBUST["cpu"]),
        "paper": Setting(Grid("trh-cifar", "trh-imagenet")),
    }


class RATTable(AccuracyTable):
    """Robust accuracy of randomized adversarial training and of its base losses."""

    name = "rat-table"
    title = "Randomized adversarial training beside its base losses"
    reference = "RAT, tables 1-3, 5 and 8"
    claim = "RAT raises accuracy under AutoAttack"
    compared = {"smoke": ("rat", "base"), "cpu": ("rat", "base"), "paper": ("both", "0th")}  # noqa: RUF012
    settings = {  # noqa: RUF012
        "smoke": Setting(Grid("digits-flat", patterns=("at-base", "at-rat")), **ROBUST["smoke"]),
        "cpu": Setting(
            Grid("mnist-flat", patterns=("at-base", "at-rat", "trades-base", "trades-rat")), **ROBUST["cpu"]
        ),
        "paper": Setting(Grid("rat")),
    }
