"""Write a certified classifier to an ONNX file that answers with a class and the radius (l2) it is proven for.

atoll export runs/digits-gloro -o digits.onnx
atoll export runs/mnist-gloro -o mnist.onnx --eps 1.58

The file takes `x` (float32, any batch size, in the range of the data) and gives `prediction`, -1 where it cannot
promise the class within eps, and `radius`.  It is compared with the original on test points before it is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from atoll.certify.export import export
from atoll.certify.families import certifier_for
from atoll.certify.norms import BUDGET
from atoll.cli.options import checkpoint, trained_radius
from atoll.cli.output import console, print_json, progress_bar
from atoll.data.base import to_float
from atoll.errors import InputError
from atoll.run import open_run
from atoll.threat import ThreatModel

HELP = "certified models as ONNX files"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="such as model.onnx")
    parser.add_argument("--eps", help="l2 radius below which it abstains (default: as trained)")
    parser.add_argument("--points", type=int, default=1000, help="test points to compare on (default: 1000)")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"operations per layer's proof ({BUDGET:g})")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    parser.add_argument("--trust", action="store_true", help="allow runs to name classes outside Atoll")


def run(options: argparse.Namespace) -> int:
    if options.points < 1:
        raise InputError(f"--points: expected at least 1, got {options.points}")
    which = checkpoint(options.checkpoint)
    if options.out.is_dir():
        raise InputError(f"--out: expected a file, got the folder {options.out}")
    opened = open_run(options.run_folder, trust=options.trust)
    eps = ThreatModel("l2", options.eps).radius if options.eps is not None else trained_radius(opened, "radius is")
    model = opened.model(which, options.weights).double()
    split = opened.data.split("test")
    x = to_float(split.fetch(torch.arange(min(options.points, len(split)))))
    with progress_bar("layers") as bar:
        task = bar.add_task("norms", total=None, note="")
        certifier = certifier_for(
            model, budget=options.budget, on_layer=lambda layer: bar.update(task, advance=1, note=layer.name)
        )
        bar.update(task, description="export")
        found = export(certifier, x, options.out, eps=eps)
    if options.json:
        print_json(vars(found))
        return 0
    lines = [
        f"{found.path}: {found.bytes:,} bytes; input x, outputs prediction (-1: abstains) and radius (l2)",
        f"the same as the model on {found.checked:,} test points, radii to a relative {found.difference:.1g};"
        f" it abstains on {found.abstained:,} of them at eps {found.eps:.4g}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
