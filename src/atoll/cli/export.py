"""Write a trained classifier to an ONNX file for other programs, with its class names and preprocessing.

atoll export runs/digits-at -o digits.onnx
atoll export runs/digits-gloro -o digits.onnx
atoll export runs/mnist-gloro -o mnist.onnx --eps 1.58
atoll export runs/mnist-centroid -o mnist.onnx --eta 0.1
atoll export runs/digits-gloro -o digits.onnx --no-certify

The file takes `x` (float32, any batch size, in the range of the data) and returns `logits` and `label`.  If the run was
trained for certificates, or with --eps, it also returns `prediction` (the label, or -1 if it is not certified at eps)
and `radius` (l2).  The file is compared with the model on test points before it is written.

For Centroid Nets the radius comes from single planes: never larger than that of `atoll certify`, but it can be smaller.
"""

from __future__ import annotations

import argparse

from atoll.cli.answers import print_json
from atoll.cli.index import look_up
from atoll.cli.measure import add_locations, parse_checkpoint
from atoll.cli.output import error_console, print_lines, progress_bar
from atoll.cli.values import number, path, whole_number


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=path, required=True, metavar="FILE", help="file, such as model.onnx")
    certify = "write certificates (default: if the run was trained for them, or with --eps or --eta)"
    parser.add_argument("--certify", action=argparse.BooleanOptionalAction, default=None, help=certify)
    parser.add_argument("--eps", help="l2 radius below which the file abstains (default: as trained)")
    parser.add_argument("--eta", type=number, default=0.0, help="parameter of the eta layer of Centroid Nets (0)")
    parser.add_argument("--points", type=whole_number, default=1000, help="test points to compare on (default: 1000)")
    budget = look_up("constants", "atoll.certify.norms.BUDGET")
    parser.add_argument("--budget", type=number, default=budget, help=f"operations per layer's proof ({budget:g})")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--weights", default="raw", help="raw, or an average such as swa (default: raw)")
    add_locations(parser)
    parser.add_argument("--trust", action="store_true", help="allow runs to name classes outside Atoll")


def run(options: argparse.Namespace) -> None:
    from atoll.runs.run import open_run

    opened = open_run(options.run_folder, trust=options.trust, data=dict(options.locations))
    with progress_bar("layers") as bar:
        task = bar.add_task("norms", total=None, note="")
        exported = opened.export(
            options.out,
            certify=options.certify,
            eps=options.eps,
            eta=options.eta,
            points=options.points,
            budget=options.budget,
            checkpoint=parse_checkpoint(options.checkpoint),
            weights=options.weights,
            on_layer=lambda layer: bar.update(task, advance=1, note=layer.name),
        )
    if exported.warning:
        error_console.print(exported.warning, style="yellow", markup=False, soft_wrap=True)
    if options.json:
        print_json("export", vars(exported))
        return
    outputs = ", ".join(exported.outputs)
    print_lines(f"{exported.path}: {exported.bytes:,} bytes; input x, outputs {outputs}")
    if exported.eps is None:
        print_lines(
            f"agrees with the model on {exported.checked:,} test points, logits to {exported.difference:.1g} of the"
            " largest"
        )
    else:
        print_lines(
            f"agrees with the model on {exported.checked:,} test points, radii to a relative {exported.difference:.1g};"
            f" it abstains (prediction -1) on {exported.abstained:,} of them at eps {exported.eps:.4g}"
        )
