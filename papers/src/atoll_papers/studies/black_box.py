"""Black-box attackers: adversarial inputs of another model, and labels alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS

AWP_RAT = "methods=[{class_path: RAT, init_args: {order: 2}}, {class_path: AWP, init_args: {gamma: 0.005}}]"
ATTACKS = ("PGD-20", "CW-20")


@dataclass(frozen=True)
class Defenders:
    """Recipes and points of a scale.

    Args:
        surrogate: recipe of the attacker's model; None if there is none.
        base: recipe that the method is compared with.
        ours: recipe with the method, followed by overrides of its own.
        overrides: overrides for all three.
        seeds: number of seeds.
        points: number of test points to attack; None for all.
    """

    surrogate: str | None
    base: str
    ours: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    seeds: int = 3
    points: int | None = None


class BlackBox(Study):
    """Base of studies with a black-box attacker.

    Attributes:
        defenders: defenders by scale and data set.
        titles: titles of the base and of the method.
    """

    defenders: Mapping[Scale, Mapping[str, Defenders]]
    titles: tuple[str, str]

    def setting(self, cell: Cell, scale: Scale) -> Defenders:
        return self.defenders[scale][cell.row.partition(":")[0]]

    def cells(self, scale: Scale) -> list[Cell]:
        cells = []
        for data, each in self.defenders[scale].items():
            for seed in range(each.seeds):
                depends_on: tuple[str, ...] = ()
                if each.surrogate is not None:
                    surrogate = Cell(f"{data}: surrogate", seed, each.surrogate, each.overrides)
                    depends_on = (surrogate.name,)
                    cells.append(surrogate)
                recipe, *own = each.ours
                base, ours = (f"{data}: {title}" for title in self.titles)
                cells.append(Cell(base, seed, each.base, each.overrides, depends_on))
                cells.append(Cell(ours, seed, recipe, (*each.overrides, *own), depends_on))
        return cells

    def pairs(self, results: StudyResults) -> list[tuple[str, str]]:
        base, ours = self.titles
        return [(f"{data}: {ours}", f"{data}: {base}") for data in self.defenders[results.scale]]


class TransferTable(BlackBox):
    """Attacks crafted on a model of the same architecture and data, trained with AT from the same seed."""

    name = "transfer"
    title = "Adversarial inputs of another model"
    reference = "RAT, table 4"
    titles = ("AWP", "AWP + RAT")
    defenders = {  # noqa: RUF012
        "smoke": {
            "digits": Defenders(
                "digits-flat/at-base",
                "digits-flat/trades-awp",
                ("digits-flat/trades-awp", AWP_RAT),
                TINY_DIGITS,
                seeds=1,
                points=20,
            )
        },
        "cpu": {
            "MNIST": Defenders(
                "mnist-flat/at-base",
                "mnist-flat/trades-awp",
                ("mnist-flat/trades-awp", AWP_RAT),
                SMALL_MNIST,
                points=2000,
            )
        },
        "paper": {
            title: Defenders(
                f"rat/{data}-preact18-linf-at-0th",
                f"rat/{data}-preact18-linf-awp-0th",
                (f"rat/{data}-preact18-linf-awp-both",),
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
        names = ("clean", *ATTACKS)
        defenders = [row for row in results.rows if not row.endswith(": surrogate")]
        rows = {row: [results.mean(row, name) for name in names] for row in defenders}
        return {"Accuracy in %": Table([Column(name, "high") for name in names], rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        claim = "RAT on top of AWP raises accuracy under transferred"
        return [claim_increase(f"{claim} {name}", results, self.pairs(results), name) for name in ATTACKS]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "The adversarial inputs are crafted on the best checkpoint of a network of the same architecture, trained"
            " with AT on the same data from the same seed. The defender is the best checkpoint."
        ]


class RaySTable(BlackBox):
    """Distance to the decision boundary as estimated by an attacker who sees only labels."""

    name = "rays"
    title = "An attacker who sees only labels"
    reference = "RAT, table 7"
    titles = ("TRADES", "TRADES + RAT")
    defenders = {  # noqa: RUF012
        "smoke": {
            "digits": Defenders(
                None,
                "digits-flat/trades-base",
                ("digits-flat/trades-rat",),
                TINY_DIGITS,
                seeds=1,
                points=10,
            )
        },
        "cpu": {
            "MNIST": Defenders(
                None,
                "mnist-flat/trades-base",
                ("mnist-flat/trades-rat",),
                SMALL_MNIST,
                points=300,
            )
        },
        "paper": {
            "CIFAR-10": Defenders(
                None, "rat/cifar10-preact18-linf-trades-0th", ("rat/cifar10-preact18-linf-trades-both",)
            )
        },
    }

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        result = run.attack("RayS", adbd=True, points=self.setting(cell, scale).points)
        assert result.adbd is not None
        return {"clean": 100 * result.clean.value, "ADBD": result.adbd.value, "RayS": 100 * result.robust.value}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {"clean": Column("clean, %", "high"), "ADBD": Column("ADBD", "high", 4)}
        columns |= {"RayS": Column("RayS, %", "high")}
        rows = {row: [results.mean(row, name) for name in columns] for row in results.rows}
        return {"RayS": Table(list(columns.values()), rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        return [
            claim_increase(f"RAT raises {title} under RayS", results, self.pairs(results), name)
            for name, title in (("ADBD", "the distance to the boundary"), ("RayS", "accuracy"))
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "ADBD is the mean linf distance of correctly classified points to the closest misclassified input that RayS"
            " finds. RayS is the share of all points that are correct and for which this distance is larger than eps."
        ]
