"""Write a certified classifier to an ONNX file that returns a class and the l2 radius it is certified for.

atoll export runs/digits-gloro -o digits.onnx
atoll export runs/mnist-gloro -o mnist.onnx --eps 1.58
atoll export runs/mnist-centroid -o mnist.onnx --eta 0.1

The file takes `x` (float32, any batch size, in the range of the data) and returns `prediction`, -1 if the class is not
certified at eps, and `radius`.  It is compared with the model on test points before it is written.

For Centroid Nets the radius comes from single planes: never larger than that of `atoll certify`, but it can be smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.certify.norms import BUDGET
from atoll.cli.answers import print_json
from atoll.cli.measure import add_locations, parse_checkpoint
from atoll.cli.output import error_console, print_lines, progress_bar
from atoll.runs.run import open_run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="file, such as model.onnx")
    parser.add_argument("--eps", help="l2 radius below which the file abstains (default: as trained)")
    parser.add_argument("--eta", type=float, default=0.0, help="parameter of the eta layer of Centroid Nets (0)")
    parser.add_argument("--points", type=int, default=1000, help="test points to compare on (default: 1000)")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"operations per layer's proof ({BUDGET:g})")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    add_locations(parser)
    parser.add_argument("--trust", action="store_true", help="allow runs to name classes outside Atoll")


def run(options: argparse.Namespace) -> None:
    opened = open_run(options.run_folder, trust=options.trust, data=dict(options.locations))
    if warning := opened.selection_warning(parse_checkpoint(options.checkpoint), options.weights):
        error_console.print(warning, style="yellow", markup=False, soft_wrap=True)
    with progress_bar("layers") as bar:
        task = bar.add_task("norms", total=None, note="")
        exported = opened.export(
            options.out,
            eps=options.eps,
            eta=options.eta,
            points=options.points,
            budget=options.budget,
            checkpoint=parse_checkpoint(options.checkpoint),
            weights=options.weights,
            on_layer=lambda layer: bar.update(task, advance=1, note=layer.name),
        )
    if options.json:
        print_json("export", vars(exported))
        return
    print_lines(
        f"{exported.path}: {exported.bytes:,} bytes; input x, outputs prediction (-1: abstains) and radius (l2)",
        f"agrees with the model on {exported.checked:,} test points, radii to a relative {exported.difference:.1g};"
        f" it abstains on {exported.abstained:,} of them at eps {exported.eps:.4g}",
    )
