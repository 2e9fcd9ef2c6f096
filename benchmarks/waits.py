"""Operations and waits of attacks and training steps on an accelerator, counted by the pretend device of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the tests check the same limits


def run() -> Iterator[Row]:
    from wait_cases import CASES, StepCase

    for name, case in CASES.items():
        count, limit = case.count(), case.limit
        unit, note = ("step", "") if isinstance(case, StepCase) else ("iteration", "besides the passes of the model")
        for kind in ("operations", "waits"):
            most = None if limit is None else getattr(limit, kind)
            yield Row(
                f"{name}: {kind} per {unit}", getattr(count, kind), most, note=note if kind == "operations" else ""
            )
