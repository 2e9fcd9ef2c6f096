"""What trained models look at, whether the explanation is faithful, and whether it lies on the object.

atoll explain runs/digits-at
atoll explain runs/digits-standard runs/digits-at --points 200
atoll explain runs/digits-at three.png
atoll explain runs/digits-at --methods SM,BIG --checks 0

Attributions (SM, IxG, IG, SG, and BSM and BIG at the closest decision boundary), numbers and pictures are kept in
RUN/explain, those of image files in RUN/explain/images.  Explained is the predicted class.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save
from torch import Tensor

from atoll.cli.options import checkpoint
from atoll.cli.output import console, print_json, print_table, progress_bar
from atoll.curvature import Estimate
from atoll.data.base import SubSplit, sample, sample_rows, to_float
from atoll.data.boxes import boxes_of
from atoll.data.decode import decode, image_size
from atoll.distributed import default_device
from atoll.errors import InputError
from atoll.explain.attributions import ATTRIBUTIONS
from atoll.explain.boundary import BUDGET
from atoll.explain.report import Explanation, explain
from atoll.files import finite, write_atomic, write_json
from atoll.models.base import Classifier
from atoll.plots import plot_attributions
from atoll.run import Run, Which, open_run

HELP = "what trained models look at, and whether that is faithful"
SHOWN = 8  # rows of the pictures
GREY = (0.299, 0.587, 0.114)  # luma of red, green and blue (ITU-R BT.601)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN|IMAGE", help="folders of runs, and image files")
    parser.add_argument(
        "--methods", default=",".join(ATTRIBUTIONS), help=f"attributions (default: {','.join(ATTRIBUTIONS)})"
    )
    parser.add_argument("--points", type=int, default=100, help="random points of the split (default: 100)")
    parser.add_argument("--split", default="test", choices=["train", "validation", "test"])
    parser.add_argument("--norm", default="l2", choices=["linf", "l2", "l1"], help="of boundary distances (l2)")
    parser.add_argument("--budget", type=int, help=f"model calls per point of the boundary search (default: {BUDGET})")
    parser.add_argument(
        "--pool", type=int, default=1000, help="training examples that the search may start from (default: 1000)"
    )
    parser.add_argument("--sigma", type=float, default=0.1, help="of the noise of INFD (default: 0.1)")
    parser.add_argument("--radius", type=float, default=0.1, help="l2 ball of the Lipschitz estimates (default: 0.1)")
    parser.add_argument(
        "--checks", type=int, default=16, metavar="N",
        help="points of the sanity check and of the Lipschitz estimates, which cost most (default: 16, 0 for none)",
    )  # fmt: skip
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows at a time (default: 256)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: RUN/explain)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", action="store_true", help="allow runs to name classes outside Atoll")


@dataclass(frozen=True)
class Inputs:
    """What is explained: images, their titles, and what is known about them."""

    x: Tensor
    titles: list[str]
    labels: Tensor | None
    boxes: Tensor | None
    words: list[str]  # what was done to them


def run(options: argparse.Namespace) -> int:
    for name, least in (("points", 1), ("pool", 0), ("checks", 0), ("batch_size", 1)):
        if getattr(options, name) < least:
            raise InputError(f"--{name.replace('_', '-')}: expected at least {least}, got {getattr(options, name)}")
    methods = options.methods.split(",")
    if unknown := [name for name in methods if name not in ATTRIBUTIONS]:
        raise InputError(f"--methods: expected some of {', '.join(ATTRIBUTIONS)}, got {', '.join(unknown)}")
    which = checkpoint(options.checkpoint)
    images = [path for path in options.paths if path.is_file()]
    runs = [open_run(path, trust=options.trust) for path in options.paths if path not in images]
    if not runs:
        raise InputError(f"RUN: expected the folder of a run, got only files: {', '.join(map(str, images))}")
    if options.out is not None and len(runs) > 1:
        raise InputError("--out: expected one run, got several")
    results, found, inputs = {}, {}, {}
    with progress_bar("") as bar:
        for run in runs:
            name = str(run.folder)
            model = run.model(which, options.weights).to(default_device())
            inputs[name] = _from_files(images, model) if images else _from_split(run, options)
            found[name] = _explain(run, model, inputs[name], methods, options, bar)
            results[name] = _keep(run, which, found[name], inputs[name], options)
    if len(runs) > 1:
        _side_by_side(found, inputs, results)
    if options.json:
        print_json(results)
    else:
        _show(results)
    return 0


def _from_split(run: Run, options: argparse.Namespace) -> Inputs:
    whole = run.data.split(options.split)
    if not len(whole):
        raise InputError(f"--split: the run holds no points back for {options.split}")
    split = SubSplit(whole, sample_rows(whole, options.points, "explain", options.split, options.seed))
    x = to_float(split.fetch(torch.arange(len(split))))
    return Inputs(x, [str(run.data.classes[label]) for label in split.labels], split.labels, boxes_of(split), [])


def _from_files(paths: list[Path], model: Classifier) -> Inputs:
    """Image files as the model wants them."""
    shape = model.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise InputError(f"IMAGE: the model takes inputs of {shape}, not square images")
    channels, size = shape[0], shape[1]
    rows, words = [], []
    for path in paths:
        width, height = image_size(path)
        if (width, height) != (size, size):
            words.append(f"{path.name}: {width} x {height} pixels, resized and cut to {size} x {size}")
        pixels = to_float(decode(path, str(path), resize=None if (width, height) == (size, size) else size, size=size))
        if channels == 1:
            pixels = (pixels * pixels.new_tensor(GREY)[:, None, None]).sum(0, keepdim=True)
        rows.append(pixels.clamp(0, 1))
    return Inputs(torch.stack(rows), [path.name for path in paths], None, None, words)


def _explain(
    run: Run, model: Classifier, inputs: Inputs, methods: list[str], options: argparse.Namespace, bar: Progress
) -> Explanation:
    task = bar.add_task(str(run.folder), total=None, note="")
    device = default_device()
    pool = None
    if options.pool:
        pool = sample(run.data.split("train"), options.pool, "explain", "pool", options.seed)[0].to(device)
    found = explain(
        model,
        inputs.x.to(device),
        methods=methods,
        pool=pool,
        boxes=inputs.boxes,
        norm=options.norm,
        budget=options.budget,
        bounds=run.data.bounds,
        sigma=options.sigma,
        eps=options.radius,
        check_points=options.checks,
        batch_size=options.batch_size,
        seed=options.seed,
        on_progress=lambda what, done, total: bar.update(task, completed=int(done), total=total, note=what),
    )
    bar.remove_task(task)
    return found


def _keep(run: Run, which: Which, found: Explanation, inputs: Inputs, options: argparse.Namespace) -> dict[str, Any]:
    """Numbers, attributions and picture into the run's folder; returns the numbers."""
    folder = options.out or run.folder / "explain" / ("images" if inputs.labels is None else "")
    names = [str(name) for name in run.data.classes]
    result: dict[str, Any] = {
        "run": str(run.folder),
        "checkpoint": run.checkpoint_path(which, options.weights).name,
        "weights": options.weights,
        "split": None if inputs.labels is None else options.split,
        "images": inputs.titles if inputs.labels is None else None,
        "points": len(found.x),
        "predictions": [names[label] for label in found.target.tolist()],
        "other": [names[label] for label in found.boundary.other.tolist()],
        "sigma": options.sigma,
        "radius": options.radius,
        "checks": options.checks,
        "seed": options.seed,
        "folder": str(folder),
        "torch": torch.__version__,
        "words": [*inputs.words, *([found.boundary.words] if found.boundary.words else [])],
        **found.to_json(),
    }
    result = finite(result)
    tensors = {f"attributions/{name}": method.attributions for name, method in found.methods.items()}
    tensors |= {name: getattr(found.boundary, name) for name in ("x", "inside", "across", "distance", "prediction")}
    if inputs.labels is not None:
        tensors["label"] = inputs.labels
    content = {name: values.cpu().contiguous() for name, values in tensors.items()}
    write_atomic(folder / "attributions.safetensors", save(content))
    write_json(folder / "explain.json", result)
    if found.x.dim() == 4:
        maps = {name: method.attributions for name, method in found.methods.items()}
        _picture(folder / "attributions.png", inputs, maps, result["predictions"])
    return result


def _picture(path: Path, inputs: Inputs, maps: dict[str, Tensor], predictions: list[str] | None = None) -> None:
    """The first rows that every map is defined for."""
    defined = torch.stack([~values.flatten(1).isnan().any(1).cpu() for values in maps.values()]).all(0)
    rows = defined.nonzero().squeeze(1)[:SHOWN]
    if not len(rows):
        return
    titles = [inputs.titles[row] for row in rows]
    if predictions is not None:
        titles = [f"{title}, seen as {predictions[row]}" for title, row in zip(titles, rows.tolist(), strict=True)]
    boxes = None if inputs.boxes is None else inputs.boxes[rows]
    shown = {name: values.cpu()[rows] for name, values in maps.items()}
    plot_attributions(inputs.x[rows], shown, boxes, titles).savefig(path, dpi=120)


def _side_by_side(found: dict[str, Explanation], inputs: dict[str, Inputs], results: dict[str, dict[str, Any]]) -> None:
    """All models in one picture, if they explain the same images."""
    first = next(iter(found))
    x = found[first].x
    if x.dim() != 4 or any(other.x.shape != x.shape or not torch.equal(other.x, x) for other in found.values()):
        return
    maps = {
        f"{name}, {Path(folder).name}": explanation.methods[name].attributions
        for name in found[first].methods
        for folder, explanation in found.items()
    }
    path = Path(results[first]["folder"]) / "side-by-side.png"
    _picture(path, inputs[first], maps)
    results[first]["side_by_side"] = str(path)


def _show(results: dict[str, dict[str, Any]]) -> None:
    """One table for each question, all runs in it; then what there is to say about each run."""
    rows = []
    for folder, result in results.items():
        boundary = result["boundary"]
        distance = {"value": boundary["mean_distance"], "standard_error": boundary["standard_error"]}
        apart = [_number(result["distances"].get(pair)) for pair in ("SM-BSM", "IG-BIG")]
        rows.append([folder, _number(distance), f"{100 * boundary['success']:.1f}", *apart])
    first = next(iter(results.values()))
    points = f"{first['points']:,} " + (f"{first['split']} points" if first["split"] else "images")
    columns = ["", f"distance ({first['boundary']['norm']})", "found %", "SM-BSM", "IG-BIG"]
    print_table(f"decision boundary, {points}", columns, rows)
    methods = {
        name if len(results) == 1 else f"{name}, {Path(folder).name}": results[folder]["methods"][name]
        for name in first["methods"]
        for folder in results
    }
    _faithfulness(methods, first)
    if any("locality" in method for method in methods.values()):
        places = ("precision", "recall", "f1")
        rows = [
            [name, *(_number(method.get("locality", {}).get(place)) for place in places)]
            for name, method in methods.items()
        ]
        print_table("locality: on the object", ["", "precision", "recall", "F1"], rows)
    for folder, result in results.items():
        for line in _lines(folder, result):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _faithfulness(methods: dict[str, dict[str, Any]], first: dict[str, Any]) -> None:
    rows = []
    for name, method in methods.items():
        infidelity = method["infidelity"]
        cells = [infidelity["value"], infidelity["scaled"], method.get("completeness_gap")]
        rows.append([name, *map(_number, cells)])
    columns = ["", f"INFD, sigma {first['sigma']:g}", "at best scale", "completeness gap"]
    print_table("faithfulness", columns, rows)
    if first["checks"]:
        rows = []
        for name, method in methods.items():
            sanity = method["sanity"]
            after = _number(sanity["layers"][-1]["correlation"])
            passed = "passed" if sanity["passed"] else "NOT passed"
            rows.append([name, after, passed, _number(method["lipschitz_at_least"])])
        columns = ["", "rank correlation", "sanity check", f"Lipschitz at least (l2 {first['radius']:g})"]
        print_table(f"with random layers, and close by; {first['checks']} points", columns, rows)


def _lines(folder: str, result: dict[str, Any]) -> list[str]:
    boundary = result["boundary"]
    calls = (boundary["forward"] + boundary["backward"]) / boundary["points"]
    found = ", ".join(f"{count} by {name}" for name, count in boundary["methods"].items())
    lines = [f"{folder}: {calls:.0f} model calls per point for the boundary; {found}", *result["words"]]
    if result["images"]:
        columns = (result["images"], result["predictions"], boundary["distance"], result["other"])
        for name, prediction, distance, other in zip(*columns, strict=True):
            lines.append(f"{name}: {prediction}" + ("" if distance is None else f"; {other} at {distance:.4g}"))
    lines.append(f"attributions, numbers and pictures: {result['folder']}")
    if "side_by_side" in result:
        lines.append(f"side by side: {result['side_by_side']}")
    return lines


def _number(estimate: dict[str, Any] | None) -> str:
    """``1.23 ± 0.06`` from an estimate's JSON, ``-`` if there is none."""
    if estimate is None or estimate["value"] is None:
        return "-"
    return str(Estimate(estimate["value"], estimate["standard_error"] or 0.0))
