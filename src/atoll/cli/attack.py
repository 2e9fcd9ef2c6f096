"""Measure clean and robust accuracy of trained models under attack.

The default is AutoAttack with the norm and eps that the run was trained with. The command also stores the adversarial
inputs, and warns if something suggests that the robust accuracy is too high.

Results are stored in RUN/results. Rerun the same command to show them again, or to resume an interrupted evaluation.

Examples:
  atoll attack runs/digits-at
  atoll attack runs/digits-standard runs/digits-at --attacks FGSM,PGD-20,CW-20 --eps 0.1
  atoll attack runs/digits-at --attacks PGD-20,CW-20 --surrogate runs/digits-standard
  atoll attack runs/digits-at --attacks none --curve
  atoll attack runs/digits-at --attacks my_attack.py:MyAttack
  atoll attack runs/digits-at --attacks none --corruptions
  torchrun --nproc-per-node 4 -m atoll attack runs/digits-at
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import print_lines, print_table
from atoll.stats import percent, percent_interval

if TYPE_CHECKING:
    from atoll.attacks.measure import AttackResult


def show(results: Mapping[str, AttackResult]) -> None:
    for folder, result in results.items():
        table = result.table()
        title = f"{folder}: {result.points:,} {result.settings.split} points, {result.settings.threat}"
        print_table(title, table.columns, table.rows)
        if result.adbd is not None:
            print_lines(f"mean distance to the boundary (ADBD): {result.adbd}")
        if result.corruptions is not None:
            corruptions = result.corruptions.table()
            print_table(corruptions.title, corruptions.columns, corruptions.rows)
            print_lines(*corruptions.notes)
        if result.curve is not None:
            curve = result.curve.table()
            print_table(f"{folder}: {curve.title}", curve.columns, curve.rows)
            print_lines(*curve.notes)
        if result.power is not None:
            print_lines(f"power: {result.power}")
        print_lines(*(f"{warning.kind}: {warning.message}" for warning in result.warnings), style="yellow")
        print_lines(f"adversarial inputs and results: {result.folder}")
    if len(results) > 1 and all(result.estimate for result in results.values()):
        rows = [
            [folder, percent(result.clean), percent(result.robust), *percent_interval(result.estimate)]
            for folder, result in results.items()
            if result.estimate
        ]
        print_table("Estimates", ["run", "clean %", "at most %", "estimate %", "95 %"], rows)
    elif len(results) > 1:
        rows = [[folder, percent(result.clean), percent(result.robust)] for folder, result in results.items()]
        print_table("Worst case", ["run", "clean %", "robust %"], rows)
    corrupted = {folder: result.corruptions for folder, result in results.items() if result.corruptions is not None}
    if len(corrupted) > 1:
        rows = [[folder, *corruptions.mean_percent] for folder, corruptions in corrupted.items()]
        print_table("Mean under common corruptions", ["run", "accuracy %", "95 %"], rows)


arguments = partial(add_flags, kind="attack")
run = partial(run_measurement, kind="attack", show=show)
