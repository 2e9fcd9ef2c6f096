"""Cells and measurements that several studies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.measure import SplitName
from atoll.runs.run import Run, Which
from atoll.studies.base import Cell, Numbers

# A part of MNIST that is small enough for robust overfitting.  The recipes have the same values, but another data set
# in place of MNIST would lose them.  No test at the end of training: the studies measure what they need.
SMALL_MNIST = ("data.limit=1000", "data.validation=0.01", "trainer.test_steps=0")
# For the smallest scale.
TINY_DIGITS = (
    *("data.limit=100", "model={class_path: MLP, init_args: {hidden: [8]}}", "attack.steps=2"),
    *("trainer.epochs=1", "trainer.validation_steps=1", "trainer.test_steps=0"),
)
# A standard network and one trained by AT that differ in nothing else.
NETS: Mapping[str, tuple[str, ...]] = {"standard": ("loss=Standard",), "AT": ()}


def standard_and_at(recipe: str, seeds: int, overrides: tuple[str, ...]) -> list[Cell]:
    """The cells of both networks, from a recipe of AT.

    >>> [cell.name for cell in standard_and_at("digits-at", 2, ())]
    ['standard-0', 'standard-1', 'at-0', 'at-1']
    """
    return [Cell(row, seed, recipe, (*overrides, *own)) for row, own in NETS.items() for seed in range(seeds)]


def accuracies(
    run: Run,
    *,
    which: Which = "best",
    weights: str = "raw",
    split: SplitName = "test",
    points: int | None = None,
    attacks: Sequence[str] = ("PGD-20",),
    autoattack: str | None = None,
) -> Numbers:
    """Accuracy in % on clean inputs, under each attack, and under a version of AutoAttack."""
    common: dict[str, Any] = {"split": split, "points": points}
    place: dict[str, Any] = {"checkpoint": which, "weights": weights}
    result: AttackResult = run.measure(AttackSettings(attacks=",".join(attacks), **common), **place)
    numbers: Numbers = {name: 100 * accuracy.value for name, accuracy in result.accuracy.items()}
    if autoattack is not None:
        result = run.measure(AttackSettings(attacks=autoattack, **common), **place)
        numbers["AutoAttack"] = 100 * result.robust.value
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
    """Accuracy in %: clean, verified (VRA) and under attack (ERA) at l2 radii, named ``VRA 0.3``.

    ``curve`` has the verified accuracy at all radii.  Raises ``UnsoundError`` if an attack breaks a certified point.
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
    """Accuracy in % at the radius of training: clean, verified (VRA) and under attack (ERA)."""
    eps = run.threat.radius
    numbers = certified(run, [eps], points=points, attacks=attacks, check=check)
    return {"clean": numbers["clean"], "VRA": numbers[f"VRA {eps:.4g}"], "ERA": numbers[f"ERA {eps:.4g}"]}


def describe_evaluation(points: int | None, autoattack: str | None = None) -> str:
    """How accuracies were measured, as text.

    >>> describe_evaluation(500, "fast")
    'Accuracy on the first 500 test images, AutoAttack version `fast`. The best epoch is that on validation points.'
    """
    version = "" if autoattack is None else f", AutoAttack version `{autoattack}`"
    return f"Accuracy on {describe_points(points)} test images{version}. The best epoch is that on validation points."


def describe_points(points: int | None) -> str:
    """How many points, as text.

    >>> describe_points(None), describe_points(1000)
    ('all', 'the first 1,000')
    """
    return "all" if points is None else f"the first {points:,}"


def series(run: Run, *names: str) -> dict[str, list[float]]:
    """Some metrics over the epochs that have all of them; ``epoch`` is one of the names."""
    records = [record for record in run.metrics if record["kind"] == "epoch" and all(name in record for name in names)]
    return {name: [record[name] for record in records] for name in names}
