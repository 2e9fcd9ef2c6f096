"""The settings of the attacks in ``AutoAttack``, under the names of the original package: ``adversary.apgd.n_iter``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atoll.attacks.apgd import RHO
from atoll.attacks.base import ATTACKS, Attack
from atoll.attacks.fab import ALPHA_MAX, BETA, ETA
from atoll.errors import InputError, check_count, check_range
from atoll.registry import suggest
from atoll.threat import ThreatModel, number


@dataclass(frozen=True)
class OriginalAttack:
    """An attack of the original: its name in Atoll, the attribute with its settings, and the settings that it uses."""

    name: str
    group: str
    uses: tuple[str, ...]


MEMBERS = {
    "apgd-ce": OriginalAttack("APGD-CE", "apgd", ("n_iter", "n_restarts", "eot_iter")),
    "apgd-dlr": OriginalAttack("APGD-DLR", "apgd", ("n_iter", "n_restarts", "eot_iter")),
    "apgd-t": OriginalAttack("APGD-T", "apgd_targeted", ("n_iter", "n_restarts", "eot_iter", "n_target_classes")),
    "fab": OriginalAttack("FAB", "fab", ("n_iter", "n_restarts")),
    "fab-t": OriginalAttack(
        "FAB-T", "fab", ("n_iter", "n_target_classes")
    ),  # the original also runs it without restarts
    "square": OriginalAttack("Square", "square", ("n_queries", "n_restarts", "p_init")),
}

# Names of the settings in the original, and of the arguments of our attacks.
ARGUMENTS = {
    "n_iter": "steps",
    "n_restarts": "restarts",
    "eot_iter": "eot",
    "n_target_classes": "targets",
    "n_queries": "queries",
    "p_init": "p_init",
}

# Defaults of the original, which hold for ``version="custom"``.
DEFAULTS: dict[str, dict[str, Any]] = {
    "apgd": {"n_iter": 100, "n_restarts": 5, "eot_iter": 1},
    "apgd_targeted": {"n_iter": 100, "n_restarts": 1, "eot_iter": 1, "n_target_classes": 9},
    "fab": {"n_iter": 100, "n_restarts": 5, "n_target_classes": 9},
    "square": {"n_queries": 5000, "n_restarts": 1, "p_init": 0.8, "rescale_schedule": False},
}

# Settings of the original that have one value here.
FIXED: dict[str, dict[str, Any]] = {
    "apgd": {"loss": "ce", "thr_decr": RHO, "topk": None, "use_rs": True},
    "apgd_targeted": {"loss": "dlr-targeted", "thr_decr": RHO, "topk": None, "use_rs": True},
    "fab": {"alpha_max": ALPHA_MAX, "eta": ETA, "beta": BETA, "targeted": False},
    "square": {"loss": "margin", "targeted": False, "return_all": False},
}

# Settings of the original that do not change a result, and what to set instead.
IDLE = {
    "seed": "set adversary.seed",
    "device": "set adversary.device",
    "verbose": "set adversary.verbose",
}


class SettingError(InputError, AttributeError):
    """An attribute that does not exist or cannot be set; also an AttributeError, so that ``hasattr`` works."""


class OriginalSettings:
    """The settings of one kind of attack, such as ``adversary.apgd``.

    Settings that Atoll does not support accept only the value that Atoll uses.  Settings without effect, such as
    ``adversary.apgd.seed``, can be set but raise a warning.

    >>> apgd = OriginalSettings("apgd", ThreatModel("linf", 0.3))
    >>> apgd.n_restarts = 1
    >>> apgd.n_restart = 1
    Traceback (most recent call last):
    atoll.attacks.autoattack_settings.SettingError: apgd.n_restart: no such setting; did you mean n_restarts?
    """

    def __init__(self, group: str, threat: ThreatModel) -> None:
        fixed = dict(FIXED[group])
        if group.startswith("apgd"):
            fixed["use_largereps"] = threat.norm == "l1"
        values = {**DEFAULTS[group], "eps": threat.eps, **dict.fromkeys(IDLE)}
        vars(self).update(_group=group, _fixed=fixed, _values=values, _locked=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask before the attributes exist
            raise AttributeError(name)
        known = {**self._values, **self._fixed}
        if name not in known:
            raise SettingError(f"{self._group}.{name}: no such setting{suggest(name, known)}")
        return known[name]

    def __setattr__(self, name: str, value: Any) -> None:
        label, present = f"{self._group}.{name}", getattr(self, name)
        if name in IDLE:
            if value not in (present, None, False):
                warnings.warn(f"{label} has no effect; {IDLE[name]} instead", stacklevel=2)
        elif name in self._fixed and value != present:
            raise SettingError(f"{label}: expected {present!r}, the only value that Atoll supports, got {value!r}")
        elif self._locked and value != present:
            raise SettingError(f"{label}: the settings of version='fast' are fixed; use version='custom'")
        elif name == "eps":
            number(value, label)
        elif name == "p_init":
            check_range("(0, 1]", **{label: value})
        elif name.startswith("n_") or name == "eot_iter":
            check_count(1, **{label: value})
        if name not in self._fixed:
            self._values[name] = value

    def __repr__(self) -> str:
        return f"{self._group}: " + ", ".join(f"{name}={self._values[name]!r}" for name in DEFAULTS[self._group])


def load_settings(attacks: Mapping[str, Attack], settings: Mapping[str, OriginalSettings]) -> None:
    """Set the settings to those of a suite of attacks."""
    for name, attack in attacks.items():
        member = MEMBERS[name.lower()]
        for setting in member.uses:
            setattr(settings[member.group], setting, getattr(attack, ARGUMENTS[setting]))


def build_attack(name: str, threat: ThreatModel, settings: Mapping[str, OriginalSettings]) -> Attack:
    """Build an attack of the original with its settings.

    >>> threat = ThreatModel("linf", 0.3)
    >>> build_attack("fab-t", threat, {"fab": OriginalSettings("fab", threat)})
    FAB(threat=ThreatModel(norm='linf', eps=0.3, bounds=(0.0, 1.0)), targets=9)
    """
    member = MEMBERS[name]
    own, known = settings[member.group], ATTACKS.resolve(member.name)
    arguments = {ARGUMENTS[setting]: getattr(own, setting) for setting in member.uses}
    if name == "square" and own.rescale_schedule:
        arguments["horizon"] = None
    attack: Attack = known.cls(replace(threat, eps=own.eps), **{**known.arguments, **arguments})
    return attack
