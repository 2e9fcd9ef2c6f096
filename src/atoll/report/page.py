"""Summaries of runs to one HTML file that needs nothing else: script, style, data and pictures are inside.

Three things keep the files of a run from doing harm in a browser: the template escapes every text (autoescape), plots
get their data as JSON that is parsed, not run, and a Content-Security-Policy allows the two scripts by their digests
and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from atoll.errors import InputError
from atoll.files import write_atomic
from atoll.report.blocks import Block, plots
from atoll.report.compare import run_table
from atoll.report.figures import color
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
    if path.is_dir():
        raise InputError(f"out: expected a file, got the folder {path}")
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
    )


def summarize(runs: Sequence[RunSummary]) -> list[Block]:
    """The top of the page: warnings, the main numbers of all runs in one table, and what is missing."""
    table = run_table(runs, all_summary_rows(runs))
    # Warnings first: readers should know before they read a number that cannot be trusted.
    return [*(each for run in runs for each in run.warnings), table, *(gap for run in runs for gap in run.missing)]


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
    # NaN is not JSON; figures must not contain it.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_text("page.html"))
