"""How flat a trained model is: Weight-Curvature Index by layer, largest eigenvalues, PAC-Bayes bounds, landscapes.

atoll curvature runs/digits-at
atoll curvature runs/digits-at --points 1000 --relative-error 0.02 --top 10 --gap
atoll curvature runs/digits-at --landscape weights
torchrun --nproc-per-node 4 -m atoll curvature runs/digits-at

Numbers and pictures are kept in RUN/curvature.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from atoll.attacks import PGD
from atoll.cli.options import checkpoint
from atoll.cli.output import console, print_json, print_table, progress_bar
from atoll.curvature import (
    WCI,
    Density,
    Estimate,
    Landscape,
    Problem,
    density,
    input_landscape,
    pac_bayes,
    robust_gap,
    top_eigenvalues,
    wci,
    weight_landscape,
)
from atoll.curvature.gauss_newton import diagonal
from atoll.data.base import sample
from atoll.distributed import default_device, is_main, process_group
from atoll.errors import InputError
from atoll.files import write_json
from atoll.recipe import build_part
from atoll.registry import members
from atoll.run import Run, Which, open_run
from atoll.threat import ThreatModel
from atoll.training.losses.base import Loss

HELP = "how flat a trained model is, layer by layer"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--points", type=int, default=512, help="random points of the split (default: 512)")
    parser.add_argument("--split", default="train", choices=["train", "validation", "test"])
    parser.add_argument("--loss", help=f"{', '.join(sorted(members('loss')))} (default: as trained)")
    parser.add_argument("--steps", type=int, default=10, help="of the PGD that makes the adversarial inputs")
    parser.add_argument("--estimator", default="auto", choices=["auto", "hutchinson", "gauss_newton", "exact"])
    parser.add_argument("--relative-error", type=float, default=0.05, help="of the index (default: 0.05)")
    parser.add_argument("--max-probes", type=int, default=1000, help="stop there in any case (default: 1000)")
    parser.add_argument("--top", type=int, default=3, metavar="K", help="largest eigenvalues (default: 3, 0 for none)")
    parser.add_argument("--density", action="store_true", help="the density of all eigenvalues")
    parser.add_argument("--gap", action="store_true", help="the robust generalization gap, with the same attack")
    parser.add_argument("--landscape", choices=["input", "weights"], help="the loss around the inputs or the weights")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--norm", choices=["linf", "l2", "l1"], help="default: as trained")
    parser.add_argument("--eps", help="number or fraction like 8/255 (default: as trained)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", action="store_true", help="allow the run to name classes outside Atoll")


def run(options: argparse.Namespace) -> int:
    if options.points < 1 or options.top < 0:
        raise InputError(f"--points, --top: expected at least 1 and 0, got {options.points}, {options.top}")
    which = checkpoint(options.checkpoint)
    with process_group(), progress_bar("") as bar:
        bar.disable = bar.disable or not is_main()
        stage = Stage(bar)
        chosen = open_run(options.folder, trust=options.trust)
        threat = ThreatModel(options.norm or chosen.threat.norm, options.eps or chosen.threat.eps, chosen.data.bounds)
        problem, attack = _problem(chosen, which, threat, options, stage)
        result = {
            "run": str(chosen.folder),
            "checkpoint": chosen.checkpoint_path(which, options.weights).name,
            "weights": options.weights,
            "split": options.split,
            "points": len(problem),
            "loss": type(problem.loss).__name__,
            "threat": {"norm": threat.norm, "eps": str(threat.eps), "bounds": threat.bounds},
            "steps": options.steps,
            "seed": options.seed,
            "folder": str(chosen.folder / "curvature"),
            "torch": torch.__version__,
            **_measure(problem, threat, options, stage),
        }
        if options.gap:
            stage("gap")
            train, test = (_points(chosen, split, options) for split in ("train", "test"))
            result["gap"] = robust_gap(problem.model, train, test, attack, seed=options.seed).to_json()
    if is_main():
        write_json(Path(result["folder"]) / "curvature.json", result)
        if options.json:
            print_json(result)
        else:
            _show(result)
    return 0


class Stage:
    """One progress bar for one thing after another."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=None, note="")

    def __call__(self, name: str) -> Callable[[int, int], None]:
        """Begin something; returns what it may report its progress to."""
        self.bar.reset(self.task, description=name, total=None)
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)


def _points(run: Run, name: str, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Random points of a split."""
    split = run.data.split(name)
    if not len(split):
        raise InputError(f"--split: the run holds no points back for {name}")
    return sample(split, options.points, "curvature", name, options.seed)


def _problem(
    run: Run, which: Which, threat: ThreatModel, options: argparse.Namespace, stage: Stage
) -> tuple[Problem, PGD]:
    """The run's loss at adversarial inputs that are made now, and what makes them."""
    stage("attack")
    known = members("loss")
    if options.loss is not None and options.loss not in known:
        raise InputError(f"--loss: expected one of {', '.join(sorted(known))}, got {options.loss!r}")
    loss = known[options.loss]() if options.loss else build_part(Loss, run.recipe["loss"], "loss", trust=options.trust)
    model = run.model(which, options.weights).to(default_device())
    attack = PGD(threat, loss.objective or "ce", steps=options.steps)
    x, y = _points(run, options.split, options)
    if loss.objective is None:
        return Problem(model, loss, x, y), attack
    return Problem.attacked(model, loss, x, y, attack, seed=options.seed), attack


def _measure(problem: Problem, threat: ThreatModel, options: argparse.Namespace, stage: Stage) -> dict[str, Any]:
    """All numbers that were asked for, and the pictures."""
    index = wci(
        problem,
        options.estimator,
        relative_error=options.relative_error,
        max_probes=options.max_probes,
        seed=options.seed,
        on_progress=stage("traces"),
    )
    found = {"mean_loss": problem.value(), **index.to_json()}
    pictures: dict[str, WCI | Density | Landscape] = {"layers": index}
    if options.top:
        stage("eigenvalues")
        found["eigenvalues"] = top_eigenvalues(problem, options.top, tolerance=0.01, seed=options.seed).tolist()
    stage("bounds")
    # Where Gauss-Newton was right for the traces, it is for the diagonal.
    sketched = index.traces.estimator.endswith("gauss_newton")
    curvature = diagonal(problem, seed=options.seed) if sketched else None
    bounds = pac_bayes(problem, index.traces.total.value, curvature, seed=options.seed)
    found["pac_bayes"] = [bound.to_json() for bound in bounds]
    if options.density:
        stage("density")
        pictures["density"] = density(problem, seed=options.seed)
    if options.landscape == "weights":
        pictures["landscape-weights"] = weight_landscape(problem, seed=options.seed, on_progress=stage("landscape"))
    elif options.landscape == "input":
        few = slice(0, 8)
        pictures["landscape-input"] = input_landscape(
            problem.model,
            problem.x[few],
            problem.y[few],
            radius=2 * threat.radius,
            seed=options.seed,
            on_progress=stage("landscape"),
        )
    if is_main():
        folder = options.folder / "curvature"
        folder.mkdir(exist_ok=True)
        for name, picture in pictures.items():
            picture.plot().savefig(folder / f"{name}.png", dpi=120)
            if not isinstance(picture, WCI):
                picture.save(folder / f"{name}.npz")
    return found


def _show(result: dict[str, Any]) -> None:
    rows = [
        [
            layer["name"],
            f"{layer['norm']:.4g}",
            f"{layer['trace']['value']:.4g}",
            f"{layer['trace']['standard_error']:.2g}",
            f"{layer['term']:.4g}",
            f"{100 * layer['share']:.1f}",
        ]
        for layer in result["layers"]
    ]
    threat = f"{result['threat']['norm']} {result['threat']['eps']}"
    title = f"{result['run']}: {result['loss']} at {result['points']:,} {result['split']} points, {threat}"
    print_table(title, ["weight matrix", "norm", "trace", "± error", "norm √trace", "% of WCI"], rows)
    traces, index = result["traces"], result["wci"]
    lines = [
        f"WCI {_pm(index)}, at most {result['bound']:.4g} = weight norm {result['weight_norm']:.4g}"
        f" x root of the traces {result['root_trace']:.4g}",
        f"trace of the whole Hessian {_pm(traces['total'])}, by {traces['estimator']} ({traces['reason']}),"
        f" {traces['probes']} probes",
    ]
    if result["negative"]:
        lines.append(f"{result['negative']} traces were negative and count as zero")
    if "eigenvalues" in result:
        lines.append(f"largest eigenvalues {', '.join(f'{value:.4g}' for value in result['eigenvalues'])}")
    for bound in result["pac_bayes"]:
        lines.append(
            f"PAC-Bayes, {bound['posterior']} posterior: loss {bound['risk']:.4g}; with noise {bound['expansion']:.4g}"
            f" to second order, {_pm(bound['noisy'])} by Monte Carlo; KL {bound['kl']:.4g}; bounds: linear"
            f" {bound['linear']:.4g}, Catoni {bound['catoni']:.4g}, square root {bound['square_root']:.4g};"
            f" {bound['words']}"
        )
    if "gap" in result:
        gap = result["gap"]
        lines.append(f"robust gap, test minus train: error {_pm(gap['error'])}, loss {_pm(gap['loss'])}")
    lines.append(f"numbers and pictures: {result['folder']}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _pm(number: dict[str, Any]) -> str:
    """``1.234 ± 0.056`` from an estimate's JSON."""
    return str(Estimate(number["value"], number["standard_error"]))
