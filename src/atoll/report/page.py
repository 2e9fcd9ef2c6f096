"""Summaries of runs to one HTML file that needs nothing else: script, style, data and pictures are inside.

Three things keep the files of a run from doing harm in a browser: the template escapes every text (autoescape), plots
get their data as JSON that is parsed, not run, and a Content-Security-Policy allows the two scripts by their digests
and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from atoll.errors import InputError
from atoll.files import check_output, write_atomic
from atoll.measure import Result
from atoll.report.blocks import Block, Collapsible, Paragraphs, Row, TableBlock, TableCell, plots
from atoll.report.compare import usual_checkpoint
from atoll.report.figures import color
from atoll.report.glossary import MEANINGS, find_terms
from atoll.report.opening import opening
from atoll.report.run_summary import RunSummary, read_runs
from atoll.report.sections import all_sections, all_summary_rows
from atoll.report.text import plain


def write_report(folders: Sequence[Path | str], out: Path | str, *, title: str | None = None) -> Path:
    """Write the page about some runs to a file; the same folders give the same bytes.

    Args:
        folders: folders of runs; several runs are compared.
        out: the file.
        title: title of the page (default: the names of the runs).
    """
    path = Path(out)
    check_output(path, "an HTML page")
    content = render(read_runs(folders), title).encode()
    try:
        write_atomic(path, content)
    except OSError as error:
        raise InputError(f"out: cannot write {path}: {error.strerror}; choose another file (-o FILE)") from None
    return path


def render(runs: Sequence[RunSummary], title: str | None = None) -> str:
    """The page as text."""
    if not runs:
        raise InputError("runs: expected at least one, got none")
    sections = all_sections(runs)
    scripts = [_plotly(), _text("page.js")]
    return _template().render(
        title=title or ", ".join(plain(run.name) for run in runs),
        runs=runs,
        summary=summarize(runs),
        sections=sections,
        figures={plot.id: plot.figure for section in sections for plot in plots(section.blocks)},
        colors=[color(run.number) for run in runs],
        style=_text("page.css"),
        scripts=scripts,
        digests=[digest(script) for script in scripts],
        meanings=MEANINGS,
        used={},
        new=set,
    )


def summarize(runs: Sequence[RunSummary]) -> list[Block]:
    """The top of the page: warnings, the main finding, the main numbers in one table, and what is missing."""
    checkpoint = usual_checkpoint(runs)
    main, others = _split_rows(all_summary_rows(runs, checkpoint))
    columns: Row = ["", *(_column(run, checkpoint) for run in runs)]
    numbers = [None, *(run.number for run in runs)]
    gaps = [gap for run in runs for gap in run.missing]
    # Warnings first: readers should know before they read a number that cannot be trusted.
    blocks: list[Block] = [warning for run in runs for warning in run.warnings]
    blocks += [*opening(runs, checkpoint), TableBlock(columns, main, numbers)]
    if any(checkpoint not in run.checkpoints(result) for run in runs for result in run.current(Result)):
        text = f"The table shows the {checkpoint} checkpoints. The tabs also show the others."
        blocks.append(Paragraphs([text]))
    blocks += [gap for gap in gaps if gap.is_problem]
    if others:
        blocks.append(
            Collapsible("More results, measured for some of the runs", [TableBlock(columns, others, numbers)])
        )
    if optional := [gap for gap in gaps if not gap.is_problem]:
        blocks.append(Collapsible(f"Not measured ({len(optional)})", optional))
    return blocks


def _column(run: RunSummary, checkpoint: str) -> TableCell:
    """What a column is about: one run at one checkpoint."""
    origins = [result.subject.origin for result in run.current(Result) if checkpoint in run.checkpoints(result)]
    epochs = {origin.epoch for origin in origins if origin.weights == "raw"}
    epoch = f" (epoch {plain(epochs.pop())})" if len(epochs) == 1 else ""
    return TableCell(run.name, f"{checkpoint} checkpoint{epoch}")


def _split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows that cover as many runs as any row about the same quantity, and the others."""

    def covered(row: Row) -> int:
        return sum(not (isinstance(cell, TableCell) and cell.mark == "absent") for cell in row[1:])

    def quantity(row: Row) -> str:
        return row[0] if isinstance(row[0], str) else row[0].text

    most: dict[str, int] = {}
    for row in rows:
        most[quantity(row)] = max(covered(row), most.get(quantity(row), 0))
    main = [row for row in rows if covered(row) == most[quantity(row)]]
    return main, [row for row in rows if row not in main]


def digest(script: str) -> str:
    """How a Content-Security-Policy names a script.

    >>> digest("alert(1)")
    'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _text(name: str) -> str:
    return files("atoll.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError(f"report: {error.name} is missing (pip install 'atoll[report]')") from None
    script: str = get_plotlyjs()
    return script


def _explain(text: object, used: dict[str, str], seen: set[str]) -> Markup:
    """A text whose technical terms explain themselves on hover (title) and on tap, click or Enter (popover).

    Args:
        text: any text.
        used: collects the terms of the whole page with their ids; the page has one popover for each.
        seen: collects the meanings in a block; only the first term with a meaning is marked.
    """
    pieces = []
    for piece, term in find_terms(plain(text)):
        if not term or MEANINGS[term] in seen:
            pieces.append(escape(piece))
            continue
        seen.add(MEANINGS[term])
        used[term] = f"term-{re.sub('[^a-z0-9]+', '-', term.lower())}"
        button = '<button type="button" class="term" popovertarget="{}" title="{}">{}</button>'
        pieces.append(Markup(button).format(used[term], MEANINGS[term], piece))
    return Markup("").join(pieces)


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Everything that is printed goes through ``plain``; Markup is what the template itself has made.
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )
    # Our own files, and pictures that were encoded again: base64 needs no escaping.
    environment.filters["inline"] = Markup
    environment.filters["explain"] = _explain
    # NaN is not JSON; figures must not contain it.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_text("page.html"))
