"""Measurements that several studies share; each is what the command of the same name does."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from atoll.attacks import suite
from atoll.attacks.evaluate import evaluate
from atoll.attacks.suites import named
from atoll.certify.evaluate import attack_certified, attacks_on, certify, empirical
from atoll.certify.families import certifier_for
from atoll.data.base import Split, SubSplit
from atoll.distributed import default_device
from atoll.run import Run, Which
from atoll.studies.base import Numbers
from atoll.threat import ThreatModel

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
    split: str = "test",
    points: int | None = None,
    attacks: Sequence[str] = ("PGD-20",),
    autoattack: str | None = None,
) -> Numbers:
    """Clean accuracy, that under each of some attacks alone, and that under a version of AutoAttack, in %."""
    device = default_device()
    model, data = run.model(which, weights).to(device), first(run.data.split(split), points)
    found = evaluate(model, data, named(attacks, run.threat), seed="evaluation", device=device, check=False)
    numbers: Numbers = {"clean": 100 * found.clean.value}
    numbers |= {attack.name: 100 * attack.accuracy.value for attack in found.attacks}
    if autoattack is not None:
        attacks_in_turn = suite(autoattack, run.threat)
        evaluation = evaluate(model, data, attacks_in_turn, cascade=True, seed="evaluation", device=device)
        numbers["AutoAttack"] = 100 * evaluation.robust.value
        numbers["alarms"] = [finding.kind for finding in evaluation.findings]
    return numbers


def certified(
    run: Run,
    radii: Sequence[float],
    *,
    points: int | None = None,
    attacks: str = "fast",
    check: int | None = None,
    which: Which = "best",
) -> Numbers:
    """Clean, verified and (under attacks, named as for commands) empirical robust accuracy in % at radii in l2.

    The network is certified in float64, and some certified points are attacked at their radius: ``UnsoundError`` if one
    falls.  Names of numbers end with the radius, as ``VRA 0.3``; ``curve`` has all radii.
    """
    device = default_device()
    model, split = run.model(which).to(device), first(run.data.test, points)
    certifier = certifier_for(copy.deepcopy(model).double(), radii=radii)
    found = certify(certifier, split, device=device)
    tried = attack_certified(model, certifier, split, found, bounds=run.data.bounds, points=check, device=device)
    radius, accuracy = found.curve()
    numbers: Numbers = {
        "clean": 100 * found.clean.value,
        "lipschitz": certifier.lipschitz,
        "attacked": tried.attacked,
        "curve": {"radius": radius.tolist(), "verified": accuracy.tolist()},
    }
    for eps in radii:
        threat = ThreatModel("l2", eps, run.data.bounds)
        robust = empirical(
            model, split, found, attacks_on(model, attacks, threat), eps, seed="evaluation", device=device
        )
        numbers |= {f"VRA {eps:.4g}": 100 * found.verified(eps).value, f"ERA {eps:.4g}": 100 * robust.value}
    return numbers


def certified_as_trained(run: Run, *, points: int | None, attacks: str, check: int | None) -> Numbers:
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
