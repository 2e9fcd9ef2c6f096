"""Like with like: results of several runs stand side by side only if they answer the same question.

The question is the kind of measurement, its settings, its points, and which checkpoint and weights were measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
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
    """The answers of some runs to one question, all at the same kind of checkpoint."""

    question: str
    checkpoint: str
    results: Sequence[tuple[RunSummary, R]]

    @property
    def title(self) -> str:
        return f"{self.question}, {self.checkpoint} checkpoint"

    @property
    def first(self) -> R:
        return self.results[0][1]

    def load(
        self, about: str, name: str, read: Callable[[Path], T], *, whole: bool = True
    ) -> list[tuple[RunSummary, T]]:
        """A file that belongs to each of the results, as far as it can be read."""
        values = [(run, run.load_file(about, result, name, read, whole=whole)) for run, result in self.results]
        return [(run, value) for run, value in values if value is not None]

    def table(self, cells: Callable[[R], Mapping[str, str | TableCell]], heading: str = "") -> list[Block]:
        """A row for every number, a column for every run; nothing if there are no numbers."""
        return side_by_side([(run, cells(result)) for run, result in self.results], heading)

    def row(self, runs: Sequence[RunSummary], what: str, cell: Callable[[R], TableCell]) -> Row:
        """A row with a column for every run; a run without an answer is marked."""
        cells = {run.number: cell(result) for run, result in self.results}
        return [TableCell(what, self.question), *(cells.get(run.number, ABSENT) for run in runs)]


def side_by_side(columns: Sequence[tuple[RunSummary, Mapping[str, str | TableCell]]], heading: str = "") -> list[Block]:
    """A table with a column for every run and a row for every name that one of them has; nothing without names."""
    names = dict.fromkeys(name for _, cells in columns for name in cells)
    rows: list[Row] = [[name, *(cells.get(name, NOTHING) for _, cells in columns)] for name in names]
    return [run_table([run for run, _ in columns], rows, heading)] if rows else []


def run_table(
    runs: Sequence[RunSummary], rows: Sequence[Row], heading: str = "", marks: Sequence[str] = ()
) -> TableBlock:
    """A table with a column for every run after the names of the rows."""
    return TableBlock([heading, *(run.name for run in runs)], rows, [None, *(run.number for run in runs)], marks)


def compare(
    runs: Sequence[RunSummary],
    kind: type[R],
    describe: Callable[[R], str],
    *,
    named: Collection[str] = (),
    ignore: Callable[[R], Collection[str]] = lambda result: (),
    where: Callable[[R], bool] = lambda result: True,
    checkpoint: str | None = None,
) -> list[Comparison[R]]:
    """Group the current results of a kind by what they answer.

    ``describe`` starts a title with the settings in ``named``; the title adds the others that are not the default.
    ``ignore`` lists settings that the numbers in question do not depend on, ``where`` selects results, and
    ``checkpoint`` selects those of one kind of checkpoint.
    """
    groups: dict[str, dict[str, dict[int, R]]] = {}  # question, checkpoint, run
    for run in runs:
        for result in filter(where, run.current(kind)):
            group = groups.setdefault(_question(run, result, ignore(result)), {})
            for name in run.checkpoints(result):
                group.setdefault(name, {})[run.number] = result  # the newest if it was measured twice
    firsts = [next(iter(next(iter(group.values())).values())) for group in groups.values()]
    titles = [_title(describe(first), first, {*named, *ignore(first)}) for first in firsts]
    comparisons = []
    for title, first, group in zip(titles, firsts, groups.values(), strict=True):
        # What tells apart points of the same number and split.
        digest = f"digest {first.inputs[:8]}" if first.inputs else "digest not recorded"
        question = title if titles.count(title) == 1 else f"{title} ({digest})"
        for name, results in (_merge(group) if checkpoint is None else group).items():
            pairs = [(run, results[run.number]) for run in runs if run.number in results]
            if checkpoint in (None, name):
                comparisons.append(Comparison(question, name, pairs))
    return comparisons


def usual_checkpoint(runs: Sequence[RunSummary]) -> str:
    """The kind of checkpoint that most results are about; the best one if there are equally many."""
    names = Counter(name for run in runs for result in run.current(Result) for name in run.checkpoints(result))
    return max(["best", "last", *names], key=lambda name: names[name])


def _question(run: RunSummary, result: Result, ignore: Collection[str]) -> str:
    # All points and as many points as there are is the same question.
    settings = {name: value for name, value in result.settings.to_json().items() if name not in {*ignore, "points"}}
    inputs = result.inputs or run.recipe_value("data")  # versions before did not store a digest
    other = getattr(getattr(result, "surrogate", None), "digest", "")
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
    weights = result.subject.origin.weights
    parts += [f"{result.points:,} {points}", "" if weights == "raw" else f"{plain(weights)} weights"]
    return ", ".join(filter(None, parts))


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
