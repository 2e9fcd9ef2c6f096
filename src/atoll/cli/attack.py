"""Measure clean and robust accuracy of trained models under attack.

The default is AutoAttack with the norm and eps that the run was trained with. The command also stores the adversarial
inputs, and warns if something suggests that the robust accuracy is too high.

Results are stored in RUN/results. Rerun the same command to show them again, or to resume an interrupted evaluation.

Examples:
  atoll attack runs/digits-at
  atoll attack runs/digits-standard runs/digits-at --attacks FGSM,PGD-20,CW-20 --eps 0.1
  atoll attack runs/digits-at --attacks PGD-20,CW-20 --surrogate runs/digits-standard
  atoll attack runs/digits-at --attacks my_attack.py:MyAttack
  torchrun --nproc-per-node 4 -m atoll attack runs/digits-at
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import percent, percent_interval, print_lines, print_table


def show(results: Mapping[str, AttackResult]) -> None:
    for folder, result in results.items():
        rows = [["clean", *percent_interval(result.clean), "-", "-", "-"]]
        for attack in result.attacks:
            broken = f"{attack.broken:,} of {attack.attacked:,}"
            passes = f"{attack.forward + attack.backward:,}"
            rows.append([attack.name, *percent_interval(attack.accuracy), broken, passes, f"{attack.seconds:.1f}"])
        sample = result.estimate
        rows.append(["at most" if sample else "worst case", *percent_interval(result.robust), "-", "-", "-"])
        if sample is not None:
            broken = f"{sample.rejected:,} of {sample.sampled:,} sampled"
            rows.append(["estimate", *percent_interval(sample), broken, "-", "-"])
        title = f"{folder}: {result.points:,} {result.settings.split} points, {result.settings.threat}"
        print_table(title, ["attack", "accuracy %", "95 %", "broken", "passes", "seconds"], rows)
        if result.adbd is not None:
            print_lines(f"mean distance to the boundary (ADBD): {result.adbd}")
        print_lines(*(f"{warning.kind}: {warning.message}" for warning in result.warnings), style="yellow")
        print_lines(f"adversarial inputs and results: {result.folder}")
    if len(results) > 1:
        rows = [[folder, percent(result.clean), percent(result.robust)] for folder, result in results.items()]
        print_table("Worst case", ["run", "clean %", "robust %"], rows)


arguments = partial(add_flags, settings=AttackSettings)
run = partial(run_measurement, settings=AttackSettings, show=show)
