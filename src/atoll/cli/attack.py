"""Attack trained models: clean and robust accuracy, and the adversarial inputs.

atoll attack runs/digits-at
atoll attack runs/digits-standard runs/digits-at --attacks FGSM,PGD-20,CW-20 --eps 0.1
atoll attack runs/digits-at --attacks PGD-20,CW-20 --surrogate runs/digits-standard
atoll attack runs/digits-at --attacks my_attack.py:MyAttack
torchrun --nproc-per-node 4 -m atoll attack runs/digits-at --attacks standard

Results are stored in RUN/results.  Rerun the same command to resume an interrupted evaluation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import console, interval, percent, print_table

SETTINGS = AttackSettings


def arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, SETTINGS)


def run(options: argparse.Namespace) -> int:
    return run_measurement(options, sys.modules[__name__])


def show(results: Mapping[str, AttackResult]) -> None:
    for folder, result in results.items():
        rows = [["clean", percent(result.clean), interval(result.clean), "-", "-", "-"]]
        for attack in result.attacks:
            broken = f"{attack.broken:,} of {attack.attacked:,}"
            passes = f"{attack.forward + attack.backward:,}"
            accuracy = attack.accuracy
            rows.append([attack.name, percent(accuracy), interval(accuracy), broken, passes, f"{attack.seconds:.1f}"])
        rows.append(["worst case", percent(result.robust), interval(result.robust), "-", "-", "-"])
        title = f"{folder}: {result.points:,} {result.settings.split} points, {result.settings.threat}"
        print_table(title, ["attack", "accuracy %", "95 %", "broken", "passes", "seconds"], rows)
        if result.adbd is not None:
            console.print(f"mean distance to the boundary (ADBD): {result.adbd}")
        for warning in result.warnings:
            console.print(f"{warning.kind}: {warning.message}", style="yellow", markup=False, soft_wrap=True)
        console.print(f"adversarial inputs and results: {result.folder}", markup=False, soft_wrap=True)
    if len(results) > 1:
        rows = [[folder, percent(result.clean), percent(result.robust)] for folder, result in results.items()]
        print_table("Worst case", ["run", "clean %", "robust %"], rows)
