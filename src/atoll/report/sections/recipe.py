"""The resolved recipes side by side, with what differs marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.report.blocks import Cell, Section, Table, Words
from atoll.report.read import Reading
from atoll.report.values import plain

DEEPEST, LONGEST = 8, 400  # of a recipe's tree, and of its list of leaves


def section(runs: Sequence[Reading]) -> Section:
    leaves = [dict(flatten(run.recipe)) for run in runs]
    names = list(dict.fromkeys(name for found in leaves for name in found))
    parts = [re.split(r"[.\[]", name)[0] for name in names]
    names.sort(key=lambda name: parts.index(re.split(r"[.\[]", name)[0]))  # what only one run has, in its part
    rows: list[list[str | Cell]] = []
    marks = []
    for name in names:
        values = [found.get(name, "–") for found in leaves]
        differs = len(set(values)) > 1
        marks.append("different" if differs else "same")
        rows.append([name, *(Cell(value, mark="different" if differs else "") for value in values)])
    table = Table(["", *(run.name for run in runs)], rows, [None, *(run.number for run in runs)], marks)
    if len(runs) == 1:
        return Section("recipe", "Recipe", [table])
    count = marks.count("different")
    words = f"{count} of {len(rows)} values differ; they are marked." if count else "The recipes are the same."
    return Section("recipe", "Recipe", [Words([words]), table])


def flatten(tree: object, path: str = "", depth: int = DEEPEST) -> list[tuple[str, str]]:
    """The leaves of a tree with their paths; class paths stand for what they name.

    >>> flatten({"loss": {"class_path": "atoll.AT", "init_args": {"a": [1, 2]}}, "methods": [{"class_path": "x.SWA"}]})
    [('loss', 'atoll.AT'), ('loss.a', '1, 2'), ('methods[0]', 'x.SWA')]
    """
    if depth == 0 or not isinstance(tree, Mapping | list):
        return [(path, "…" if not depth else "null" if tree is None else plain(tree))]
    if isinstance(tree, list) and not any(isinstance(value, Mapping | list) for value in tree):
        return [(path, plain(", ".join(map(plain, tree[:LONGEST]))) or "[]")]
    found: list[tuple[str, str]] = []
    for name, value in _children(tree, path):
        found += flatten(value, name, depth - 1)
        if len(found) > LONGEST:  # anchors make a short file long
            return [*found[:LONGEST], (f"{path}…", "more was left out")]
    return found


def _children(tree: Mapping[Any, Any] | list[Any], path: str) -> list[tuple[str, Any]]:
    if isinstance(tree, list):
        return [(f"{path}[{place}]", value) for place, value in enumerate(tree[:LONGEST])]
    found = []
    for key, value in list(tree.items())[:LONGEST]:
        inner = key in ("class_path", "init_args") and path
        found.append((path if inner else f"{path}.{plain(key)}".lstrip("."), value))
    return found
