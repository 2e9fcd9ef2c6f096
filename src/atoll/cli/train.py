"""Train a recipe: a name from `atoll ls recipes`, or a YAML file.

atoll train digits-at
atoll train digits-at loss=TRADES loss.lambda_t=3 trainer.epochs=10 --out runs/mine
atoll train recipe.yaml --data.root ~/data
atoll train --resume --out runs/mine
torchrun --nproc-per-node 2 -m atoll train digits-at
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import yaml

from atoll.cli.output import error_console, print_json, print_lines, print_table
from atoll.distributed import is_main
from atoll.errors import Interrupted, RecipeError
from atoll.runs.recipe import build_recipe, recipes
from atoll.runs.run import Run
from atoll.runs.train import train
from atoll.training.progress import TrainingProgress
from atoll.training.trainer import Trainer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name or YAML file; not needed with --resume")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values to use instead of the recipe's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on where the run in --out was stopped or killed")
    parser.add_argument("--trust", action="store_true", help="import classes from outside Atoll when resuming")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print it resolved, and stop")


def run(options: argparse.Namespace) -> None:
    recipe, overrides = options.recipe, options.overrides
    if recipe is not None and "=" in recipe and options.resume:  # only overrides were given
        recipe, overrides = None, [recipe, *overrides]
    if recipe is None and not (options.resume and options.out):
        raise RecipeError("expected a recipe, or --resume with --out; `atoll ls recipes` lists what there is")
    if recipe is None and overrides and options.dry_run:
        raise RecipeError(f"a resumed run keeps its recipe; it cannot take {overrides[0]!r}")
    if options.dry_run:
        trust = options.trust or recipe is not None
        tree = build_recipe(options.out / "recipe.yaml" if recipe is None else recipe, *overrides, trust=trust).tree
        print_json(tree) if options.json else sys.stdout.write(yaml.safe_dump(dict(tree), sort_keys=False))
        return
    name = recipe.removesuffix(".yaml") if recipe is not None else ""
    out = options.out or Path("runs") / (name if name.partition("/")[0] in recipes() else Path(name).name)
    observers = [] if options.json else [TrainingProgress(error_console)]
    try:
        finished = train(
            recipe,
            *overrides,
            out=out,
            resume=options.resume,
            trust=options.trust,
            observers=observers,
            on_trainer=stop_on_signals,
        )
    except (Interrupted, KeyboardInterrupt) as error:
        raise KeyboardInterrupt(_how_to_resume(str(error), out, options.trust)) from None
    if not is_main():
        return
    if options.json:
        rows = finished.tests()
        tests = [{"checkpoint": r.checkpoint, "weights": r.weights, "epoch": r.epoch} | r.to_json() for r in rows]
        print_json({"run": str(out), "selected_on": finished.index.get("selected_on"), "test": tests})
    else:
        show(finished)


def _how_to_resume(message: str, out: Path, trust: bool) -> str:
    """What to print after Ctrl-C."""
    if not (out / "recipe.yaml").exists():
        return "Interrupted before training started."
    command = f"atoll train --resume --out {shlex.quote(str(out))}{' --trust' if trust else ''}"
    return f"{message or 'Interrupted.'} Resume with: {command}"


def stop_on_signals(trainer: Trainer) -> None:
    """Ctrl-C and SIGTERM finish the step and save; the second one stops at once."""
    # Weak, because handlers stay until the process ends, and a trainer holds on to its process group.
    reference = weakref.ref(trainer)

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        running = reference()
        if running is None:
            raise KeyboardInterrupt
        running.stop()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def show(run: Run) -> None:
    """Test results of the best and the last checkpoint."""
    table = run.table()
    note = " (best was selected on the test set)" if run.index.get("selected_on") == "test" else ""
    print_table(f"Test accuracy in %{note}", table.columns, table.rows)
    if warning := run.selection_warning():
        print_lines(f"warning: {warning}")
    print_lines(f"everything is in {run.folder}")
