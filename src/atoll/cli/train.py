"""Train a model as a recipe describes, then test its best and its last checkpoint.

RECIPE is a name from `atoll ls recipes`, or a YAML file. KEY=VALUE changes a value of the recipe. A key is written in
full (trainer.epochs=5) or in short (epochs=5) if only one part of the recipe has it. `atoll ls loss TRADES` lists the
keys of a component. Atoll checks the whole recipe before it starts and reports all errors at once.

Ctrl-C saves a checkpoint. With --resume, training continues from the newest checkpoint and produces bit-identical
results.

Examples:
  atoll train digits-at
  atoll train digits-at epochs=10 lr=0.05 eps=8/255
  atoll train digits-at loss=TRADES loss.lambda_t=3 methods='[AWP, SWA]' --out runs/mine
  atoll train recipe.yaml --data.root ~/photos
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
from typing import TYPE_CHECKING, Any

from atoll.cli.answers import print_json
from atoll.cli.measure import add_device
from atoll.cli.output import error_console, print_lines, print_table
from atoll.cli.values import path
from atoll.errors import Interrupted, RecipeError

if TYPE_CHECKING:
    from atoll.runs.run import Run
    from atoll.training.trainer import Trainer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name or YAML file; leave it out with --resume")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="value to use instead of the recipe's")
    parser.add_argument("--out", type=path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="resume the run in --out after an interruption")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print it with all defaults, and exit")
    add_device(parser)
    parser.add_argument(
        "--trust", action="store_true", help="import classes from outside Atoll that a resumed run names"
    )


def run(options: argparse.Namespace) -> None:
    recipe, overrides = options.recipe, options.overrides
    if recipe is not None and "=" in recipe and options.resume:  # only overrides were given
        recipe, overrides = None, [recipe, *overrides]
    if recipe is None and not (options.resume and options.out):
        raise RecipeError(
            "expected a recipe, as in `atoll train digits-at`, or a run to resume, as in `atoll train --resume --out"
            " runs/digits-at`; `atoll ls recipes` lists all recipes"
        )
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        raise RecipeError(f"expected a recipe before {recipe}, as in `atoll train digits-at {recipe}`")
    if recipe is None and overrides and options.dry_run:
        raise RecipeError(f"a resumed run keeps its recipe; it cannot take {overrides[0]!r}")
    from atoll.distributed import is_main
    from atoll.runs.recipe import build_recipe, recipes
    from atoll.runs.run import Run
    from atoll.runs.train import train
    from atoll.training.progress import TrainingProgress

    if options.dry_run:
        import yaml

        trust = options.trust or recipe is not None
        tree = build_recipe(Run(options.out).recipe if recipe is None else recipe, *overrides, trust=trust).tree
        if options.json:
            print_json("train", {"recipe": tree})
        else:
            sys.stdout.write(yaml.safe_dump(dict(tree), sort_keys=False))
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
        raise KeyboardInterrupt(_how_to_resume(str(error), out, options)) from None
    if not is_main():
        return
    if options.json:
        rows = finished.tests()
        tests = [{"checkpoint": r.checkpoint, "weights": r.weights, "epoch": r.epoch} | r.to_json() for r in rows]
        print_json("train", {"run": str(out), "selected_on": finished.index.get("selected_on"), "test": tests})
    else:
        show(finished)


def _how_to_resume(message: str, out: Path, options: argparse.Namespace) -> str:
    """What to print after Ctrl-C."""
    if not (out / "recipe.yaml").exists():
        return "Interrupted before training started."
    command = ["atoll", "train", "--resume", "--out", str(out)]
    command += [] if options.device == "auto" else ["--device", options.device]
    command += ["--trust"] if options.trust else []
    return f"{message or 'Interrupted.'} Resume with: {shlex.join(command)}"


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
    print_lines(f"saved in {run.folder}")
