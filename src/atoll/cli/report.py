"""Write one page about trained models from the results in the folders of their runs.

atoll report runs/digits-at
atoll report runs/digits-standard runs/digits-at -o report.html --title "Standard and robust"

The page is one file that needs no network.  Nothing is measured: the page lists what is missing, with the command that
measures it.  Numbers of several runs share a row only if they were measured with the same settings on the same points.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.cli.answers import print_json
from atoll.cli.output import print_lines
from atoll.report import write_report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs; several are compared")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the first run's folder")
    parser.add_argument("--title", help="title of the page (default: the names of the runs)")


def run(options: argparse.Namespace) -> None:
    path = write_report(options.runs, options.out or options.runs[0] / "report.html", title=options.title)
    size = path.stat().st_size
    if options.json:
        runs = [str(folder) for folder in options.runs]
        print_json("report", {"report": str(path), "bytes": size, "runs": runs})
    else:
        print_lines(f"{path} ({size / 1e6:.1f} MB)")
