"""What the commands print for people: tables on standard output, progress on standard error."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, JustifyMethod
from rich.table import Table

from atoll.display import TextTable

if TYPE_CHECKING:
    from atoll.progress import ProgressBar

console = Console()
error_console = Console(stderr=True)


def print_lines(*lines: str, style: str | None = None) -> None:
    """Print lines without interpreting markup in them."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; numbers (all columns but the first) are aligned right when every cell starts with a digit.

    Numbers are never broken: a table that is too wide goes on below, with its first column again.
    """
    places = range(len(columns))
    numeric = TextTable(title, columns, rows).numeric
    longest = [max((len(row[i]) for row in rows), default=0) for i in places]
    # What a column needs: numbers are not broken, text may be, but not into letters.
    needs = [
        max(longest[i], len(columns[i])) if numeric[i] else min(16, max(longest[i], len(columns[i]))) for i in places
    ]
    if len(_groups(needs, console.width)) > 1:  # titles in several lines
        needs = [max([longest[i], *map(len, columns[i].split())]) if numeric[i] else needs[i] for i in places]
    for number, group in enumerate(_groups(needs, console.width)):
        table = Table(title=title if number == 0 else None, title_justify="left", title_style="bold")
        for i in group:
            name = "\n".join(textwrap.wrap(columns[i], needs[i])) if numeric[i] else columns[i]
            justify: JustifyMethod = "right" if numeric[i] else "left"
            table.add_column(name, justify=justify, no_wrap=numeric[i], overflow="fold", min_width=needs[i])
        for row in rows:
            # Names come from users; they are text, not rich's markup.
            table.add_row(*[row[i].replace("[", "\\[") for i in group])
        console.print(table)


def _groups(needs: Sequence[int], width: int) -> list[list[int]]:
    """Columns side by side, the first one in every group.

    >>> _groups([10, 20, 20, 20], 60), _groups([10, 90], 60)
    ([[0, 1, 2], [0, 3]], [[0, 1]])
    """
    groups, left = [[0]], 0
    for i, need in enumerate(needs[1:], 1):
        left -= need + 3  # with the frame
        if left < 0 and len(groups[-1]) > 1:
            groups.append([0])
        if len(groups[-1]) == 1:
            left = width - 1 - (needs[0] + 3) - (need + 3)
        groups[-1].append(i)
    return groups


def progress_bar(unit: str) -> ProgressBar:
    """A bar on standard error, gone when it is done."""
    from atoll.progress import ProgressBar  # imports PyTorch

    return ProgressBar(unit, error_console)
