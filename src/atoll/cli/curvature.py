"""Measure how flat the loss of trained models is around their weights.

The command reports the Hessian trace of every layer with its standard error, the Weight-Curvature Index (WCI), the
largest eigenvalues and PAC-Bayes bounds. Options add the robust generalization gap, the density of all eigenvalues and
loss landscapes.

To compare models, use the same --loss for all of them. Results and figures are stored in RUN/results. Rerun the same
command to show them again.

Examples:
  atoll curvature runs/digits-at
  atoll curvature runs/digits-standard runs/digits-at --loss AT
  atoll curvature runs/digits-at --points 1000 --relative-error 0.02 --top 10 --gap
  atoll curvature runs/digits-at --landscape weights
  torchrun --nproc-per-node 4 -m atoll curvature runs/digits-at
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import print_lines, print_table

if TYPE_CHECKING:
    from atoll.curvature.measure import CurvatureResult


def show(results: Mapping[str, CurvatureResult]) -> None:
    for folder, result in results.items():
        rows = []
        for layer in result.layers:
            trace = [f"{layer.trace.value:.4g}", f"{layer.trace.standard_error:.2g}"]
            rows.append([layer.name, f"{layer.norm:.4g}", *trace, f"{layer.term:.4g}", f"{100 * layer.share:.1f}"])
        where = result.settings.threat if result.attacked else "clean inputs"
        title = f"{folder}: {result.loss} at {result.points:,} {result.settings.split} points, {where}"
        print_table(title, ["weight matrix", "norm", "trace", "± error", "norm √trace", "% of WCI"], rows)
        print_lines(*_lines(result))
    if len({result.loss for result in results.values()}) > 1:
        text = "These numbers belong to different losses and cannot be compared; use the same --loss for all runs."
        print_lines(text, style="yellow")


def _lines(result: CurvatureResult) -> list[str]:
    lines = [
        f"WCI {result.wci}, at most {result.bound:.4g} = weight norm {result.weight_norm:.4g}"
        f" x root of the traces {result.root_trace:.4g}",
        f"trace of the whole Hessian {result.trace}, by {result.estimator} ({result.reason}), {result.probes} probes",
    ]
    if result.negative:
        lines.append(f"{result.negative} traces were negative and count as zero")
    if result.unresolved:
        lines.append(
            f"not resolved: the traces of {', '.join(result.unresolved)} may be zero; their share of the index is"
            " uncertain (raise --max-probes)"
        )
    if result.theorem is not None:
        theorem = result.theorem
        lines.append(
            f"bound on the gap (WCI, Theorem 2.5): KL {theorem.divergence:.4g} + variability {theorem.variability:.4g}"
            f" + constant {theorem.constant:.4g} at lambda {theorem.lambda_:.4g}"
        )
    if result.eigenvalues:
        lines.append(f"largest eigenvalues {', '.join(f'{value:.4g}' for value in result.eigenvalues)}")
    for bound in result.pac_bayes:
        lines.append(
            f"PAC-Bayes, {bound.posterior} posterior: loss {bound.risk:.4g}; with noise {bound.expansion:.4g} to second"
            f" order, {bound.noisy} by Monte Carlo; KL {bound.kl:.4g}; bounds: linear {bound.linear:.4g}, Catoni"
            f" {bound.catoni:.4g}, kl-inverse {bound.kl_inverse:.4g}, square root {bound.square_root:.4g};"
            f" {bound.message}"
        )
    for proof in result.proofs:
        lines.append(f"PAC-Bayes proof, {proof.posterior} posterior, {proof.draws} draws: {proof.message}")
    if result.gap is not None:
        lines.append(f"robust gap, test minus train: error {result.gap.error}, loss {result.gap.loss}")
    return [*lines, f"results and figures: {result.folder}"]


arguments = partial(add_flags, kind="curvature")
run = partial(run_measurement, kind="curvature", show=show)
