"""How flat the loss is: index by layer and over time, eigenvalues, bounds, landscapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.curvature.landscape import Landscape
from atoll.curvature.measure import CurvatureResult
from atoll.curvature.spectrum import Density
from atoll.errors import DataError
from atoll.report.blocks import Block, Collapsible, Columns, Plot, Row, Section, TableCell, Title
from atoll.report.compare import Comparison, compare, notes
from atoll.report.figures import LossScale, Trace, bars, chart, common_ranges, contour, curve, surface
from atoll.report.run_summary import RunSummary
from atoll.report.sections.training import POINTS, curves, series
from atoll.report.text import digits, estimate, plain

ORDER, KINDS = 40, ("curvature",)
NAMED = ("loss", "norm", "eps")
DEPENDS_ON = (*POINTS, ("loss",), ("threat",), ("attack",), ("methods",))  # of the index during training
MOST = 50_000  # numbers of one array to draw
OVER = {"weights": "over the weights, along two random directions", "input": "over the inputs (cross-entropy)"}
BOUNDS = {
    "risk": "loss", "kl": "KL", "linear": "linear bound", "catoni": "Catoni bound", "kl_inverse": "kl-inverse bound",
    "square_root": "square-root bound",
}  # fmt: skip


def _describe(result: CurvatureResult) -> str:
    at = plain(result.settings.threat) if result.attacked else "clean inputs"
    return f"{plain(result.loss).removesuffix('()')} at {at}"


def _index_ignores(result: CurvatureResult) -> Collection[str]:
    """Settings that the index does not depend on: other outputs, and the attack of a loss that uses none."""
    return ("top", "density", "gap", "proof", "landscape", *(() if result.attacked else ("norm", "eps", "steps")))


_compare = partial(compare, kind=CurvatureResult, describe=_describe, named=NAMED)


def summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    indices = _compare(runs, ignore=_index_ignores, checkpoint=checkpoint)
    others = ("top", "density", "landscape", "gap")
    gaps = _compare(
        runs, ignore=lambda result: others, where=lambda result: result.gap is not None, checkpoint=checkpoint
    )
    rows = [each.row(runs, "Weight-Curvature Index (WCI)", lambda result: estimate(result.wci)) for each in indices]
    return rows + [each.row(runs, "Robust gap (test − train error)", _gap) for each in gaps]


def _gap(result: CurvatureResult) -> TableCell:
    return estimate(None if result.gap is None else result.gap.error, scale=100, form=".1f", unit=" points")


def section(runs: Sequence[RunSummary]) -> Section:
    plots: list[Block] = [_by_layer(each, place) for place, each in enumerate(_compare(runs, ignore=_index_ignores))]
    plots += _densities(runs)
    note = "Error bars are standard errors."
    plots += curves(runs, "curvature-time", "WCI during training", _over_time, DEPENDS_ON, "WCI", note)
    blocks: list[Block] = [Columns(plots), *_landscapes(runs)]
    for comparison in _compare(runs):
        blocks += [Title("Weight-Curvature Index", comparison.title), *comparison.table(_cells)]
        blocks.append(Collapsible("Layers", comparison.table(_layers, "weight matrix")))
        blocks.append(Collapsible("PAC-Bayes bounds", comparison.table(_bounds)))
    return Section("curvature", "Curvature", [*notes(runs, "curvature"), *blocks])


def _by_layer(comparison: Comparison[CurvatureResult], place: int) -> Plot:
    terms = {
        (run.name, run.number): [(plain(layer.name), layer.term) for layer in result.layers]
        for run, result in comparison.results
    }
    bar = "Each bar is the norm of a weight matrix times the root of its Hessian trace. The WCI is the sum."
    note = f"{comparison.title}. {bar}"
    return Plot(f"curvature-layers-{place}", "Curvature by layer", bars(terms, "term of the WCI"), note)


def _over_time(run: RunSummary) -> list[Trace]:
    points, errors = series(run, "wci"), dict(series(run, "wci_standard_error"))
    return [curve(run.name, points, run.number, errors=[errors.get(epoch) for epoch, _ in points])] if points else []


def _densities(runs: Sequence[RunSummary]) -> list[Block]:
    plots: list[Block] = []
    comparisons = _compare(runs, ignore=_index_ignores, where=lambda result: result.settings.density)
    for place, comparison in enumerate(comparisons):
        traces = []
        for run, density in comparison.load("curvature", "density.npz", _density):
            grid, height = density.smooth()
            points = [(x, y + 1e-8) for x, y in zip(grid.tolist(), height.tolist(), strict=True)]
            traces.append(curve(run.name, points, run.number))
        figure = chart(traces, "eigenvalue", "density", {"type": "log", "exponentformat": "e"})
        plot = Plot(f"curvature-density-{place}", "Eigenvalues of the Hessian", figure, comparison.title)
        plots += [plot] if traces else []
    return plots


def _landscapes(runs: Sequence[RunSummary]) -> list[Block]:
    """Landscapes of one loss at the same points side by side, with common axes and colors."""
    blocks: list[Block] = []
    others = ("top", "density", "gap")
    named = (*NAMED, "landscape")
    comparisons = _compare(runs, named=named, ignore=lambda r: others, where=lambda r: r.settings.landscape is not None)
    for place, comparison in enumerate(comparisons):
        over = comparison.first.settings.landscape or "weights"
        landscapes = comparison.load("curvature", f"landscape-{over}.npz", _landscape)
        if not landscapes:
            continue
        ranges = common_ranges([landscape for _, landscape in landscapes])
        scale = "logarithmic scale of the loss, " if LossScale(*ranges[2]).is_log else ""
        blocks.append(Title(f"Loss {OVER[over]}", f"{comparison.title}; {scale}same axes for all runs"))
        for run, landscape in landscapes:
            i, figures = run.number, (surface(landscape, ranges), contour(landscape, ranges))
            left = Plot(f"landscape-{place}-{i}", run.name, figures[0], "Drag to rotate.", i)
            blocks.append(Columns([left, Plot(f"contour-{place}-{i}", f"{run.name}, from above", figures[1], run=i)]))
    return blocks


def _landscape(path: Path) -> Landscape:
    landscape = Landscape.load(path)
    _check_drawable(landscape.a.numpy(), landscape.b.numpy())
    finite = landscape.loss[landscape.loss.isfinite()].numpy()
    _check_drawable(finite if finite.size else landscape.loss.numpy())
    return landscape


def _density(path: Path) -> Density:
    density = Density.load(path)
    _check_drawable(density.eigenvalues, density.weights)
    return density


def _check_drawable(*arrays: NDArray[Any]) -> None:
    if not all(array.size and np.isfinite(array).all() for array in arrays):
        raise DataError("expected finite numbers")
    if (size := max(array.size for array in arrays)) > MOST:
        raise DataError(f"{size:,} numbers are too many to draw")


def _cells(result: CurvatureResult) -> dict[str, str | TableCell]:
    cells: dict[str, str | TableCell] = {
        "WCI": estimate(result.wci),
        "upper bound of the WCI": digits(result.bound),
        "norm of the weights": digits(result.weight_norm),
        "root of the sum of traces": digits(result.root_trace),
        "Hessian trace": estimate(result.trace, f"{plain(result.estimator)}, {result.probes:,} probes"),
        "reason for the estimator": plain(result.reason),
        "mean loss": digits(result.mean_loss),
    }
    if result.negative:
        cells["negative traces, counted as zero"] = f"{result.negative:,}"
    if result.unresolved:
        cells["traces that may be zero"] = plain(", ".join(result.unresolved))
    if result.theorem is not None:
        terms = digits(result.theorem.divergence), digits(result.theorem.variability), digits(result.theorem.constant)
        cells["bound on the gap (WCI, Theorem 2.5)"] = "KL {} + variability {} + constant {}".format(*terms)
    if result.eigenvalues:
        cells["largest eigenvalues"] = ", ".join(map(digits, result.eigenvalues[:20]))
    if result.gap is not None:
        cells["robust gap: error, test − train"] = _gap(result)
        cells["robust gap: loss, test − train"] = estimate(result.gap.loss)
    return cells


def _layers(result: CurvatureResult) -> dict[str, str | TableCell]:
    return {
        plain(layer.name): TableCell(
            f"{digits(layer.term)} ({digits(100 * layer.share)} %)",
            f"norm {digits(layer.norm)}; trace {estimate(layer.trace).text}, {estimate(layer.trace).note}",
        )
        for layer in result.layers
    }


def _bounds(result: CurvatureResult) -> dict[str, str | TableCell]:
    """PAC-Bayes bounds, each with a note on whether it is vacuous."""
    cells: dict[str, str | TableCell] = {}
    for bounds in result.pac_bayes:
        posterior = f"{plain(bounds.posterior)} posterior"
        cells[posterior] = plain(bounds.message)
        cells |= {f"{posterior}: {name}": digits(getattr(bounds, key)) for key, name in BOUNDS.items()}
    for proof in result.proofs:
        cells[f"{plain(proof.posterior)} posterior: proof"] = plain(proof.message)
    return cells
