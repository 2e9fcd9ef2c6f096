"""Train a recipe: a name from `atoll ls recipes`, or a YAML file.

atoll train digits-at
atoll train digits-at loss=TRADES loss.lambda_t=3 trainer.epochs=10 --out runs/mine
atoll train recipe.yaml --data.root ~/data
atoll train --resume --out runs/mine
torchrun --nproc-per-node 2 -m atoll train digits-at
"""

from __future__ import annotations

import argparse
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import yaml

from atoll.cli.output import TrainingProgress, console, percent, print_json, print_table
from atoll.distributed import is_main
from atoll.errors import RecipeError
from atoll.recipe import build_recipe, recipes
from atoll.run import train
from atoll.training.trainer import Trainer

HELP = "train a recipe"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name or YAML file; not needed with --resume")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values to use instead of the recipe's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on where the run in --out was stopped or killed")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print it resolved, and stop")


def run(options: argparse.Namespace) -> int:
    recipe, overrides = options.recipe, options.overrides
    if recipe is not None and "=" in recipe and options.resume:  # only overrides were given
        recipe, overrides = None, [recipe, *overrides]
    if recipe is None and not (options.resume and options.out):
        raise RecipeError("expected a recipe, or --resume with --out; `atoll ls recipes` lists what there is")
    if recipe is None and overrides:
        raise RecipeError(f"a resumed run keeps its recipe; it cannot take {overrides[0]!r}")
    if options.dry_run:
        tree = build_recipe(recipe or options.out / "recipe.yaml", *overrides).tree
        print_json(tree) if options.json else sys.stdout.write(yaml.safe_dump(dict(tree), sort_keys=False))
        return 0
    name = recipe.removesuffix(".yaml") if recipe is not None else ""
    out = options.out or Path("runs") / (name if name.partition("/")[0] in recipes() else Path(name).name)
    observers = [] if options.json else [TrainingProgress()]
    finished = train(
        recipe, *overrides, out=out, resume=options.resume, observers=observers, on_trainer=stop_on_signals
    )
    if not is_main():
        return 0
    result = finished.result
    assert result is not None
    if options.json:
        print_json({"run": str(out), **result})
    else:
        show(out, result)
    return 0


def stop_on_signals(trainer: Trainer) -> None:
    """Ctrl-C and SIGTERM finish the step and save; the second one stops at once."""
    # Weak, because handlers stay until the process ends, and a trainer holds on to its process group.
    reference = weakref.ref(trainer)

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        running = reference()
        if running is None:
            signal.raise_signal(number)
        else:
            running.stop()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def show(out: Path, result: dict[str, Any]) -> None:
    attack = result["attack"] or "none"
    rows = []
    columns = {"clean": "clean", "robust": f"robust ({attack})"}
    if "vra" in result["last"]:
        columns["vra"] = "verified"
    averages = {name: found for name, found in result.items() if isinstance(found, dict) and "last" in found}
    for weights, found in {"": result, **averages}.items():
        for which in ("best", "last"):
            if which in found:
                row = found[which]
                shown = [percent(row[name]) if name in row else "-" for name in columns]
                rows.append([f"{which} {weights}".strip(), str(row["epoch"]), *shown])
    marked = " (best was chosen on the test set)" if result["selected_on"] == "test" else ""
    print_table(f"Test accuracy in %{marked}", ["checkpoint", "epoch", *columns.values()], rows)
    console.print(f"everything is in {out}", markup=False, soft_wrap=True)
