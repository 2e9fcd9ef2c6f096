"""Certify predictions: prove an l2 radius within which each of them cannot change.

The command reports the verified accuracy at one or more radii. It also attacks certified points at their radius and
fails if a prediction changes.

With --smooth, it certifies any model by randomized smoothing, which predicts the most frequent class under Gaussian
noise. Each of these certificates is false with probability at most alpha, so they are not attacked.

For a Centroid Net, it also reports the radii that hold for all inputs, the share of points that the eta layer accepts,
and prototypes of the first points.

--proof writes the certificates to a file that `atoll check` verifies independently. --reject reports how often the
model abstains on noise or on another data set.

Results are stored in RUN/results. Rerun the same command to show them again, or to resume it.

Examples:
  atoll certify runs/digits-gloro
  atoll certify runs/mnist-gloro --eps 0.3,1.58 --points 1000
  atoll certify runs/mnist-gloro --no-attack --proof mnist.safetensors
  atoll certify runs/mnist-centroid --eta 0.1 --reject noise --reject FashionMNIST
  atoll certify runs/digits-smoothing --smooth 0.25 --samples 10000
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.cli.measure import add_flags, measure_runs
from atoll.cli.output import error_console, print_lines, print_table
from atoll.cli.values import path
from atoll.errors import InputError
from atoll.stats import percent_interval

if TYPE_CHECKING:
    from atoll.certify.measure import CertifyResult


def show(results: Mapping[str, CertifyResult]) -> None:
    for folder, result in results.items():
        layers = [layer for layer in result.layers if layer.method != "known"]
        if layers:
            rows = [[layer.name, layer.kind, f"{layer.lipschitz:.4f}", layer.method] for layer in layers]
            print_table(f"{folder}: Lipschitz constants", ["layer", "kind", "at most", "proof"], rows)
        table = result.table()
        title = f"{folder}: {result.points:,} {result.settings.split} points, l2, {result.settings.precision}"
        print_table(title, table.columns, table.rows)
        if result.rejected:
            rows = [[r.data, f"{r.eps:.4g}", *percent_interval(r.share)] for r in result.rejected]
            print_table(f"{folder}: rejected", ["data", "eps", "rejected %", "95 %"], rows)
        print_lines(*_lines(result))


def _lines(result: CertifyResult) -> list[str]:
    settings, lines = result.settings, [f"median certified radius {result.median_radius:.4g}"]
    if result.is_probabilistic:
        lines.append(
            f"by randomized smoothing with sigma {settings.smooth:g} and {settings.samples:,} samples; each certificate"
            f" holds with probability {1 - settings.alpha:g}"
        )
    if result.relative_cost is not None:
        lines.append(f"certifying takes {result.relative_cost:.2f} times as long as predicting")
    if (centroids := result.centroids) is not None:
        share, interval = percent_interval(centroids.coverage)
        lines += [
            f"centroids of different classes are at least {centroids.separation:.4g} apart",
            f"eta {settings.eta:g} accepts {share} % of the points ({interval}): the coverage",
            f"inputs within {centroids.global_radius:.4g} of each other are never accepted in different classes",
            f"the class of an accepted input does not change within {centroids.local_radius:.4g}",
            f"prototypes of the first {len(centroids.prototypes)} points have features within"
            f" {max(centroids.prototypes):.4g} of their centroids",
        ]
    if (check := result.check) is not None:
        lines.append(
            f"{check.attacked:,} of {check.certified:,} certified points were attacked at their radius"
            f" ({check.passes:,} passes, {check.seconds:.0f} s): no prediction changed"
        )
    return [*lines, f"certificates and results: {result.folder}"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "certify")
    parser.add_argument("--proof", type=path, metavar="FILE", help="write a proof file for `atoll check`")


def run(options: argparse.Namespace) -> None:
    from atoll.distributed import is_main
    from atoll.runs.run import open_run

    if options.proof is not None and len(options.runs) > 1:
        raise InputError(f"--proof: expected one run, got {len(options.runs)}")
    results = measure_runs(options, "certify", show)
    if options.proof is not None and is_main():
        (result,) = results.values()
        opened = open_run(options.runs[0], trust=options.trust, data=dict(options.locations))
        proof = opened.write_proof(options.proof, result)
        error_console.print(
            f"{proof.path}: {proof.claims:,} claims of {proof.points:,} points, {proof.bytes:,} bytes",
            markup=False,
            soft_wrap=True,
        )
