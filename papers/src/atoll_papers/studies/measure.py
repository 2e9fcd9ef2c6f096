"""Cells and measurements that several studies share."""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.measure import SplitName
from atoll.runs.recipe import variants
from atoll.runs.run import Run, Which
from atoll.studies.base import Cell, Numbers, Scale, Study, StudyResults
from atoll.studies.table import Column, Table

# A part of MNIST that is small enough for robust overfitting.  The recipes have the same values, but they would be lost
# when a user replaces MNIST.  The test at the end of training is off, because the studies measure what they need.
SMALL_MNIST = ("data.limit=1000", "data.validation=0.01", "trainer.test_steps=0")
# For the smallest scale.
TINY_DIGITS = (
    *("data.limit=100", "model={class_path: MLP, init_args: {hidden: [8]}}", "attack.steps=2"),
    *("trainer.epochs=1", "trainer.validation_steps=1", "trainer.test_steps=0"),
)
# Settings at the smaller scales, for studies of robust accuracy and of certified accuracy.
ROBUST: Mapping[str, Mapping[str, Any]] = {
    "smoke": {"seeds": 1, "points": 20, "attacks": "APGD-CE", "overrides": TINY_DIGITS},
    "cpu": {"points": 500, "attacks": "fast", "overrides": SMALL_MNIST},
}
CERTIFIED: Mapping[str, Mapping[str, Any]] = {
    "smoke": {"seeds": 1, "points": 5, "attacks": "PGD-2", "check": 1},
    "cpu": {"seeds": 2, "points": 500, "attacks": "fast", "check": 100},
}
# Recipes for TRADES without and with RAT, by scale.
TRADES_AND_RAT: Mapping[Scale, Mapping[str, list[str]]] = {
    "smoke": {"TRADES": ["digits-flat/trades-base"], "TRADES + RAT": ["digits-flat/trades-rat"]},
    "cpu": {"TRADES": ["mnist-flat/trades-base"], "TRADES + RAT": ["mnist-flat/trades-rat"]},
    "paper": {
        "TRADES": ["rat/cifar10-preact18-linf-trades-0th"],
        "TRADES + RAT": ["rat/cifar10-preact18-linf-trades-both"],
    },
}
# Files that the TrH paper uses and Atoll does not include, by grid: keys of overrides and descriptions.
PRETRAINED = {"pretrained": "the ImageNet-21k weights of the paper"}
NOT_INCLUDED: Mapping[str, Mapping[str, str]] = {
    "trh-imagenet": PRETRAINED,
    "trh-cifar": {**PRETRAINED, "data.extra": "the million images from a DDPM that the paper adds"},
}
RAT_EPS = "0.031"  # for PGD-20 and CW-20 in RAT's tables; AutoAttack uses 8/255
# A standard network and a network trained with AT that differ in nothing else.
NETS: Mapping[str, tuple[str, ...]] = {"standard": ("loss=Standard",), "AT": ()}


@dataclass(frozen=True)
class Setting:
    """What a study trains and measures at a scale; some studies add fields.

    Args:
        recipes: recipe of each row, followed by overrides for this row.
        seeds: number of seeds.
        overrides: overrides for every recipe.
        points: number of test points; None for all.
        attacks: a version of AutoAttack, or other attacks in the format of `atoll certify`.
        check: number of certified points to attack at their radius.
        as_rat: attack with the PGD-20 and CW-20 of RAT's tables, if the threat is linf.
    """

    recipes: Mapping[str, Sequence[str]]
    _: KW_ONLY
    seeds: int = 3
    overrides: tuple[str, ...] = ()
    points: int | None = None
    attacks: str = "standard"
    check: int = 500
    as_rat: bool = False


class Grid(Mapping[str, tuple[str]]):
    """The variants of recipe grids whose names match a pattern, by name; files are read lazily."""

    def __init__(self, *grids: str, patterns: Sequence[str] = ("*",)) -> None:
        self.grids, self.patterns = grids, patterns

    @cached_property
    def recipes(self) -> dict[str, tuple[str]]:
        by_name = {recipe.partition("/")[2]: recipe for grid in self.grids for recipe in variants(grid)}
        matching = {name for name in by_name for pattern in self.patterns if fnmatch.fnmatchcase(name, pattern)}
        return {name: (recipe,) for name, recipe in by_name.items() if name in matching}

    def __getitem__(self, name: str) -> tuple[str]:
        return self.recipes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recipes)

    def __len__(self) -> int:
        return len(self.recipes)


S = TypeVar("S", bound=Setting)


class RecipeStudy(Study, Generic[S]):
    """Base class of studies that train a recipe for every row and seed.

    Attributes:
        settings: settings by scale.
    """

    settings: Mapping[Scale, S]

    def recipes(self, setting: S) -> Mapping[str, Sequence[str]]:
        """The recipe of each row, followed by overrides for this row."""
        return setting.recipes

    @abstractmethod
    def measure_run(self, run: Run, cell: Cell, setting: S) -> Numbers:
        """Measure a finished run."""

    def cells(self, scale: Scale) -> list[Cell]:
        setting = self.settings[scale]
        return [
            Cell(row, seed, recipe, (*setting.overrides, *own))
            for row, (recipe, *own) in self.recipes(setting).items()
            for seed in range(setting.seeds)
        ]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        return self.measure_run(run, cell, self.settings[scale])

    def required(self, cell: Cell, scale: Scale) -> Mapping[str, str]:
        return NOT_INCLUDED.get((cell.recipe or "").partition("/")[0], {})


def standard_and_at(recipe: str) -> dict[str, tuple[str, ...]]:
    """Recipes for both networks, from a recipe for AT.

    >>> standard_and_at("digits-at")
    {'standard': ('digits-at', 'loss=Standard'), 'AT': ('digits-at',)}
    """
    return {row: (recipe, *own) for row, own in NETS.items()}


def mean_table(results: StudyResults, columns: Mapping[str, Column], rows: Iterable[str] | None = None) -> Table:
    """Means over seeds of the numbers that the columns name, for some rows or all rows."""
    rows = results.rows if rows is None else rows
    return Table(list(columns.values()), {row: [results.mean(row, name) for name in columns] for row in rows})


def accuracy_table(results: StudyResults, *names: str, rows: Iterable[str] | None = None) -> Table:
    """Means over seeds of accuracies."""
    return mean_table(results, {name: Column(name, "high") for name in names}, rows)


def accuracies(
    run: Run,
    *,
    which: Which = "best",
    weights: str = "raw",
    split: SplitName = "test",
    points: int | None = None,
    attacks: Sequence[str] = ("PGD-20",),
    autoattack: str | None = None,
    as_rat: bool = False,
) -> Numbers:
    """Accuracy in % on clean inputs, under each attack and under a version of AutoAttack."""
    common: dict[str, Any] = {"split": split, "points": points}
    place: dict[str, Any] = {"checkpoint": which, "weights": weights}
    own: dict[str, Any] = {"attacks": ",".join(attacks)}
    if as_rat and run.threat.norm == "linf":
        own = {"attacks": ",".join(f"RAT-{attack}" for attack in attacks), "eps": RAT_EPS}
    result: AttackResult = run.measure(AttackSettings(**own, **common), **place)
    numbers: Numbers = {name.removeprefix("RAT-"): 100 * accuracy.value for name, accuracy in result.accuracy.items()}
    if autoattack is not None:
        result = run.measure(AttackSettings(attacks=autoattack, **common), **place)
        numbers["AutoAttack"] = 100 * (result.estimate or result.robust).value
        numbers["alarms"] = [warning.kind for warning in result.warnings]
    return numbers


def certified(
    run: Run,
    radii: Sequence[float],
    *,
    points: int | None = None,
    attacks: str = "fast",
    check: int = 500,
    which: Which = "best",
) -> Numbers:
    """Accuracy in %: clean, verified (VRA) and under attack (ERA) at l2 radii, with names such as ``VRA 0.3``.

    ``curve`` contains the verified accuracy at all radii.  Raises ``UnsoundError`` if an attack on a certified point
    succeeds.
    """
    eps = ",".join(map(repr, radii))
    result = run.certify(eps=eps, points=points, attacks=attacks, check=check, checkpoint=which)
    numbers: Numbers = {
        "clean": 100 * result.clean.value,
        "lipschitz": result.lipschitz,
        "attacked": result.check.attacked if result.check else 0,
        "curve": {name: list(values) for name, values in result.curve.items()},
    }
    numbers |= {f"VRA {row.eps:.4g}": 100 * row.accuracy.value for row in result.verified}
    return numbers | {f"ERA {row.eps:.4g}": 100 * row.accuracy.value for row in result.empirical}


def certified_as_trained(run: Run, *, points: int | None, attacks: str, check: int = 500) -> Numbers:
    """Accuracy in % at the training radius: clean, verified (VRA) and under attack (ERA)."""
    eps = run.threat.radius
    numbers = certified(run, [eps], points=points, attacks=attacks, check=check)
    return {"clean": numbers["clean"], "VRA": numbers[f"VRA {eps:.4g}"], "ERA": numbers[f"ERA {eps:.4g}"]}


def describe_evaluation(points: int | None, autoattack: str | None = None, *, as_rat: bool = False) -> str:
    """Describe how accuracies were measured.

    >>> describe_evaluation(500)
    'Accuracy on the first 500 test images. `select_on` in the recipe determines the best epoch.'
    """
    version = "" if autoattack is None else f", AutoAttack version `{autoattack}`"
    version += f", PGD-20 and CW-20 at linf {RAT_EPS} with step 0.003 (`RAT-PGD-20`, `RAT-CW-20`)" if as_rat else ""
    images = f"Accuracy on {describe_points(points)} test images{version}."
    return f"{images} `select_on` in the recipe determines the best epoch."


def describe_points(points: int | None) -> str:
    """Describe the number of points.

    >>> describe_points(None), describe_points(1000)
    ('all', 'the first 1,000')
    """
    return "all" if points is None else f"the first {points:,}"


def series(run: Run, *names: str) -> dict[str, list[float]]:
    """Metrics over the epochs that have all of them; ``epoch`` is a valid name."""
    records = [record for record in run.metrics if record["kind"] == "epoch" and all(name in record for name in names)]
    return {name: [record[name] for record in records] for name in names}
