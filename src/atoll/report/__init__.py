"""A self-contained HTML page about one or several runs: their results, and what is missing."""

from atoll.report.page import render, write_report
from atoll.report.run_summary import RunSummary, read_runs

__all__ = ["RunSummary", "read_runs", "render", "write_report"]
