"""Short tables for ``print`` and for notebooks: the one place where results become text or HTML."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal


@dataclass(frozen=True)
class TextTable:
    """A table of texts.

    Args:
        title: line above the table.
        columns: titles of the columns.
        rows: cells.
        notes: lines below the table.
        marks: cells that are bold or italic in HTML, by row and column.

    >>> print(TextTable("Accuracy", ["attack", "%"], [["clean", "98.50"], ["PGD-20", "7.25"]], ["100 points"]))
    Accuracy
    attack      %
    clean   98.50
    PGD-20   7.25
    100 points
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    marks: Mapping[tuple[int, int], Literal["b", "i"]] = field(default_factory=dict)

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers: all but the first whose cells start with a digit or are a dash."""
        return [
            i > 0 and bool(self.rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in self.rows)
            for i in range(len(self.columns))
        ]

    def __str__(self) -> str:
        table = [list(self.columns), *map(list, self.rows)] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self.numeric, strict=True)
            ).rstrip()
            for row in table
        ]
        return "\n".join([*([self.title] if self.title else []), *lines, *self.notes])

    def _repr_html_(self) -> str:
        """HTML without scripts or style sheets; all texts are escaped."""
        sides = ["right" if right else "left" for right in self.numeric]
        title = [f"<div><b>{escape(self.title)}</b></div>"] if self.title else []
        parts = []
        if self.rows:
            titles = [escape(title) for title in self.columns]
            parts.append(f"<thead>{_html_row('th', titles, sides)}</thead>")
            rows = [[self._cell(r, c) for c in range(len(self.columns))] for r in range(len(self.rows))]
            parts.append(f"<tbody>{''.join(_html_row('td', row, sides) for row in rows)}</tbody>")
        notes = [f"<div>{escape(note)}</div>" for note in self.notes]
        return "".join([*title, "<table>", *parts, "</table>", *notes])

    def _cell(self, row: int, column: int) -> str:
        text, tag = escape(self.rows[row][column]), self.marks.get((row, column))
        return f"<{tag}>{text}</{tag}>" if tag else text


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    both = zip(cells, sides, strict=True)
    return "<tr>" + "".join(f'<{tag} style="text-align: {side}">{cell}</{tag}>' for cell, side in both) + "</tr>"


def cell(value: object) -> str:
    """A value as text: numbers to four digits, a dash if there is none.

    >>> [cell(value) for value in (None, float("nan"), 0.123456, 12345, True, "PGD-20")]
    ['-', '-', '0.1235', '12,345', 'yes', 'PGD-20']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "-" if value is None or text.startswith("nan") else text


class Displayed:
    """Base of objects that are shown as a short table: by ``print``, and as HTML in notebooks."""

    @abstractmethod
    def table(self) -> TextTable:
        """What is shown."""

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
