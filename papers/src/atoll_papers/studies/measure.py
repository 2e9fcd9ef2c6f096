"""Measurements that several studies share; each is what the command of the same name does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.data.base import Split, SubSplit
from atoll.measure import SplitName
from atoll.runs.run import Run, Which
from atoll.studies.base import Numbers

# The part of MNIST where robust overfitting shows.  Here and not only in the recipes, because data sets that users put
# in MNIST's place start without arguments; and what a study needs of a test, it measures itself.
SMALL_MNIST = ("data.limit=1000", "data.validation=0.01", "trainer.test_steps=0")
TINY_DIGITS = ("data.limit=200", "trainer.epochs=1", "trainer.test_steps=0")  # for the smallest scale


def first(split: Split, points: int | None) -> Split:
    """The first points of a split, or all of it."""
    return split if points is None else SubSplit(split, torch.arange(min(points, len(split))))


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
    """Clean accuracy, that under each of some attacks alone, and that under a version of AutoAttack, in %.

    The results are stored with the run, as those of ``atoll attack``.
    """
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
    """Clean, verified and (under attacks) empirical robust accuracy in % at radii in l2.

    Some certified points are attacked at their radius: ``UnsoundError`` if one falls.  Names of numbers end with the
    radius, as ``VRA 0.3``; ``curve`` has all radii.
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
    """Clean, verified (``VRA``) and empirical (``ERA``) robust accuracy in % at the radius of training."""
    eps = run.threat.radius
    found = certified(run, [eps], points=points, attacks=attacks, check=check)
    return {"clean": found["clean"], "VRA": found[f"VRA {eps:.4g}"], "ERA": found[f"ERA {eps:.4g}"]}


def evaluated(points: int | None, autoattack: str | None = None) -> str:
    """How accuracies came about, in words.

    >>> evaluated(500, "fast")
    'Accuracy on the first 500 test images, AutoAttack in its version `fast`. Best is chosen on validation points.'
    """
    where = "all" if points is None else f"the first {points:,}"
    version = "" if autoattack is None else f", AutoAttack in its version `{autoattack}`"
    return f"Accuracy on {where} test images{version}. Best is chosen on validation points."


def series(run: Run, *names: str) -> dict[str, list[float]]:
    """Some metrics, over the epochs that have all of them; ``epoch`` is one."""
    records = [record for record in run.metrics if record["kind"] == "epoch" and all(name in record for name in names)]
    return {name: [record[name] for record in records] for name in names}
