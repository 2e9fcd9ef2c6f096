"""Tables of robust accuracy: train all variants of a recipe grid and attack their best and last checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.runs.run import Run, Which
from atoll.studies.base import SCALES, Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import ROBUST, Grid, RecipeStudy, Setting, accuracies, describe_evaluation, mean_table

WHICH: tuple[Which, ...] = ("best", "last")
ACCURACY = {
    "clean": "clean accuracy",
    "PGD-20": "accuracy under PGD-20",
    "CW-20": "accuracy under CW-20",
    "AutoAttack": "accuracy under AutoAttack",
}


class AccuracyTable(RecipeStudy[Setting]):
    """Base class of studies that compare a method with its base loss.

    Attributes:
        method: name of the method, which is claimed to raise accuracy.
        compared: suffixes of the rows with the method and of their baselines, by scale.
        attacks: attacks besides AutoAttack.
        judged: the checkpoint and the accuracies that claims are about.
    """

    method: str
    compared: Mapping[Scale, tuple[str, str]]
    attacks: tuple[str, ...] = ("PGD-20",)
    judged: tuple[Which, Sequence[str]] = ("last", ["AutoAttack"])

    def measure_run(self, run: Run, cell: Cell, setting: Setting) -> Numbers:
        weights = "swa" if cell.row.endswith("swa") else "raw"
        common: dict[str, Any] = {"weights": weights, "points": setting.points, "as_rat": setting.as_rat}
        numbers: Numbers = {}
        for which in WHICH:
            part = accuracies(run, which=which, attacks=self.attacks, autoattack=setting.attacks, **common)
            numbers |= {f"{which} {name}": value for name, value in part.items()}
        train = accuracies(run, which="last", split="train", **common)
        return numbers | {"gap": train["PGD-20"] - numbers["last PGD-20"]}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        names = ("clean", *self.attacks, "AutoAttack")
        columns = {f"{which} {name}": Column(f"{which}: {name}", "high") for which in WHICH for name in names}
        return {"Accuracy in %": mean_table(results, columns | {"gap": Column("gap: train - test, PGD-20", "low")})}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        which, names = self.judged
        pairs = self.pairs(results)
        return [
            claim_increase(
                f"{self.method} raises {ACCURACY[name]} ({which} checkpoint)", results, pairs, f"{which} {name}"
            )
            for name in names
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        setting = self.settings[results.scale]
        grids = dict.fromkeys(recipe.partition("/")[0] for recipe, *_ in setting.recipes.values())
        names = " and ".join(f"`{grid}`" for grid in grids)
        return [
            f"Recipes from {names}. {describe_evaluation(setting.points, setting.attacks, as_rat=setting.as_rat)}"
            ' "Last" is the checkpoint after the last epoch. The gap is its accuracy on training images minus its'
            " accuracy on the same number of test images."
        ]

    def pairs(self, results: StudyResults) -> Sequence[tuple[str, str]]:
        """Pairs of a row with the method and its baseline."""
        method, base = self.compared[results.scale]
        ours = [row for row in results.rows if row.rpartition("-")[2] == method]
        return [(row, row.removesuffix(method) + base) for row in ours]


class TrHTable(AccuracyTable):
    """Robust accuracy of TrH and other methods for flat minima."""

    name = "trh-table"
    title = "TrH compared with other methods for flat minima"
    reference = "TrH, tables 1, 7 and 8"
    method = "TrH"
    compared = dict.fromkeys(SCALES, ("trh", "base"))
    settings = {  # noqa: RUF012
        "smoke": Setting(Grid("digits-flat", patterns=("at-base", "at-trh")), **ROBUST["smoke"]),
        "cpu": Setting(Grid("mnist-flat"), **ROBUST["cpu"]),
        "paper": Setting(Grid("trh-cifar", "trh-imagenet")),
    }


class RATTable(AccuracyTable):
    """Robust accuracy of randomized adversarial training and its base losses."""

    name = "rat-table"
    title = "Randomized adversarial training compared with its base losses"
    reference = "RAT, tables 1-3, 5 and 8"
    method = "RAT"
    attacks = ("PGD-20", "CW-20")
    judged = ("best", tuple(ACCURACY))  # as in the paper
    compared = {"smoke": ("rat", "base"), "cpu": ("rat", "base"), "paper": ("both", "0th")}  # noqa: RUF012
    settings = {  # noqa: RUF012
        "smoke": Setting(Grid("digits-flat", patterns=("at-base", "at-rat")), **ROBUST["smoke"]),
        "cpu": Setting(
            Grid("mnist-flat", patterns=("at-base", "at-rat", "trades-base", "trades-rat")), **ROBUST["cpu"]
        ),
        "paper": Setting(
            Grid(
                "rat",
                patterns=(
                    "cifar10-preact18-linf-trades-*",  # table 1, with the best eta; study rat-eta covers the others
                    *("cifar10-wrn34-linf-trades-*", "cifar10-wrn34-linf-awp-*"),  # table 2
                    *("cifar100-wrn34-linf-trades-*", "cifar100-wrn34-linf-awp-*"),
                    *("*-preact18-l2-awp-0th", "*-preact18-l2-awp-both"),  # table 3
                    *(  # table 5
                        f"cifar10-{net}-linf-{loss}-{term}"
                        for net in ("vgg16", "mobilenetv2")
                        for loss in ("trades", "awp")
                        for term in ("0th", "both")
                    ),
                    *("cifar10-preact18-linf-at-0th", "cifar10-preact18-linf-at-both"),  # table 8
                ),
            ),
            as_rat=True,
        ),
    }
