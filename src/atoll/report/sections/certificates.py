"""Certified accuracy against the radius, and how it was proven."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atoll.certify.measure import CertifyResult
from atoll.report.blocks import Block, Callout, Collapsible, Plot, Row, Section, TableCell, Title
from atoll.report.compare import Comparison, compare, notes
from atoll.report.figures import PERCENT, chart, curve
from atoll.report.run_summary import RunSummary
from atoll.report.text import accuracy, digits, plain

ORDER, KINDS = 30, ("certify",)
NAMED = ("eps", "precision", "smooth", "samples", "alpha")
# Certificates do not depend on the attacks that try to refute them, nor on the radii that the table lists.
ATTACKS = ("eps", "attacks", "attack", "check", "reject")


def _describe(result: CertifyResult) -> str:
    settings = result.settings
    if result.is_probabilistic:
        return f"Randomized smoothing, sigma {digits(settings.smooth)}, {settings.samples:,} samples"
    return f"Proven in {plain(settings.precision)}"


_compare = partial(compare, kind=CertifyResult, describe=_describe, named=NAMED)


def summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    results = [result for run in runs for result in run.current(CertifyResult)]
    radii = sorted({row.eps for result in results for row in result.verified if row.eps == row.eps})
    return [row for eps in radii for row in _verified_rows(runs, eps, checkpoint)]


def _verified_rows(runs: Sequence[RunSummary], eps: float, checkpoint: str) -> list[Row]:
    comparisons = _compare(
        runs, ignore=lambda result: ATTACKS, where=lambda result: eps in _verified(result), checkpoint=checkpoint
    )
    name = f"Verified accuracy (VRA) at l2 {digits(eps)}"
    return [comparison.row(runs, name, lambda result: _verified(result)[eps]) for comparison in comparisons]


def _verified(result: CertifyResult) -> dict[float, TableCell]:
    note = f"each certificate is false with probability at most {digits(result.settings.alpha)}"
    return {row.eps: accuracy(row.accuracy, note if result.is_probabilistic else "proven") for row in result.verified}


def section(runs: Sequence[RunSummary]) -> Section:
    blocks: list[Block] = []
    for place, comparison in enumerate(_compare(runs, ignore=lambda result: ATTACKS)):
        traces = []
        for run, result in comparison.results:
            points = zip(result.curve.get("radius", ()), result.curve.get("verified", ()), strict=False)
            # Between two radii, at least what holds at the larger one is certified.
            traces.append(curve(run.name, [(r, 100 * v) for r, v in points], run.number, shape="vh", unit=" %"))
        figure = chart(traces, "radius (l2)", "certified accuracy in %", {"range": PERCENT}, height=400)
        blocks.append(Plot(f"certificates-{place}", "Certified accuracy", figure, comparison.title))
    for comparison in _compare(runs):
        blocks += _details(comparison)
    return Section("certificates", "Certificates", [*notes(runs, "certificates"), *blocks])


def _details(comparison: Comparison[CertifyResult]) -> list[Block]:
    settings = comparison.first.settings
    blocks: list[Block] = [Title(comparison.title, f"l2 {plain(settings.eps)}")]
    if comparison.first.is_probabilistic:
        message = (
            f"Each certificate is false with probability at most {digits(settings.alpha)}."
            " The certificates are about the smoothed classifier, not about the network itself."
        )
        blocks.append(Callout("certificates", "Probabilistic, not proven", message))
    layers = Collapsible("Lipschitz bounds of the layers", comparison.table(_layers, "layer"))
    return [*blocks, *comparison.table(_cells), layers]


def _cells(result: CertifyResult) -> dict[str, str | TableCell]:
    cells: dict[str, str | TableCell] = {"clean accuracy": accuracy(result.clean)}
    cells |= {f"verified accuracy at l2 {digits(eps)}": cell for eps, cell in _verified(result).items()}
    for row in result.empirical:
        cells[f"robust accuracy at l2 {digits(row.eps)} ({plain(row.attacks)})"] = accuracy(row.accuracy)
    for rejection in result.rejected:
        cells[f"rejected at l2 {digits(rejection.eps)}: {plain(rejection.data)}"] = accuracy(rejection.share)
    cells["median certified radius"] = digits(result.median_radius)
    if result.lipschitz is not None:
        cells["Lipschitz bound"] = digits(result.lipschitz)
    if result.relative_cost is not None:
        cells["cost relative to a prediction"] = digits(result.relative_cost)
    if not result.is_probabilistic:
        cells["attacked at the certified radius"] = _check(result)
    return cells


def _check(result: CertifyResult) -> str | TableCell:
    if result.check is None:
        return TableCell("not attacked", "--no-attack", "absent")
    return TableCell("no certificate was broken", f"{result.check.attacked:,} of {result.check.certified:,} points")


def _layers(result: CertifyResult) -> dict[str, str | TableCell]:
    """Bounds with what the layer is and how its bound was proven."""
    return {
        plain(layer.name): TableCell(digits(layer.lipschitz), f"{plain(layer.kind)}; {plain(layer.method)}")
        for layer in result.layers
        if layer.method != "known"
    }
