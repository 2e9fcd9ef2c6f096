"""Values out of files that anybody may have written: wrong types, NaN, huge numbers, strange characters.

A field that is missing or makes no sense is None; it never is an error, because an older version may have kept less.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from atoll.stats import Accuracy, Estimate

LONGEST = 2000  # characters of one text
MOST = 1000  # entries of one list
HUGE = 10**30
NOTHING = "–"


def get(tree: object, *path: str) -> Any:
    """What a path through mappings leads to, or None.

    >>> get({"threat": {"eps": "8/255"}}, "threat", "eps"), get({"threat": 3}, "threat", "eps")
    ('8/255', None)
    """
    for name in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)
    return tree


def entries(tree: object, *path: str) -> list[Any]:
    """The list a path leads to, empty if there is none, and cut if it is longer than any that Atoll keeps."""
    found = get(tree, *path)
    return found[:MOST] if isinstance(found, list) else []


def step(tree: object) -> int | None:
    """The step of the checkpoint that a result is about.

    >>> step({"checkpoint": "00000120"}), step({"checkpoint": "best"}), step({})
    (120, None, None)
    """
    name = get(tree, "checkpoint")
    return int(name) if isinstance(name, str) and name.isdecimal() and len(name) < 20 else None


def number(value: object) -> float | None:
    """A finite number, or None.

    >>> number(3), number(float("nan")), number(10**400), number("3"), number(True)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: object) -> int | None:
    """A whole number that is not negative, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def accuracy(tree: object) -> Accuracy | None:
    """An accuracy from its counts.

    >>> accuracy({"correct": 90, "total": 100, "value": 0.9}), accuracy({"correct": 3, "total": 2})
    (90.00 % ± 5.00, None)
    """
    correct, total = whole(get(tree, "correct")), whole(get(tree, "total"))
    if correct is None or not total or correct > total:
        return None
    return Accuracy(correct, total)


def measured(tree: object) -> str | None:
    """``1.23 ± 0.06`` from an estimate's JSON.

    >>> measured({"value": 1.234, "standard_error": 0.056}), measured({"value": 2}), measured({"value": None})
    ('1.234 ± 0.056', '2', None)
    """
    value = number(get(tree, "value"))
    return None if value is None else str(Estimate(value, number(get(tree, "standard_error")) or 0.0))


def digits(value: object) -> str:
    """A number to four digits, or a dash."""
    found = number(value)
    return NOTHING if found is None else f"{found:.4g}"


def count(value: object) -> str:
    """A count with separators, or a dash."""
    found = whole(value)
    return NOTHING if found is None else f"{found:,}"


def plain(value: object) -> str:
    """Any value as text of bounded length, with invisible and direction-changing characters made visible.

    >>> plain(None), plain(True), plain(0.1), plain([1]), plain("a\\u202eb")
    ('–', 'true', '0.1', '…', 'a\\\\u202eb')
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):  # with too many digits, Python itself refuses to write it
        return str(value) if abs(value) < HUGE else "a number beyond 1e30"
    if isinstance(value, float):
        return repr(value)
    if not isinstance(value, str):
        return "…"
    shown = value if len(value) <= LONGEST else value[:LONGEST] + "…"
    return "".join(_visible(character) for character in shown)


def _visible(character: str) -> str:
    # Cc: control, Cf: format (among them those that turn the direction of text), Cs: halves of pairs, not text at all.
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return f"\\u{ord(character):04x}"
