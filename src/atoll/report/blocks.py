"""What a page is made of; ``page.html`` has one macro for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TableCell:
    """A value, a smaller line below it, and a mark: ``absent``, ``warning`` or ``different``."""

    text: str
    note: str = ""
    mark: str = ""


Row = Sequence[str | TableCell]


@dataclass(frozen=True)
class TableBlock:
    """Rows of cells or plain texts; the first column names the row, ``runs`` says which columns belong to which run."""

    columns: Row
    rows: Sequence[Row]
    runs: Sequence[int | None] = ()
    marks: Sequence[str] = ()  # a class for each row


@dataclass(frozen=True)
class Plot:
    """A Plotly figure (data and layout as plain data) with an id of its own."""

    id: str
    title: str
    figure: Mapping[str, Any]
    note: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Tile:
    """An image as a data URI, what it shows, the text below it, and a mark: ``right`` or ``wrong``."""

    source: str
    shows: str
    text: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Gallery:
    """Rows of images, with a heading and a run for each column.

    A ``wide`` gallery turns its rows into columns if there is room.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Tile]]
    runs: Sequence[int | None]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Lead:
    """The main finding in one sentence."""

    text: str


@dataclass(frozen=True)
class Title:
    """A heading inside a section, with a run's color if it is about one."""

    text: str
    note: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Paragraphs:
    """Sentences, one paragraph each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Callout:
    """A warning about the numbers of a section (``about`` is its id)."""

    about: str
    what: str
    message: str
    run: int | None = None


@dataclass(frozen=True)
class Missing:
    """Something that was not measured or cannot be read: why, and the command that makes it.

    ``is_problem`` tells what should be there from what could be measured as well.
    """

    about: str
    what: str
    reason: str
    command: str = ""
    run: int | None = None
    is_problem: bool = True


@dataclass(frozen=True)
class Code:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Collapsible:
    """Blocks that open on a click."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Columns:
    """Blocks side by side if there is room."""

    blocks: Sequence[Block]


Block = TableBlock | Plot | Gallery | Lead | Title | Paragraphs | Callout | Missing | Code | Collapsible | Columns


@dataclass(frozen=True)
class Section:
    """One tab."""

    id: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)


def plots(blocks: Sequence[Block]) -> list[Plot]:
    """All plots among blocks, in order.

    >>> nested = [Paragraphs(["text"]), Columns([Plot("a", "", {}), Collapsible("more", [Plot("b", "", {})])])]
    >>> [plot.id for plot in plots(nested)]
    ['a', 'b']
    """
    result = []
    for block in blocks:
        if isinstance(block, Plot):
            result.append(block)
        elif isinstance(block, Collapsible | Columns):
            result += plots(block.blocks)
    return result
