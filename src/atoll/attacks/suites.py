"""Attack suites: the versions of AutoAttack, and lists of attacks given by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.attacks.apgd import APGD
from atoll.attacks.base import ATTACKS, Attack
from atoll.attacks.fab import FAB
from atoll.attacks.fmn import FMN
from atoll.attacks.pdpgd import PDPGD
from atoll.attacks.sampling import Sampling
from atoll.attacks.sigma_zero import SigmaZero
from atoll.attacks.square import Square
from atoll.errors import InputError
from atoll.registry import closest, suggest
from atoll.threat import ThreatModel


def get_attack(name: str, threat: ThreatModel) -> Attack:
    """Build an attack by name: ``PGD-20``, ``APGD-T``, a dotted path, or ``my_attack.py:Mine``.

    >>> get_attack("CW-20", ThreatModel("linf", "8/255")).objective
    'margin'
    """
    try:
        member = ATTACKS.resolve(name)
    except InputError as error:
        if close := closest(name, SUITES):
            raise InputError(f"attacks: expected an attack, got {name!r}; did you mean {close[0]}?") from None
        raise InputError(f"attacks: {error}") from None
    attack: Attack = member.cls(threat, **member.arguments)
    return attack


def standard(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack (Croce & Hein, 2020; for l1: 2021)."""
    restarts, targets = (5, 5) if threat.norm == "l1" else (1, 9)
    return {
        "APGD-CE": APGD(threat, restarts=restarts),
        "APGD-T": APGD(threat, targets=targets),
        "FAB-T": FAB(threat, targets=9),
        "Square": Square(threat),
    }


def plus(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack with restarts and untargeted attacks."""
    if threat.norm == "l1":
        raise InputError("norm: expected linf or l2 for plus, got l1")
    return {
        "APGD-CE": APGD(threat, restarts=5),
        "APGD-DLR": APGD(threat, "dlr", restarts=5),
        "FAB": FAB(threat, restarts=5),
        "Square": Square(threat),
        "APGD-T": APGD(threat, targets=9),
        "FAB-T": FAB(threat, targets=9),
    }


def rand(threat: ThreatModel) -> dict[str, Attack]:
    """AutoAttack for randomized models: expectation over 20 passes."""
    return {"APGD-CE": APGD(threat, eot=20), "APGD-DLR": APGD(threat, "dlr", eot=20)}


def fast(threat: ThreatModel) -> dict[str, Attack]:
    """Quick attacks on all points, and ``standard`` on a sample of the points that remain: an estimate.

    Short runs with several objectives break more than a long run with one of them, and most points that only a targeted
    attack breaks come near the boundary within a few steps.  The quick attacks take less than 0.03 of the passes of
    ``standard`` on a robust model.
    """
    if threat.norm == "l1":  # early steps for l1 are outside the ball and tell little, so runs cannot be short
        return {"quick APGD-CE": APGD(threat, steps=40), "quick APGD-T": APGD(threat, targets=2, steps=40)}
    return {
        "quick APGD-CE": APGD(threat, "ce", steps=15),
        "quick APGD-margin": APGD(threat, "margin", steps=15),
        "quick APGD-PM": APGD(threat, "pm", steps=15),
        "quick APGD-T": APGD(threat, targets=9, steps=30, patience=0.25),
    }


SUITES: dict[str, Callable[[ThreatModel], dict[str, Attack]]] = {
    make.__name__: make for make in (standard, plus, rand, fast)
}


def minimal(threat: ThreatModel) -> dict[str, Attack]:
    """Attacks that find the smallest perturbation in the norm of a threat model, whatever its eps.

    >>> list(minimal(ThreatModel("l2", 0.5))), list(minimal(ThreatModel("l0", 10)))
    (['FMN', 'FAB-T'], ['SigmaZero'])
    """
    if threat.norm == "l0":
        return {"SigmaZero": SigmaZero(threat, minimum_norm=True)}
    sparse = {"PDPGD": PDPGD(threat, minimum_norm=True)} if threat.norm == "l1" else {}
    return {"FMN": FMN(threat, minimum_norm=True), **sparse, "FAB-T": FAB(threat, targets=9, minimum_norm=True)}


def suite(version: str, threat: ThreatModel) -> dict[str, Attack]:
    """Return the attacks of a version of AutoAttack, in order; each runs on the points that are still robust.

    >>> list(suite("standard", ThreatModel("linf", "8/255")))
    ['APGD-CE', 'APGD-T', 'FAB-T', 'Square']
    """
    if version not in SUITES:
        raise InputError(f"version: got {version!r}{suggest(version, SUITES)}")
    if threat.norm == "l0":
        raise InputError(f"norm: expected linf, l2 or l1 for {version}, got l0; use SigmaZero")
    return SUITES[version](threat)


def parse_attacks(text: str, threat: ThreatModel) -> dict[str, Attack]:
    """Parse a version of AutoAttack, a comma-separated list of attacks, or ``none`` for clean accuracy only.

    >>> [list(parse_attacks(text, ThreatModel("linf", "8/255"))) for text in ("rand", "FGSM,PGD-20")]
    [['APGD-CE', 'APGD-DLR'], ['FGSM', 'PGD-20']]
    """
    if text == "none":
        return {}
    if text in SUITES:
        return suite(text, threat)
    return {name: get_attack(name, threat) for name in map(str.strip, text.split(","))}


def sampling_for(text: str, threat: ThreatModel, *, randomized: bool = False, **options: Any) -> Sampling | None:
    """How ``fast`` checks the points that its quick attacks leave; None for all other attacks.

    Args:
        text: as for ``parse_attacks``.
        threat: what the attacker may do.
        randomized: whether two passes of the model differ; then ``rand`` takes the place of ``standard``.
        options: of ``Sampling``.
    """
    if text != "fast":
        return None
    return Sampling(suite("rand" if randomized else "standard", threat), **options)
