"""Tables of numbers with standard errors and marks for the best, as Markdown, CSV and figures."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.display import Displayed, TextTable
from atoll.stats import Estimate

Value = Estimate | str | None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: title.
        better: whether high or low numbers are better; the best one is then marked.
        digits: number of digits after the decimal point.
    """

    name: str
    better: Literal["high", "low"] | None = None
    digits: int = 2


@dataclass(frozen=True)
class Table(Displayed):
    r"""Rows of estimates.

    The best number of a column is bold.  Numbers within standard errors of it, :math:`a_{top} - SE_{top} \le a + SE`
    (the papers' "silver"), are italic.

    >>> columns = [Column("robust, %", "high", 1), Column("seconds", digits=0)]
    >>> rows = {"AT": [Estimate(41.0, 0.8), Estimate(9.0)], "TRADES": [Estimate(42.1, 0.5), Estimate(11.0)]}
    >>> print(Table(columns, rows).markdown())
    |  | robust, % | seconds |
    | --- | --- | --- |
    | AT | *41.0 ± 0.8* | 9 |
    | TRADES | **42.1 ± 0.5** | 11 |
    """

    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Value]]

    def mark(self, row: str, column: int) -> Literal["best", "silver"] | None:
        """Return whether a number is the best of its column, or within standard errors of it."""
        better, value = self.columns[column].better, self.rows[row][column]
        if better is None or not _is_number(value):
            return None
        sign = 1 if better == "high" else -1
        rivals = [v for each in self.rows.values() if _is_number(v := each[column])]
        top = max(rivals, key=lambda v: sign * v.value)
        if value.value == top.value:
            return "best"
        return "silver" if sign * (top.value - value.value) <= _error(top) + _error(value) else None

    def texts(self) -> list[list[str]]:
        """Return all cells as text, titles first."""
        titles = ["", *(column.name for column in self.columns)]
        return [titles, *([name, *map(_text, values, self.columns)] for name, values in self.rows.items())]

    def table(self) -> TextTable:
        titles, *rows = self.texts()
        tags: dict[str | None, Literal["b", "i"]] = {"best": "b", "silver": "i"}
        marks = {
            (row, column + 1): tags[mark]
            for row, name in enumerate(self.rows)
            for column in range(len(self.columns))
            if (mark := self.mark(name, column))
        }
        return TextTable("", titles, rows, marks=marks)

    def markdown(self) -> str:
        lines = self.texts()
        stars = {"best": "**", "silver": "*", None: ""}
        for line, name in zip(lines[1:], self.rows, strict=True):
            for column in range(len(self.columns)):
                star = stars[self.mark(name, column)]
                line[column + 1] = f"{star}{line[column + 1]}{star}"
        lines.insert(1, ["---"] * len(lines[0]))
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def figure(self) -> Figure:
        """Plot every column of numbers as dots with standard errors; the best is filled, close ones are blue rings."""
        rows = list(self.rows)
        columns = [c for c in range(len(self.columns)) if any(_is_number(values[c]) for values in self.rows.values())]
        width = 1.5 + 0.08 * max(map(len, rows), default=0) + 1.5 * len(columns)
        figure = Figure(figsize=(width, 1 + 0.22 * len(rows)), layout="constrained")
        axes = figure.subplots(1, max(1, len(columns)), sharey=True, squeeze=False)[0]
        for axis, column in zip(axes, columns, strict=False):
            for height, row in enumerate(rows):
                value, mark = self.rows[row][column], self.mark(row, column)
                if _is_number(value):
                    color = "tab:blue" if mark or self.columns[column].better is None else "silver"
                    face = color if mark != "silver" else "white"
                    axis.errorbar(value.value, height, xerr=_error(value), fmt="o", ms=4, color=color, mfc=face)
            axis.set_title("\n".join(textwrap.wrap(self.columns[column].name, 18)), fontsize=8)
            axis.tick_params(labelsize=7)
            axis.xaxis.set_major_locator(MaxNLocator(3))
            axis.grid(axis="x", alpha=0.3)
        axes[0].set_yticks(range(len(rows)), rows)
        axes[0].set_ylim(max(1, len(rows)) - 0.5, -0.5)
        return figure

    def csv(self) -> str:
        """Return the table as CSV with all digits, and with standard errors and marks in separate columns."""
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["", *(f"{c.name}{end}" for c in self.columns for end in ("", ", standard error", ", mark"))])
        for name, values in self.rows.items():
            line = [name]
            for column, value in enumerate(values):
                if isinstance(value, Estimate):
                    error = "" if math.isnan(value.standard_error) else repr(value.standard_error)
                    line += [repr(value.value), error, self.mark(name, column) or ""]
                else:
                    line += [value or "", "", ""]
            out.writerow(line)
        return text.getvalue()


def _is_number(value: Value) -> TypeGuard[Estimate]:
    return isinstance(value, Estimate) and not math.isnan(value.value)


def _error(value: Estimate) -> float:
    return 0.0 if math.isnan(value.standard_error) else value.standard_error


def _text(value: Value, column: Column) -> str:
    if not isinstance(value, Estimate):
        return value or "-"
    if math.isnan(value.value):
        return "-"
    error = _error(value)
    return f"{value.value:.{column.digits}f}" + (f" ± {error:.{column.digits}f}" if error else "")
