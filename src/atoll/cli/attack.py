"""Attack trained models: clean and robust accuracy with standard errors.

atoll attack runs/digits-at
atoll attack runs/digits-standard runs/digits-at --steps 50 --eps 0.1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from atoll.attacks import FGSM, PGD, Attack
from atoll.attacks.evaluate import evaluate
from atoll.cli.output import print_json, print_table, progress_bar
from atoll.distributed import default_device
from atoll.errors import InputError
from atoll.files import write_json
from atoll.run import Run, Which, open_run
from atoll.threat import ThreatModel

HELP = "robust accuracy of trained models"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--split", default="test", choices=["train", "validation", "test"])
    parser.add_argument("--norm", choices=["linf", "l2", "l1"], help="default: as trained")
    parser.add_argument("--eps", help="number or fraction like 8/255 (default: as trained)")
    parser.add_argument("--steps", type=int, default=20, help="PGD steps (default: 20)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trust", action="store_true", help="allow runs to name classes outside Atoll, and import them"
    )


def run(options: argparse.Namespace) -> int:
    which: Which = int(options.checkpoint) if options.checkpoint.isdecimal() else options.checkpoint
    if which not in ("best", "last") and not isinstance(which, int):
        raise InputError(f"--checkpoint: expected best, last or a step, got {options.checkpoint!r}")
    results = {}
    for folder in options.runs:
        results[str(folder)] = _attack(open_run(folder, trust=options.trust), which, options)
        write_json(folder / "evaluation.json", results[str(folder)])
    if options.json:
        print_json(results)
        return 0
    names = list(next(iter(results.values()))["accuracy"])
    rows = []
    for folder, result in results.items():
        accuracy = result["accuracy"]
        values = [f"{100 * accuracy[name]['value']:.2f}" for name in names]
        # All columns have the same number of points, and so the same standard error.
        rows.append([folder, *values, f"{100 * accuracy['clean']['standard_error']:.2f}"])
    threats = {result["threat"] for result in results.values()}
    if len(threats) > 1:
        rows = [[f"{row[0]} ({results[row[0]]['threat']})", *row[1:]] for row in rows]
    against = f", {threats.pop()}" if len(threats) == 1 else ""
    print_table(f"Accuracy in % on {options.split}{against}", ["run", *names, "±"], rows)
    return 0


def _attack(run: Run, which: Which, options: argparse.Namespace) -> dict[str, Any]:
    threat = ThreatModel(options.norm or run.threat.norm, options.eps or run.threat.eps, run.data.bounds)
    attacks: dict[str, Attack] = {
        "FGSM": FGSM(threat),
        f"PGD-{options.steps}": PGD(threat, steps=options.steps),
        f"CW-{options.steps}": PGD(threat, "margin", steps=options.steps),
    }
    device = default_device()
    model = run.model(which, options.weights).to(device)
    split = run.data.split(options.split)
    with progress_bar("images") as bar:
        task = bar.add_task(str(run.folder), total=len(split), note="")
        accuracy = evaluate(
            model,
            split,
            attacks,
            batch_size=options.batch_size,
            seed=options.seed,
            device=device,
            on_batch=lambda count: bar.advance(task, count),
        )
    return {
        "checkpoint": run.checkpoint_path(which, options.weights).name,
        "weights": options.weights,
        "split": options.split,
        "threat": f"{threat.norm} {threat.eps}",
        "seed": options.seed,
        "accuracy": {name: a.to_json() for name, a in accuracy.items()},
    }
