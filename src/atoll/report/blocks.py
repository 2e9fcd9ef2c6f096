"""What a page is made of; ``page.html`` has one macro for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Cell:
    """A value, a smaller line below it, and whether it stands out (``absent``, ``alarm``, ``different``)."""

    text: str
    note: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells or plain texts; the first column names the row, ``runs`` says which columns belong to which run."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    runs: Sequence[int | None] = ()
    marks: Sequence[str] = ()  # a class for each row


@dataclass(frozen=True)
class Plot:
    """A Plotly figure (data and layout as plain data) with an id of its own."""

    kind: ClassVar[str] = "plot"
    id: str
    title: str
    figure: Mapping[str, Any]
    note: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, and what it shows."""

    kind: ClassVar[str] = "picture"
    source: str
    title: str
    note: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Title:
    """A heading inside a section; with a run's colour if it is about one."""

    kind: ClassVar[str] = "title"
    text: str
    note: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Words:
    """Sentences, one paragraph each."""

    kind: ClassVar[str] = "words"
    lines: Sequence[str]


@dataclass(frozen=True)
class Alarm:
    """Something that a reader of the numbers of a tab (``about``) must know."""

    kind: ClassVar[str] = "alarm"
    about: str
    what: str
    message: str
    run: int | None = None


@dataclass(frozen=True)
class Missing:
    """What is not there, why, and the command that would make it."""

    kind: ClassVar[str] = "missing"
    what: str
    reason: str
    command: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Code:
    """Lines for a shell."""

    kind: ClassVar[str] = "code"
    lines: Sequence[str]


@dataclass(frozen=True)
class Fold:
    """Blocks that open on a click."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Side:
    """Blocks side by side, where there is room."""

    kind: ClassVar[str] = "side"
    blocks: Sequence[Block]


Block = Table | Plot | Picture | Title | Words | Alarm | Missing | Code | Fold | Side


@dataclass(frozen=True)
class Section:
    """One tab."""

    id: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)


def plots(blocks: Sequence[Block]) -> list[Plot]:
    """All plots among blocks, in order.

    >>> [plot.id for plot in plots([Words(["text"]), Side([Plot("a", "", {}), Fold("more", [Plot("b", "", {})])])])]
    ['a', 'b']
    """
    found = []
    for block in blocks:
        if isinstance(block, Plot):
            found.append(block)
        elif isinstance(block, Fold | Side):
            found += plots(block.blocks)
    return found
