"""Measure everything that can be said about a model in a given time, and write it to one page.

The audit checks data and model, and measures clean accuracy, robust accuracy, certificates, accuracy under common
corruptions, explanations and curvature. It measures how fast the model is, plans what fits into the budget, and prints
the plan. Less time means fewer points or weaker attacks, and the page says so.

The page opens with the main finding and a picture. The tab "Evidence" lists for each property what was measured, how,
with what uncertainty, how to repeat it, and what was not measured. RUN/audit contains the page (audit.html) and the
same as JSON (audit.json). Rerun the same command to resume an audit that was stopped.

--fail-under makes the audit a gate for CI: the exit code is 3 unless the lower end of the 95 % interval of each number
reaches its limit in percent. The numbers are clean, robust, corrupted, verified (proven) and smoothed.

Examples:
  atoll audit runs/digits-at
  atoll audit runs/photos --budget 2h
  atoll audit runs/photos --budget 10m --fail-under robust=50,clean=90
  atoll audit runs/photos --only health,attack
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.cli.answers import print_json
from atoll.cli.index import look_up
from atoll.cli.measure import add_run_flags, parse_checkpoint, warn_about_selection
from atoll.cli.output import error_console, print_lines, print_table, progress_bar
from atoll.cli.values import path
from atoll.registry import suggest

if TYPE_CHECKING:
    from atoll.audit import PlannedStep, Stage


def limits(text: str) -> dict[str, float]:
    """The limits of ``--fail-under``.

    >>> limits("robust=50,clean=90")
    {'robust': 50.0, 'clean': 90.0}
    """
    result, gates = {}, look_up("constants", "atoll.audit.engine.GATES")
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in gates:
            raise argparse.ArgumentTypeError(f"got {name!r}{suggest(name, gates)}")
        try:
            result[name] = float(value)
        except ValueError:
            result[name] = math.nan
        if not 0 <= result[name] <= 100:
            raise argparse.ArgumentTypeError(f"expected limits in percent such as robust=50, got {text!r}")
    return result


def names(text: str) -> tuple[str, ...]:
    """The steps of ``--only``."""
    words = tuple(word.strip() for word in text.split(","))
    steps = look_up("constants", "atoll.audit.plan.STEPS")
    for word in words:
        if word not in steps:
            raise argparse.ArgumentTypeError(f"got {word!r}{suggest(word, steps)}")
    return words


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--budget", default="30m", metavar="TIME", help="time, such as 90s, 30m or 1h30m (default: 30m)"
    )
    steps = f"steps to take: {', '.join(look_up('constants', 'atoll.audit.plan.STEPS'))}"
    parser.add_argument("--only", type=names, default=(), metavar="NAME,...", help=steps)
    parser.add_argument("--norm", choices=("linf", "l2", "l1"), help="norm of the threat model (default: as trained)")
    parser.add_argument("--eps", metavar="TEXT", help="radius, a number or a fraction like 8/255 (default: as trained)")
    text = "exit with code 3 unless these numbers are shown to reach their limits, such as robust=50"
    parser.add_argument("--fail-under", type=limits, default={}, metavar="NAME=PERCENT,...", help=text)
    parser.add_argument("--restart", action="store_true", help="make a new plan, and measure everything again")
    add_run_flags(parser)


def run(options: argparse.Namespace) -> int:
    from atoll.audit import audit
    from atoll.audit.plan import format_duration, parse_duration
    from atoll.config import to_plain
    from atoll.distributed import is_main
    from atoll.runs.run import open_run

    opened = open_run(options.run, trust=options.trust, data=dict(options.locations))
    checkpoint = parse_checkpoint(options.checkpoint)
    budget = parse_duration(options.budget)
    warn_about_selection(opened, checkpoint, options.weights, str(options.run))
    with progress_bar("") as bar:
        bar.disable = bar.disable or not is_main()
        task = bar.add_task("speed", total=None, note="")
        began = time.monotonic()

        def on_plan(steps: Sequence[PlannedStep], resumed: bool) -> None:
            if is_main():
                _show_plan(steps, budget, resumed)

        def on_step(stage: Stage, number: int, total: int) -> None:
            left = format_duration(max(budget - (time.monotonic() - began), 0.0))
            title = f"{stage.step.name} ({number + 1} of {total}), {left} left"
            bar.update(task, description=title, completed=0, total=None)

        def on_progress(what: str, done: float, total: int) -> None:
            bar.update(task, completed=int(done), total=total, note=what)

        result = audit(
            opened,
            budget=options.budget,
            only=options.only,
            norm=options.norm,
            eps=options.eps,
            checkpoint=checkpoint,
            weights=options.weights,
            restart=options.restart,
            on_plan=on_plan,
            on_step=on_step,
            on_progress=on_progress,
        )
    failures = result.failures(options.fail_under)
    if options.json:
        print_json("audit", {"page": str(result.page), "audit": to_plain(dict(result.data)), "failures": failures})
    else:
        table = result.table()
        print_table(table.title, table.columns, table.rows)
        print_lines(result.finding, f"the page is {result.page}; audit.json contains the same as JSON")
        print_lines(*failures, style="red")
    return 3 if failures else 0


def _show_plan(steps: Sequence[PlannedStep], budget: float, resumed: bool) -> None:
    from atoll.audit.plan import format_duration

    total = format_duration(sum(step.seconds for step in steps))
    kind = "Plan of the earlier audit" if resumed else "Plan"
    lines = [f"{kind}: about {total} of {format_duration(budget)}"]
    for step in steps:
        seconds = format_duration(step.seconds) if step.settings else "-"
        lines.append(f"  {step.name:<12}{seconds:>12}  {step.note}".rstrip())
    for line in lines:
        error_console.print(line, markup=False, highlight=False, soft_wrap=True)
