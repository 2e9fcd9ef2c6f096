"""Attack trained models: robust accuracy with standard errors, and the adversarial inputs.

atoll attack runs/digits-at
atoll attack runs/digits-standard runs/digits-at --attacks FGSM,PGD-20,CW-20 --eps 0.1
atoll attack runs/digits-at --attacks PGD-20,CW-20 --surrogate runs/digits-standard
torchrun --nproc-per-node 4 -m atoll attack runs/digits-at --attacks standard

An evaluation that was interrupted goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from atoll.attacks.base import Attack
from atoll.attacks.evaluate import WRONG, Evaluation, evaluate
from atoll.attacks.rays import boundary_distance
from atoll.attacks.suites import VERSIONS, chosen
from atoll.attacks.transfer import Transfer
from atoll.cli.options import checkpoint
from atoll.cli.output import console, interval, percent, print_json, print_table, progress_bar
from atoll.data.base import Split, SubSplit, to_float
from atoll.distributed import all_sum, barrier, default_device, is_main, process_group, rank, world_size
from atoll.errors import InputError
from atoll.files import write_json
from atoll.plots import plot_adversarial
from atoll.run import Run, Which, open_run
from atoll.streams import key
from atoll.threat import ThreatModel

HELP = "robust accuracy of trained models"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--attacks",
        default="standard",
        help=f"{', '.join(VERSIONS)}, or names such as FGSM,PGD-20,CW-20,APGD-T (default: standard)",
    )
    parser.add_argument(
        "--individual", action="store_true", help="each attack on all points, not on what the ones before it left"
    )
    parser.add_argument("--surrogate", type=Path, metavar="RUN", help="craft the attacks on another run's model")
    parser.add_argument(
        "--adbd", action="store_true", help="also the mean distance to the boundary by RayS, from labels alone (linf)"
    )
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--split", default="test", choices=["train", "validation", "test"])
    parser.add_argument("--points", type=int, help="only the first so many (default: all)")
    parser.add_argument("--norm", choices=["linf", "l2", "l1"], help="default: as trained")
    parser.add_argument("--eps", help="number or fraction like 8/255 (default: as trained)")
    parser.add_argument("--batch-size", type=int, help="rows attacked at a time (default: by memory)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="forget an interrupted or finished evaluation")
    parser.add_argument(
        "--trust", action="store_true", help="allow runs to name classes outside Atoll, and import them"
    )


def run(options: argparse.Namespace) -> int:
    if options.points is not None and options.points < 1:
        raise InputError(f"--points: expected at least 1, got {options.points}")
    which = checkpoint(options.checkpoint)
    results = {}
    with process_group(), progress_bar("points") as bar:
        bar.disable = bar.disable or not is_main()
        for folder in options.runs:
            results[str(folder)] = _attack(open_run(folder, trust=options.trust), which, options, bar)
    if is_main():
        _show(results, options)
    return 0


def _attacks(options: argparse.Namespace, threat: ThreatModel, device: torch.device) -> tuple[dict[str, Attack], bool]:
    """The attacks asked for, and whether each runs only on what the ones before it left standing."""
    attacks = chosen(options.attacks, threat)
    if options.surrogate is not None:
        surrogate = open_run(options.surrogate, trust=options.trust).model().to(device)
        attacks = {f"{name} (transfer)": Transfer(attack, surrogate) for name, attack in attacks.items()}
    return attacks, options.attacks in VERSIONS and not options.individual


def _attack(run: Run, which: Which, options: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    threat = ThreatModel(options.norm or run.threat.norm, options.eps or run.threat.eps, run.data.bounds)
    device = default_device()
    attacks, cascade = _attacks(options, threat, device)
    model = run.model(which, options.weights).to(device)
    split = run.data.split(options.split)
    if options.points is not None:
        split = SubSplit(split, torch.arange(min(options.points, len(split))))
    about: dict[str, Any] = {
        "run": str(run.folder),
        "checkpoint": run.checkpoint_path(which, options.weights).name,
        "weights": options.weights,
        "split": options.split,
        "points": len(split),
        "threat": {"norm": threat.norm, "eps": str(threat.eps), "bounds": threat.bounds},
        "attacks": options.attacks,
        "surrogate": None if options.surrogate is None else str(options.surrogate),
        "cascade": cascade,
        "seed": options.seed,
    }
    name = f"{options.attacks}-{threat.norm}-{threat.eps}-{options.split}".replace("/", "_").replace(",", "+")
    folder = run.folder / "evaluations" / f"{name}-{key(about, options.batch_size, world_size()):016x}"
    if options.restart and is_main():
        shutil.rmtree(folder, ignore_errors=True)
    barrier()
    task = bar.add_task(str(run.folder), total=len(split), note="")
    evaluation = evaluate(
        model,
        split,
        attacks,
        cascade=cascade,
        batch_size=options.batch_size,
        seed=options.seed,
        device=device,
        folder=folder,
        on_progress=lambda attack, done, total: bar.update(task, completed=int(done), total=total, note=attack),
    )
    if options.adbd:
        about["adbd"] = _boundary(model, split, threat, evaluation, bar)
    bar.remove_task(task)
    # The evaluation has a list of its own under ``attacks``.
    result = {
        **about,
        "suite": options.attacks,
        "folder": str(folder),
        "torch": torch.__version__,
        **evaluation.to_json(),
    }
    if is_main():
        write_json(folder / "evaluation.json", result)
        _picture(run, model, split, evaluation, folder)
    return result


def _boundary(
    model: torch.nn.Module, split: Split, threat: ThreatModel, evaluation: Evaluation, bar: Progress
) -> dict[str, float]:
    """Average decision boundary distance of the points that are classified correctly, and its standard error."""
    index = (evaluation.broken_by != WRONG).nonzero().squeeze(1)[rank() :: world_size()]
    task = bar.add_task("boundary", total=len(index), note="RayS")
    found = torch.full((len(split),), math.nan, dtype=torch.float64)
    device = default_device()
    for part in torch.split(index, evaluation.batch_size):
        x, y = to_float(split.fetch(part)).to(device), split.labels[part].to(device)
        found[part] = boundary_distance(model, x, y, bounds=threat.bounds).double().cpu()
        bar.advance(task, len(part))
    bar.remove_task(task)
    known = all_sum(found.nan_to_num(posinf=math.inf))[evaluation.broken_by != WRONG]
    return {"mean": float(known.mean()), "standard_error": float(known.std() / len(known) ** 0.5)}


def _picture(run: Run, model: torch.nn.Module, split: Split, evaluation: Evaluation, folder: Path) -> None:
    """Clean, perturbation and adversarial, of the first points that fell."""
    assert evaluation.adversarial is not None
    fallen = (evaluation.broken_by >= 0).nonzero().squeeze(1)[:8]
    if not len(fallen) or evaluation.adversarial.dim() != 4:
        return
    x, y = to_float(split.fetch(fallen)), split.labels[fallen]
    figure = plot_adversarial(model, x, evaluation.adversarial[fallen], y, run.data.classes, rows=8)
    figure.savefig(folder / "adversarial.png", dpi=120)


def _show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print_json(results)
        return
    for folder, result in results.items():
        clean = result["clean"]
        rows = [["clean", percent(clean), interval(clean), "-", "-", "-"]]
        for attack in result["attacks"]:
            found = [attack["name"], percent(attack["accuracy"]), interval(attack["accuracy"])]
            found += [f"{attack['broken']:,} of {attack['attacked']:,}"]
            rows.append([*found, f"{attack['forward'] + attack['backward']:,}", f"{attack['seconds']:.1f}"])
        rows.append(["worst case", percent(result["robust"]), interval(result["robust"]), "-", "-", "-"])
        threat = f"{result['threat']['norm']} {result['threat']['eps']}"
        columns = ["attack", "accuracy %", "95 %", "broken", "passes", "seconds"]
        print_table(f"{folder}: {result['points']:,} {options.split} points, {threat}", columns, rows)
        if "adbd" in result:
            distance = result["adbd"]
            console.print(f"distance to the boundary (ADBD): {distance['mean']:.4f} ± {distance['standard_error']:.4f}")
        for finding in result["findings"]:
            console.print(f"{finding['kind']}: {finding['message']}", style="yellow", markup=False, soft_wrap=True)
        console.print(f"adversarial inputs and results: {result['folder']}", markup=False, soft_wrap=True)
    if len(results) > 1:
        rows = [[folder, percent(result["clean"]), percent(result["robust"])] for folder, result in results.items()]
        print_table("Worst case", ["run", "clean %", "robust %"], rows)
