"""One page, in one file, about one run or several: what was measured of them, and what was not."""

from atoll.report.page import render, write_report
from atoll.report.run_summary import RunSummary, read_runs

__all__ = ["RunSummary", "read_runs", "render", "write_report"]
