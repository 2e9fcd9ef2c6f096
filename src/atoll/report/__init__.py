"""One page, in one file, about one run or several: what other commands have kept in their folders, and nothing else."""

from atoll.report.page import render, write_report
from atoll.report.read import Reading, read_runs

__all__ = ["Reading", "read_runs", "render", "write_report"]
