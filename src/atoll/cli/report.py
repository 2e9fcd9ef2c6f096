"""Write a report about trained models: one HTML page from the results in their run folders.

atoll report runs/digits-at
atoll report runs/digits-standard runs/digits-at -o report.html --title "Standard and robust"

The page is one file that needs no network.  The command measures nothing: the page lists missing results with the
commands that measure them.  Runs share a row only if they were measured with the same settings on the same points.
"""

from __future__ import annotations

import argparse

from atoll.cli.answers import print_json
from atoll.cli.output import print_lines
from atoll.cli.values import path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="run folders; several runs are compared")
    parser.add_argument("-o", "--out", type=path, metavar="FILE", help="default: report.html in the first run's folder")
    parser.add_argument("--title", help="title of the page (default: the names of the runs)")


def run(options: argparse.Namespace) -> None:
    from atoll.report import write_report

    page = write_report(options.runs, options.out or options.runs[0] / "report.html", title=options.title)
    size = page.stat().st_size
    if options.json:
        runs = [str(folder) for folder in options.runs]
        print_json("report", {"report": str(page), "bytes": size, "runs": runs})
    else:
        print_lines(f"The report is in {page} ({size / 1e6:.1f} MB). Open it in a browser.")
