"""The tabs of the page.

Every module here is a section; a new one is one new file with:

- ``ORDER``: sections are sorted by it;
- ``KINDS``: kinds of results that the section shows, so that no other section has to;
- ``section(runs)``: the section, or None if there is nothing to show;
- ``summary_rows(runs, checkpoint)`` (optional): its rows in the table at the top, for one kind of checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from atoll.report.blocks import Row, Section
from atoll.report.run_summary import RunSummary

_NAMES = [module.name for module in pkgutil.iter_modules(__path__)]
MODULES: list[Any] = sorted((importlib.import_module(f"{__name__}.{name}") for name in _NAMES), key=lambda m: m.ORDER)


def all_summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    """The rows of all sections in the table at the top of the page."""
    modules = [module for module in MODULES if hasattr(module, "summary_rows")]
    return [row for module in modules for row in module.summary_rows(runs, checkpoint)]


def all_sections(runs: Sequence[RunSummary]) -> list[Section]:
    """Every section that has something to show."""
    sections = (module.section(runs) for module in MODULES)
    return [section for section in sections if section is not None]
