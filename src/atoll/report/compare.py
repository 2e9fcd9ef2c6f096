"""Like with like: results of several runs stand side by side only if they answer the same question.

The question is the kind of measurement, its settings, its points, and which checkpoint and weights were measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from atoll.measure import Result
from atoll.report.blocks import Block, Row, TableBlock, TableCell
from atoll.report.run_summary import RunSummary
from atoll.report.text import NOTHING, plain

R = TypeVar("R", bound=Result)
T = TypeVar("T")
ABSENT = TableCell("not measured", mark="absent")


@dataclass(frozen=True)
class Comparison(Generic[R]):
    """The answers of some runs to one question, which is the title."""

    title: str
    results: Sequence[tuple[RunSummary, R]]

    @property
    def first(self) -> R:
        return self.results[0][1]

    def load(self, about: str, name: Callable[[R], str], read: Callable[[Path], T]) -> list[tuple[RunSummary, T]]:
        """Files that belong to the results, as far as they can be read."""
        values = [
            (run, run.load(about, result.folder / name(result), read))
            for run, result in self.results
            if result.folder is not None
        ]
        return [(run, value) for run, value in values if value is not None]

    def table(self, cells: Callable[[R], Mapping[str, str | TableCell]], heading: str = "") -> list[Block]:
        """A row for every number, a column for every run; nothing if there are no numbers."""
        columns = [cells(result) for _, result in self.results]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows: list[Row] = [[name, *(column.get(name, NOTHING) for column in columns)] for name in names]
        runs = [run for run, _ in self.results]
        return (
            [TableBlock([heading, *(run.name for run in runs)], rows, [None, *(run.number for run in runs)])]
            if rows
            else []
        )

    def row(self, runs: Sequence[RunSummary], what: str, cell: Callable[[R], TableCell]) -> Row:
        """A row with a column for every run; a run without an answer is marked."""
        cells = {run.number: cell(result) for run, result in self.results}
        return [TableCell(what, self.title), *(cells.get(run.number, ABSENT) for run in runs)]


def compare(
    runs: Sequence[RunSummary],
    kind: type[R],
    describe: Callable[[R], str],
    *,
    named: Collection[str] = (),
    ignore: Callable[[R], Collection[str]] = lambda result: (),
    where: Callable[[R], bool] = lambda result: True,
) -> list[Comparison[R]]:
    """Group the current results of a kind by what they answer.

    Args:
        runs: the runs.
        kind: class of the results.
        describe: the start of a title.
        named: settings that the start names; the title adds the others that are not the default.
        ignore: names of settings that the numbers in question do not depend on.
        where: which results to take.
    """
    groups: dict[str, dict[str, dict[int, R]]] = {}  # question, checkpoint, run
    for run in runs:
        for result in filter(where, run.current(kind)):
            group = groups.setdefault(_question(run, result, ignore(result)), {})
            for checkpoint in run.checkpoints(result):
                group.setdefault(checkpoint, {})[run.number] = result  # the newest if it was measured twice
    firsts = [next(iter(next(iter(group.values())).values())) for group in groups.values()]
    titles = [(_title(describe(first), first, {*named, *ignore(first)}), _weights(first)) for first in firsts]
    comparisons = []
    for title, first, group in zip(titles, firsts, groups.values(), strict=True):
        points = "" if titles.count(title) == 1 else f" ({_points(first)})"
        for checkpoint, results in _merge(group).items():
            pairs = [(run, results[run.number]) for run in runs if run.number in results]
            comparisons.append(Comparison(f"{title[0]}{points}, {checkpoint} checkpoint{title[1]}", pairs))
    return comparisons


def _question(run: RunSummary, result: Result, ignore: Collection[str]) -> str:
    settings = {name: value for name, value in result.settings.to_json().items() if name not in ignore}
    inputs = result.inputs or run.recipe_value("data")  # versions before did not store a digest
    surrogate = getattr(result, "surrogate", None)
    other = getattr(surrogate, "digest", "")
    parts = [result.kind, settings, inputs, result.points, result.subject.origin.weights, other]
    return json.dumps(parts, sort_keys=True, default=str)


def _merge(group: dict[str, dict[int, R]]) -> dict[str, dict[int, R]]:
    """Drop the best or the last checkpoint if the other one covers it: it often is the same checkpoint."""
    best, last = group.get("best", {}), group.get("last", {})
    if not best or not last:
        return group
    others = {name: results for name, results in group.items() if name not in ("best", "last")}
    if best == last:
        return {"best and last": best, **others}
    if all(last.get(run) is result for run, result in best.items()):
        return {"last": last, **others}
    if all(best.get(run) is result for run, result in last.items()):
        return {"best": best, **others}
    return group


def _title(start: str, result: Result, named: Collection[str]) -> str:
    settings = result.settings
    points = "image files" if getattr(settings, "images", ()) else f"{settings.split} points"
    parts = [start]
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        is_named = item.name in ("split", "points", *named) or item.metadata.get("execution")
        if not is_named and value != item.default:
            parts.append(_setting(item.name, value))
    return ", ".join(filter(None, [*parts, f"{result.points:,} {points}"]))


def _points(result: Result) -> str:
    """What tells apart points of the same number and split."""
    return f"digest {result.inputs[:8]}" if result.inputs else "digest not recorded"


def _weights(result: Result) -> str:
    weights = result.subject.origin.weights
    return "" if weights == "raw" else f" ({plain(weights)} weights)"


def _setting(name: str, value: Any) -> str:
    """A setting that is not the default.

    >>> _setting("individual", True), _setting("attack", False), _setting("max_probes", 5)
    ('individual', 'no attack', 'max probes 5')
    """
    text = name.replace("_", " ")
    if isinstance(value, bool):
        return text if value else f"no {text}"
    return f"{text} {', '.join(map(plain, value)) if isinstance(value, tuple) else plain(value)}"


def notes(runs: Sequence[RunSummary], about: str) -> list[Block]:
    """Warnings about the numbers of a section, then what is missing in it."""
    warnings = [warning for run in runs for warning in run.warnings if warning.about == about]
    return [*warnings, *(gap for run in runs for gap in run.missing if gap.about == about)]
