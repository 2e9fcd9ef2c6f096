"""Attacks by the names the field's tables use, and the sets of them that make an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.attacks.apgd import APGD
from atoll.attacks.base import Attack
from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.fab import FAB
from atoll.attacks.objectives import Objective
from atoll.attacks.pgd import FGSM, PGD
from atoll.attacks.rays import RayS
from atoll.attacks.square import Square
from atoll.errors import InputError
from atoll.threat import ThreatModel

ATTACKS: dict[str, Callable[[ThreatModel], Attack]] = {
    "FGSM": FGSM,
    "APGD-CE": APGD,
    "APGD-DLR": lambda threat: APGD(threat, "dlr"),
    "APGD-T": lambda threat: APGD(threat, targets=9),
    "FAB": lambda threat: FAB(threat, targets=0),
    "FAB-T": FAB,
    "Square": lambda threat: Square(threat, horizon=10_000),
    "Carlini-Wagner": CarliniWagner,
    "RayS": RayS,
}


def _papers_pgd(threat: ThreatModel, objective: Objective, steps: int) -> PGD:
    """PGD with the papers' step: 2/255 for linf 8/255, 15/255 for l2 128/255, and in proportion for other radii."""
    share = {"linf": 1 / 4, "l2": 15 / 128, "l1": None}[threat.norm]
    return PGD(threat, objective, steps=steps, step_size=None if share is None else share * threat.radius)


def attack(name: str, threat: ThreatModel) -> Attack:
    """An attack by its name in the tables; ``PGD-20`` and ``CW-20`` take any number of steps.

    >>> attack("CW-20", ThreatModel("linf", "8/255")).objective
    'margin'
    """
    known = {key.lower(): build for key, build in ATTACKS.items()}
    kind, _, steps = name.lower().partition("-")
    if kind in ("pgd", "cw") and (steps or "20").isdecimal() and int(steps or 20) > 0:
        return _papers_pgd(threat, "ce" if kind == "pgd" else "margin", int(steps or 20))
    if name.lower() not in known:
        raise InputError(f"attack: expected one of {', '.join(ATTACKS)}, PGD-20, CW-20, got {name!r}")
    return known[name.lower()](threat)


def standard(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack (Croce & Hein, 2020; for l1: 2021)."""
    if threat.norm == "l1":
        first: dict[str, Attack] = {"APGD-CE": APGD(threat, restarts=5), "APGD-T": APGD(threat, targets=5)}
    else:
        first = {"APGD-CE": APGD(threat), "APGD-T": APGD(threat, targets=9)}
    return first | {"FAB-T": FAB(threat), "Square": Square(threat, horizon=10_000)}


def plus(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack with restarts and the untargeted attacks too."""
    if threat.norm == "l1":
        raise InputError("version: plus is for linf and l2, got l1")
    return {
        "APGD-CE": APGD(threat, restarts=5),
        "APGD-DLR": APGD(threat, "dlr", restarts=5),
        "FAB": FAB(threat, targets=0, restarts=5),
        "Square": Square(threat, horizon=10_000),
        "APGD-T": APGD(threat, targets=9),
        "FAB-T": FAB(threat),
    }


def rand(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack for randomised models: expectation over 20 passes."""
    return {"APGD-CE": APGD(threat, eot=20), "APGD-DLR": APGD(threat, "dlr", eot=20)}


def fast(threat: ThreatModel) -> dict[str, Attack]:
    """At most a tenth of the passes of ``standard`` on robust models, and its result or an alarm (README, Measured).

    Nearly all that ``standard`` breaks falls to targeted APGD, most of it to some target within few steps, the rest to
    targets that come near the boundary soon; so every target gets eleven steps, and only those that come near go on.
    A short Square remains as the alarm for masked gradients: where it breaks what APGD could not, the number is not to
    be trusted, and `standard` is due.
    """
    if threat.norm == "l1":  # whose early steps are outside of the ball, and tell little
        first = APGD(threat, targets=9, steps=30)
    else:
        first = APGD(threat, targets=9, steps=50, patience=0.5)
    return {"APGD-T": first, "Square": Square(threat, queries=500)}


VERSIONS: dict[str, Callable[[ThreatModel], dict[str, Attack]]] = {
    "standard": standard,
    "plus": plus,
    "rand": rand,
    "fast": fast,
}


def suite(version: str, threat: ThreatModel) -> dict[str, Attack]:
    """The attacks of a version of AutoAttack, in order, each meant for the points the ones before it left standing.

    >>> list(suite("standard", ThreatModel("linf", "8/255")))
    ['APGD-CE', 'APGD-T', 'FAB-T', 'Square']
    """
    if version not in VERSIONS:
        raise InputError(f"version: expected one of {', '.join(VERSIONS)}, got {version!r}")
    return VERSIONS[version](threat)


def named(names: Sequence[str], threat: ThreatModel) -> dict[str, Attack]:
    """Some attacks by their names."""
    return {name: attack(name, threat) for name in names}


def chosen(words: str, threat: ThreatModel) -> dict[str, Attack]:
    """What commands understand: a version of AutoAttack, or names with commas between them.

    >>> [list(chosen(words, ThreatModel("linf", "8/255"))) for words in ("rand", "FGSM,PGD-20")]
    [['APGD-CE', 'APGD-DLR'], ['FGSM', 'PGD-20']]
    """
    return suite(words, threat) if words in VERSIONS else named(words.split(","), threat)
