"""Examine this machine: what it has, whether its accelerator agrees with the CPU, and how fast it is.

The command lists devices, precisions, programs and versions. It compares verdicts, gradients and certificates of a
small network on the accelerator with those on the CPU. It times a training step and an attack relative to the passes of
the network alone, and says what would make them faster. This takes less than a minute.

If something is slow or fails on your GPU, please send us the answer of --json. The exit code is 1 if the accelerator
and the CPU disagree.

Examples:
  atoll doctor
  atoll doctor --device cuda:1
  atoll doctor --json
"""

from __future__ import annotations

import argparse

from atoll.cli.answers import print_json
from atoll.cli.measure import add_device
from atoll.cli.output import print_lines, print_table, progress_bar


def arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    from atoll.config import to_plain
    from atoll.doctor import diagnose

    with progress_bar("") as bar:
        task = bar.add_task("doctor", total=None, note="")
        diagnosis = diagnose(on_step=lambda what: bar.update(task, note=what))
    if options.json:
        print_json("doctor", {"diagnosis": to_plain(diagnosis)})
    else:
        table = diagnosis.table()
        print_table(table.title, table.columns, table.rows)
        print_lines(*table.notes)
    return 0 if diagnosis.is_sound else 1
