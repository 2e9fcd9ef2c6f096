"""Black-box attacks: transfer from another model, and attacks that see only labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS, TRADES_AND_RAT, Setting, accuracy_table, mean_table

AWP_RAT = "methods=[{class_path: RAT, init_args: {order: 2}}, {class_path: AWP, init_args: {gamma: 0.005}}]"
ATTACKS = ("PGD-20", "CW-20")


@dataclass(frozen=True)
class Defenders(Setting):
    """Networks without and with the method, in this order, and the recipe of the surrogate, if there is one."""

    surrogate: str | None = None


class BlackBox(Study):
    """Base class of studies with black-box attacks.

    Attributes:
        defenders: defenders by scale and data set.
    """

    defenders: Mapping[Scale, Mapping[str, Defenders]]

    def setting(self, cell: Cell, scale: Scale) -> Defenders:
        return self.defenders[scale][cell.row.partition(":")[0]]

    def cells(self, scale: Scale) -> list[Cell]:
        cells: list[Cell] = []
        for data, each in self.defenders[scale].items():
            for seed in range(each.seeds):
                surrogate = Cell(f"{data}: surrogate", seed, each.surrogate, each.overrides)
                attackers = [] if each.surrogate is None else [surrogate]
                depends_on = tuple(attacker.name for attacker in attackers)
                cells += attackers
                cells += [
                    Cell(f"{data}: {title}", seed, recipe, (*each.overrides, *own), depends_on)
                    for title, (recipe, *own) in each.recipes.items()
                ]
        return cells

    def pairs(self, results: StudyResults) -> list[tuple[str, str]]:
        titles = {data: tuple(each.recipes) for data, each in self.defenders[results.scale].items()}
        return [(f"{data}: {ours}", f"{data}: {base}") for data, (base, ours) in titles.items()]


def _awp(grid: str, **setting: Any) -> Defenders:
    recipes = {"AWP": [f"{grid}/trades-awp"], "AWP + RAT": [f"{grid}/trades-awp", AWP_RAT]}
    return Defenders(recipes, surrogate=f"{grid}/at-base", **setting)


class TransferTable(BlackBox):
    """Attacks crafted on a model with the same architecture and data, trained with AT from the same seed."""

    name = "transfer"
    title = "Transfer attacks"
    reference = "RAT, table 4"
    defenders = {  # noqa: RUF012
        "smoke": {"digits": _awp("digits-flat", overrides=TINY_DIGITS, seeds=1, points=20)},
        "cpu": {"MNIST": _awp("mnist-flat", overrides=SMALL_MNIST, points=2000)},
        "paper": {
            title: Defenders(
                {
                    "AWP": [f"rat/{data}-preact18-linf-awp-0th"],
                    "AWP + RAT": [f"rat/{data}-preact18-linf-awp-both"],
                },
                surrogate=f"rat/{data}-preact18-linf-at-0th",
            )
            for title, data in (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100"), ("SVHN", "svhn"))
        },
    }

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Accuracy in % of the best checkpoint under attacks on the best checkpoint of the surrogate."""
        assert run is not None
        if not dependencies:
            return {}  # the surrogate itself
        (surrogate,) = dependencies.values()
        points = self.setting(cell, scale).points
        result = run.attack(",".join(ATTACKS), surrogate=str(surrogate.folder), points=points)
        return {name.removesuffix(" (transfer)"): 100 * value.value for name, value in result.accuracy.items()}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        defenders = [row for row in results.rows if not row.endswith(": surrogate")]
        return {"Accuracy in %": accuracy_table(results, "clean", *ATTACKS, rows=defenders)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        claim = "RAT on top of AWP raises accuracy under transferred"
        return [claim_increase(f"{claim} {name}", results, self.pairs(results), name) for name in ATTACKS]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "The adversarial inputs are crafted on the best checkpoint of a network with the same architecture, trained"
            " with AT on the same data from the same seed. They are evaluated on the best checkpoint of the defender."
        ]


class RaySTable(BlackBox):
    """Distance to the decision boundary, estimated by an attack that sees only labels."""

    name = "rays"
    title = "Attacks that see only labels"
    reference = "RAT, table 7"
    defenders = {  # noqa: RUF012
        "smoke": {"digits": Defenders(TRADES_AND_RAT["smoke"], overrides=TINY_DIGITS, seeds=1, points=10)},
        "cpu": {"MNIST": Defenders(TRADES_AND_RAT["cpu"], overrides=SMALL_MNIST, points=300)},
        "paper": {"CIFAR-10": Defenders(TRADES_AND_RAT["paper"])},
    }

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        result = run.attack("RayS", adbd=True, points=self.setting(cell, scale).points)
        assert result.adbd is not None
        return {"clean": 100 * result.clean.value, "ADBD": result.adbd.value, "RayS": 100 * result.robust.value}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {"clean": Column("clean, %", "high"), "ADBD": Column("ADBD", "high", 4)}
        return {"RayS": mean_table(results, columns | {"RayS": Column("RayS, %", "high")})}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [
            claim_increase(f"RAT raises {title} under RayS", results, self.pairs(results), name)
            for name, title in (("ADBD", "the distance to the boundary"), ("RayS", "accuracy"))
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "ADBD is the mean linf distance from correctly classified points to the closest misclassified input that"
            " RayS finds. RayS is the share of all points that are correct and whose distance is larger than eps."
        ]
