"""Check data and model for defects: wrong conventions, duplicates, missing classes, masked gradients and others.

The command measures clean accuracy and reports what looks wrong, with the option that would fix it if there is one.

Examples:
  atoll health runs/digits-at
  atoll health runs/adopted --points 1000
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import print_lines
from atoll.stats import percent_interval

if TYPE_CHECKING:
    from atoll.health import HealthResult


def show(results: Mapping[str, HealthResult]) -> None:
    for folder, result in results.items():
        value, interval = percent_interval(result.clean)
        print_lines(f"{folder}: clean accuracy on {result.clean.total:,} points: {value} % (95 %: {interval})")
        print_lines(*map(str, result.findings), style="yellow")
        print_lines(f"{len(result.findings) or 'no'} defects")


arguments = partial(add_flags, kind="health")
run = partial(run_measurement, kind="health", show=show)
