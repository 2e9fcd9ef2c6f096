"""Certify trained models: predictions with a radius (l2) within which they provably cannot change.

atoll certify runs/digits-gloro
atoll certify runs/mnist-gloro --eps 0.3,1.58 --points 1000
atoll certify runs/mnist-gloro --no-attack
atoll certify runs/mnist-centroid --eta 0.1 --reject noise --reject FashionMNIST
atoll certify runs/digits-smoothing --smooth 0.25 --samples 10000

Certified points are attacked at their radius; if one falls, the command fails.  Results are kept in RUN/certificates.
Centroid Nets without encoder are also attacked by way of their prototypes, which sees what gradients do not.

--smooth certifies any model by randomized smoothing: it predicts what the model mostly says under Gaussian noise.  Such
certificates hold with a probability (1 - alpha for each point), not surely, so no attack could refute one, and none is
run.  Points are kept as they come: the same command goes on where it was interrupted.

--reject tells how much of other data is rejected: inputs for which nothing is certified at eps.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from safetensors.torch import save

from atoll.attacks.suites import VERSIONS
from atoll.certify.evaluate import (
    Certification,
    OnProgress,
    attack_certified,
    attacks_on,
    certify,
    empirical,
    made_for,
    relative_cost,
)
from atoll.certify.families import certifier_for
from atoll.certify.kept import Kept
from atoll.certify.norms import BUDGET
from atoll.certify.rejection import noise, share_rejected
from atoll.certify.smoothing import Smoothed
from atoll.cli.options import checkpoint, trained_radius
from atoll.cli.output import console, interval, percent, print_json, print_table, progress_bar
from atoll.data.base import Data, Split, SubSplit, to_float
from atoll.distributed import default_device, is_main, process_group
from atoll.errors import InputError
from atoll.files import sha256, write_atomic, write_json
from atoll.models.base import Classifier
from atoll.plots import plot_certified
from atoll.recipe import build_part, parse_yaml
from atoll.run import Run, Which, open_run
from atoll.streams import key
from atoll.threat import ThreatModel

HELP = "provable robustness of trained models"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--eps", help="l2 radii such as 0.3,36/255 (default: as trained)")
    parser.add_argument("--points", type=int, help="only the first so many (default: all)")
    parser.add_argument(
        "--attacks",
        default="APGD-CE",
        help=f"for the empirical robust accuracy: {', '.join(VERSIONS)}, or names (default: APGD-CE)",
    )
    parser.add_argument("--check", type=int, default=500, metavar="N", help="certified points attacked (default: 500)")
    parser.add_argument("--attack", action=argparse.BooleanOptionalAction, default=True, help="attack at all")
    parser.add_argument("--eta", type=float, default=0.0, help="of an eta-layer, for Centroid Nets (default: none)")
    parser.add_argument(
        "--reject",
        action="append",
        default=[],
        metavar="DATA",
        help="tell how much of it is rejected: noise, or a data set as in a recipe; may be given several times",
    )
    parser.add_argument("--smooth", type=float, metavar="SIGMA", help="randomized smoothing with noise of this size")
    parser.add_argument("--samples", type=int, default=100_000, metavar="N", help="of the noise (default: 100000)")
    parser.add_argument("--alpha", type=float, default=0.001, help="share of false certificates, at most (0.001)")
    parser.add_argument(
        "--precision",
        choices=["float64", "float32"],
        help="of the certified network (default: float64, and float32 for --smooth); for proofs in float32 all that"
        " rounding can do is subtracted",
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"operations per layer's proof ({BUDGET:g})")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--split", default="test", choices=["train", "validation", "test"])
    parser.add_argument("--batch-size", type=int, default=256, help="points at a time (default: 256)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: RUN/certificates)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", action="store_true", help="allow runs to name classes outside Atoll")


def run(options: argparse.Namespace) -> int:
    for name in ("points", "batch_size", "check"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    which = checkpoint(options.checkpoint)
    if options.out is not None and len(options.runs) > 1:
        raise InputError("--out: expected one run, got several")
    results = {}
    with process_group(), progress_bar("points") as bar:
        bar.disable = bar.disable or not is_main()
        for folder in options.runs:
            results[str(folder)] = _certify(open_run(folder, trust=options.trust), which, options, bar)
    if is_main():
        _show(results, options)
    return 0


def _certify(run: Run, which: Which, options: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    words, device = options.eps, default_device()
    if words is None:
        radii = [trained_radius(run, "radii are")]
    else:
        radii = [ThreatModel("l2", word).radius for word in words.split(",")]
    split = run.data.split(options.split)
    if options.points is not None:
        split = SubSplit(split, torch.arange(min(options.points, len(split))))
    if not len(split):
        raise InputError(f"--split: the run holds no points back for {options.split}")
    model = run.model(which, options.weights).to(device)
    task = bar.add_task(str(run.folder), total=None, note="norms")

    def progress(what: str, done: float, total: int) -> None:
        bar.update(task, completed=int(done), total=total, note=what)

    precision = options.precision or ("float64" if options.smooth is None else "float32")
    # What is certified, and what is attacked: the model in its own precision is faster.
    certified = copy.deepcopy(model).double() if precision == "float64" else model
    folder = options.out or run.folder / ("certificates" if options.smooth is None else "smoothing")
    result: dict[str, Any] = {
        "run": str(run.folder),
        "checkpoint": run.checkpoint_path(which, options.weights).name,
        "weights": options.weights,
        "split": options.split,
        "points": len(split),
        "precision": precision,
        "seed": options.seed,
        "folder": str(folder),
        "torch": torch.__version__,
    }
    if options.smooth is not None and (options.reject or options.eta):
        raise InputError("--smooth: goes with neither --reject nor --eta")
    if options.smooth is not None:
        smoothed = Smoothed(certified, options.smooth, n=options.samples, alpha=options.alpha, seed=options.seed)
        about = {name: getattr(smoothed, name) for name in ("sigma", "n0", "n", "alpha")}
        # Whatever decides about a certificate, the weights above all, decides about the folder that it is kept in.
        weights = sha256(run.checkpoint_path(which, options.weights) / "model.safetensors")
        names = key(about, weights, options.weights, precision, options.seed)
        kept = Kept(smoothed, folder / f"points-{names:016x}")
        began = time.monotonic()
        certification = certify(kept, split, batch_size=1, device=device, on_progress=progress)
        result |= {"smoothing": about, "seconds": time.monotonic() - began, **certification.to_json(radii)}
        if is_main():
            _keep(certification, run, radii, folder)
    else:
        result |= _prove(run, model, certified, split, radii, folder, options, bar, task, progress)
    bar.remove_task(task)
    if is_main():
        write_json(folder / "certification.json", result)
    return result


def _prove(
    run: Run,
    model: Classifier,
    certified: Classifier,
    split: Split,
    radii: list[float],
    folder: Path,
    options: argparse.Namespace,
    bar: Progress,
    task: TaskID,
    progress: OnProgress,
) -> dict[str, Any]:
    """Certificates that are proofs, and attacks that try to refute them."""
    device = default_device()
    certifier = certifier_for(
        certified,
        budget=options.budget,
        on_layer=lambda layer: bar.update(task, note=f"norm of {layer.name}"),
        radii=radii,
        eta=options.eta,
    )
    # Before the work: a data set that is not there, or of another shape, is a fault of the command line.
    outside = {
        word: _others(word, certified.input_shape, len(split), seed=options.seed, trust=options.trust)
        for word in options.reject
    }
    certification = certify(certifier, split, batch_size=options.batch_size, device=device, on_progress=progress)
    result = {
        "layers": [vars(layer) for layer in certifier.layers],
        "lipschitz": certifier.lipschitz,
        **certification.to_json(radii),
    }
    if outside:
        found = {f"{options.split} points": certification}
        for word, other in outside.items():
            found[word] = certify(certifier, other, batch_size=options.batch_size, device=device, on_progress=progress)
        result["eta"] = options.eta
        result["rejected"] = [
            {"data": word, "eps": eps, **share_rejected(each, eps).to_json()}
            for word, each in found.items()
            for eps in radii
        ]
    x = to_float(split.fetch(torch.arange(min(options.batch_size, len(split))))).to(device)
    result["relative_cost"] = relative_cost(certifier, certified, x.to(next(certified.parameters()).dtype))
    if is_main():  # before the attacks, which take longest
        _keep(certification, run, radii, folder)
    if options.attack:
        check = attack_certified(
            model, certifier, split, certification, bounds=run.data.bounds, points=options.check, seed=options.seed,
            device=device, folder=folder, on_progress=progress,
        )  # fmt: skip
        result["check"] = vars(check)
        result["empirical"] = []
        for eps in radii:
            threat = ThreatModel("l2", eps, run.data.bounds)
            accuracy = empirical(
                model, split, certification, attacks_on(model, options.attacks, threat), eps,
                batch_size=options.batch_size, seed=options.seed, device=device, on_progress=progress,
            )  # fmt: skip
            names = ", ".join([options.attacks, *made_for(model)])
            result["empirical"].append({"eps": eps, "attacks": names, **accuracy.to_json()})
    return result


def _others(word: str, shape: tuple[int, ...], count: int, *, seed: int, trust: bool) -> Split:
    """Up to so many inputs of another kind: ``noise``, or the test points of a data set as a recipe names it."""
    if word == "noise":
        return noise(shape, count, seed=seed)
    data: Data = build_part(Data, parse_yaml(word, "--reject"), "--reject", trust=trust)
    if data.shape != shape:
        wanted, got = ("x".join(map(str, each)) for each in (shape, data.shape))
        raise InputError(f"--reject: expected inputs of {wanted}, got {got} from {word}")
    return SubSplit(data.test, torch.arange(min(count, len(data.test))))


def _keep(certification: Certification, run: Run, radii: list[float], folder: Path) -> None:
    found = {name: getattr(certification, name) for name in ("prediction", "radius", "label")}
    write_atomic(folder / "certificates.safetensors", save(found))
    plot_certified({run.folder.name: certification.curve()}, radii).savefig(folder / "curve.png", dpi=120)


def _show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print_json(results)
        return
    for folder, result in results.items():
        if "layers" in result:
            layers = [layer for layer in result["layers"] if layer["how"] != "known"]
            rows = [[layer["name"], layer["kind"], f"{layer['lipschitz']:.4f}", layer["how"]] for layer in layers]
            print_table(f"{folder}: Lipschitz constants", ["layer", "kind", "at most", "proof"], rows)
        rows = [["clean", "-", percent(result["clean"]), interval(result["clean"])]]
        kind = "verified" if "layers" in result else "verified, probably"
        for verified in result["verified"]:
            rows.append([kind, f"{verified['eps']:.4g}", percent(verified), interval(verified)])
        for found in result.get("empirical", []):
            rows.append([found["attacks"], f"{found['eps']:.4g}", percent(found), interval(found)])
        title = f"{folder}: {result['points']:,} {result['split']} points, l2, {result['precision']}"
        print_table(title, ["", "eps", "accuracy %", "95 %"], rows)
        if "rejected" in result:
            rows = [[r["data"], f"{r['eps']:.4g}", percent(r), interval(r)] for r in result["rejected"]]
            print_table(f"{folder}: rejected", ["data", "eps", "rejected %", "95 %"], rows)
        lines = [f"median certified radius {result['median_radius']:.4g}{_cost(result)}"]
        if "check" in result:
            check = result["check"]
            lines.append(
                f"{check['attacked']:,} of {check['certified']:,} certified points were attacked at their radius"
                f" ({check['passes']:,} passes, {check['seconds']:.0f} s): none fell"
            )
        lines.append(f"certificates and results: {result['folder']}")
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cost(result: dict[str, Any]) -> str:
    if "smoothing" not in result:
        return f"; certifying takes {result['relative_cost']:.2f} times as long as predicting"
    about = result["smoothing"]
    return (
        f" by randomized smoothing (sigma {about['sigma']:g}), which holds with probability {1 - about['alpha']:g} for"
        f" each point, not surely; certifying takes {about['n0'] + about['n']:,} predictions a point"
    )
