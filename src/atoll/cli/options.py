"""Words of the command line that several verbs share."""

from __future__ import annotations

from typing import cast

from atoll.errors import InputError
from atoll.run import Run, Which


def checkpoint(word: str) -> Which:
    """What ``--checkpoint`` names.

    >>> checkpoint("best"), checkpoint("120")
    ('best', 120)
    """
    if word.isdecimal():
        return int(word)
    for known in ("best", "last"):
        if word == known:
            return cast(Which, known)
    raise InputError(f"--checkpoint: expected best, last or a step, got {word!r}")


def trained_radius(run: Run, meant: str) -> float:
    """The l2 radius a run was trained for, where ``--eps`` names none; ``meant`` is what it might have named."""
    if run.threat.norm != "l2":
        raise InputError(f"--eps: {run.folder} was trained against {run.threat.norm}; say which l2 {meant} meant")
    return run.threat.radius
