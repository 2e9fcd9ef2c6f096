"""Values as text for the page.  Anybody may have written them: NaN, huge numbers, strange characters."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.report.blocks import TableCell
from atoll.stats import Accuracy, Estimate, SampledAccuracy

LONGEST = 2000  # characters of one text
HUGE = 10**30
NOTHING = "–"
SPACE = "\N{NO-BREAK SPACE}"
DEEPEST, MOST = 8, 400  # of a tree, and of its list of leaves


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
    text = value if len(value) <= LONGEST else value[:LONGEST] + "…"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    # Cc: control, Cf: format (among them those that turn the direction of text), Cs: halves of pairs, not text at all.
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return f"\\u{ord(character):04x}"


def number(value: object) -> float | None:
    """A finite number, or None.

    >>> number(3), number(float("nan")), number(10**400), number("3"), number(True)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def digits(value: object) -> str:
    """A number to four digits, or a dash."""
    finite = number(value)
    return NOTHING if finite is None else f"{finite:.4g}"


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def interval(ends: tuple[float, float], scale: float = 1.0, form: str = ".4g") -> str:
    """A 95 % interval; empty if it is not known.

    >>> interval((0.826, 0.945), 100, ".1f"), interval((float("nan"), 1.0))
    ('95 %: 82.6–94.5', '')
    """
    low, high = (number(scale * end) for end in ends)
    if low is None or high is None:
        return ""
    return f"95 %: {low:{form}}{' to ' if low < 0 else '–'}{high:{form}}"


def accuracy(value: Accuracy | SampledAccuracy, *notes: str, mark: str = "") -> TableCell:
    """An accuracy with its interval.

    >>> accuracy(Accuracy(90, 100), "PGD-20")
    TableCell(text='90.00 %', note='95 %: 82.6–94.5; PGD-20', mark='')
    """
    if not value.total:
        return TableCell("no points", "; ".join(filter(None, notes)), "absent")
    parts = (interval(value.interval, 100, ".1f"), *notes)
    return TableCell(f"{100 * value.value:.2f} %", "; ".join(filter(None, parts)), mark)


def estimate(value: Estimate | None, *notes: str, scale: float = 1.0, form: str = ".4g", unit: str = "") -> TableCell:
    """An estimate with its interval.

    >>> estimate(Estimate(2.0, 0.1)), estimate(None).text
    (TableCell(text='2', note='95 %: 1.804–2.196', mark=''), 'not measured')
    """
    if value is None or (finite := number(value.value)) is None:
        return TableCell("not measured", mark="absent")
    error = interval(value.interval, scale, form) if value.standard_error else ""
    return TableCell(f"{scale * finite:{form}}{unit}", "; ".join(filter(None, (error, *notes))))


def flatten(tree: object, path: str = "", depth: int = DEEPEST) -> list[tuple[str, str | TableCell]]:
    """The leaves of any value with their paths; class paths stand for what they name.

    >>> flatten({"loss": {"class_path": "atoll.AT", "init_args": {"a": [1, 2]}}, "methods": [{"class_path": "x.SWA"}]})
    [('loss', 'atoll.AT'), ('loss.a', '1, 2'), ('methods[0]', 'x.SWA')]
    >>> flatten({"clean": Accuracy(1, 2)})[0][1].text
    '50.00 %'
    """
    if isinstance(tree, Accuracy):
        return [(path, accuracy(tree))]
    if isinstance(tree, Estimate):
        return [(path, estimate(tree))]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if depth == 0 or not isinstance(tree, Mapping | list | tuple):
        return [(path, "…" if not depth else "null" if tree is None else plain(tree))]
    if not isinstance(tree, Mapping) and all(
        part is None or isinstance(part, bool | int | float | str) for part in tree
    ):
        return [(path, plain(", ".join(map(plain, tree[:MOST]))) or "[]")]
    leaves: list[tuple[str, str | TableCell]] = []
    for name, value in _children(tree, path):
        leaves += flatten(value, name, depth - 1)
        if len(leaves) > MOST:  # anchors make a short file long
            return [*leaves[:MOST], (f"{path}…", "more was left out")]
    return leaves


def _children(tree: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(f"{path}[{place}]", value) for place, value in enumerate(tree[:MOST])]
    children = []
    for key, value in list(tree.items())[:MOST]:
        inner = key in ("class_path", "init_args") and path
        children.append((path if inner else f"{path}.{plain(key)}".lstrip("."), value))
    return children
