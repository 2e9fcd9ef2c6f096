"""Attackers that cannot look into the model: inputs made on another one, and labels alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atoll.attacks import Transfer
from atoll.attacks.evaluate import evaluate
from atoll.attacks.rays import boundary_distance
from atoll.attacks.suites import get_attacks
from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS, first

AWP_RAT = "methods=[{class_path: RAT, init_args: {order: 2}}, {class_path: AWP, init_args: {gamma: 0.005}}]"
ATTACKS = ("PGD-20", "CW-20")
BATCH = 500  # points that RayS asks about at a time


@dataclass(frozen=True)
class Defenders:
    """What a scale consists of.

    Args:
        surrogate: the recipe that the attacker has; None if none is needed.
        base: what the method is compared with.
        ours: the recipe with the method, followed by overrides of its own.
        overrides: for all three.
        seeds: how many.
        points: test points that are attacked; None for all.
        queries: of RayS, for each point.
    """

    surrogate: str | None
    base: str
    ours: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    seeds: int = 3
    points: int | None = None
    queries: int = 10_000


class BlackBox(Study):
    """A subclass says what the attacker does.

    Attributes:
        defenders: by scale and data set.
        titles: of the base and of the method.
    """

    defenders: Mapping[Scale, Mapping[str, Defenders]]
    titles: tuple[str, str]

    def setting(self, cell: Cell, scale: Scale) -> Defenders:
        return self.defenders[scale][cell.row.partition(":")[0]]

    def cells(self, scale: Scale) -> list[Cell]:
        cells = []
        for data, each in self.defenders[scale].items():
            for seed in range(each.seeds):
                needs: tuple[str, ...] = ()
                if each.surrogate is not None:
                    surrogate = Cell(f"{data}: surrogate", seed, each.surrogate, each.overrides)
                    needs = (surrogate.name,)
                    cells.append(surrogate)
                recipe, *own = each.ours
                base, ours = (f"{data}: {title}" for title in self.titles)
                cells.append(Cell(base, seed, each.base, each.overrides, needs))
                cells.append(Cell(ours, seed, recipe, (*each.overrides, *own), needs))
        return cells

    def pairs(self, found: Found) -> list[tuple[str, str]]:
        base, ours = self.titles
        return [(f"{data}: {ours}", f"{data}: {base}") for data in self.defenders[found.scale]]


class TransferTable(BlackBox):
    """Inputs are made on a model of the same architecture and data, trained with AT from the same seed."""

    name = "transfer"
    title = "Adversarial inputs made on another model"
    shows = "RAT, table 4"
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

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """Accuracy in % of the best checkpoint, under attacks on the best checkpoint of the surrogate."""
        assert run is not None
        if not needed:
            return {}  # the surrogate itself
        device = default_device()
        (surrogate,) = (other.model().to(device) for other in needed.values())
        attacks = {name: Transfer(one, surrogate) for name, one in get_attacks(ATTACKS, run.threat).items()}
        points = first(run.data.split("test"), self.setting(cell, scale).points)
        found = evaluate(run.model().to(device), points, attacks, seed="evaluation", device=device, check=False)
        return {name: 100 * accuracy.value for name, accuracy in found.accuracy.items()}

    def conclude(self, found: Found) -> StudyReport:
        names = ("clean", *ATTACKS)
        rows = {row: [found.mean(row, n) for n in names] for row in found.rows if not row.endswith(": surrogate")}
        verdicts = [
            claim_increase(
                f"RAT on top of AWP raises accuracy under transferred {name}", found, self.pairs(found), name
            )
            for name in ATTACKS
        ]
        words = (
            "Adversarial inputs are made on the best checkpoint of a net of the same architecture, trained with AT on"
            " the same data from the same seed, and shown to the best checkpoint of the defender."
        )
        table = Table([Column(name, "high") for name in names], rows)
        return StudyReport({"Accuracy in %": table}, verdicts, words=[words])


class RaySTable(BlackBox):
    """The distance to the decision boundary that an attacker finds who sees nothing but labels."""

    name = "rays"
    title = "An attacker who sees labels alone"
    shows = "RAT, table 7"
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
                queries=100,
            )
        },
        "cpu": {
            "MNIST": Defenders(
                None,
                "mnist-flat/trades-base",
                ("mnist-flat/trades-rat",),
                SMALL_MNIST,
                points=300,
                queries=5000,
            )
        },
        "paper": {
            "CIFAR-10": Defenders(
                None, "rat/cifar10-preact18-linf-trades-0th", ("rat/cifar10-preact18-linf-trades-both",)
            )
        },
    }

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        setting, device = self.setting(cell, scale), default_device()
        model = run.model().to(device)
        x, y = run.data.tensors("test", setting.points)
        found = [
            boundary_distance(model, *batch, bounds=run.data.bounds, queries=setting.queries)
            for batch in zip(torch.split(x.to(device), BATCH), torch.split(y.to(device), BATCH), strict=True)
        ]
        return distances(torch.cat(found), run.threat.radius)

    def conclude(self, found: Found) -> StudyReport:
        columns = {"clean": Column("clean, %", "high"), "ADBD": Column("ADBD", "high", 4)}
        columns |= {"RayS": Column("RayS, %", "high")}
        rows = {row: [found.mean(row, name) for name in columns] for row in found.rows}
        words = (
            "ADBD is the mean linf distance, over points that are classified correctly, to the closest misclassified"
            " input that RayS finds; RayS is the share of all points for which that is farther than eps."
        )
        verdicts = [
            claim_increase(f"RAT raises {title} under RayS", found, self.pairs(found), name)
            for name, title in (("ADBD", "the distance to the boundary"), ("RayS", "accuracy"))
        ]
        return StudyReport({"RayS": Table(list(columns.values()), rows)}, verdicts, words=[words])


def distances(distance: torch.Tensor, eps: float) -> Numbers:
    """Clean accuracy (%), average decision boundary distance, and accuracy within eps (%), from all distances.

    Points that are misclassified have distance 0; those where nothing was found have no distance and stand.

    >>> distances(torch.tensor([0.0, 0.25, 0.75, float("inf")]), 0.5)
    {'clean': 75.0, 'ADBD': 0.5, 'RayS': 50.0}
    """
    correct = distance[distance > 0]
    known = correct[correct.isfinite()]
    return {
        "clean": 100 * len(correct) / len(distance),
        "ADBD": float(known.mean()) if len(known) else None,
        "RayS": 100 * float((distance > eps).double().mean()),
    }
