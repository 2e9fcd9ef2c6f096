"""How flat the model is: index by layer and over time, eigenvalues, bounds, landscapes."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report.blocks import Block, Cell, Fold, Plot, Section, Side, Table, Title, Words
from atoll.report.figures import bars, chart, contour, curve, surface
from atoll.report.read import Reading
from atoll.report.sections.shared import about, alarms, each, lacking, loss_at
from atoll.report.values import digits, entries, get, measured, number, plain

OVER = {"weights": "over weights, along two random directions", "input": "over inputs, along gradient and random signs"}


def section(runs: Sequence[Reading]) -> Section:
    plots = [plot for plot in (_layers(runs), _over_time(runs), _density(runs)) if plot]
    missing = lacking(runs, "curvature", "loss landscape", "a landscape", "the density of eigenvalues")
    blocks: list[Block] = [*alarms(runs, "curvature"), *missing, *([Side(plots)] if plots else [])]
    for run in runs:
        for over, landscape in run.landscapes.items():
            name = f"{run.name}: loss {OVER[over]}" if len(runs) > 1 else f"Loss {OVER[over]}"
            pair = [
                Plot(f"landscape-{over}-{run.number}", name, surface(landscape), "Turn it with the mouse.", run.number),
                Plot(f"contour-{over}-{run.number}", "The same from above", contour(landscape), run=run.number),
            ]
            blocks.append(Side(pair))
    return Section("curvature", "Curvature", [*blocks, *each(runs, _numbers)])


def _layers(runs: Sequence[Reading]) -> Plot | None:
    series = {}
    for run in runs:
        layers = entries(run.curvature.tree, "layers") if run.curvature else []
        rows = [(plain(get(one, "name")), term) for one in layers if (term := number(get(one, "term"))) is not None]
        if rows:
            series[run.name, run.number] = rows
    if not series:
        return None
    note = "Norm times root of the trace of each weight matrix; the bars of a run add up to its WCI."
    return Plot("curvature-layers", "Curvature per layer", bars(series, "share in WCI"), note)


def _over_time(runs: Sequence[Reading]) -> Plot | None:
    traces = []
    for run in runs:
        found = [
            ((epoch, value), number(record.get("wci_standard_error")))
            for record in run.epochs
            if (epoch := number(record.get("epoch"))) is not None and (value := number(record.get("wci"))) is not None
        ]
        if found:
            points, errors = zip(*found, strict=True)
            traces.append(curve(run.name, points, run.number, errors=errors))
    if not traces:
        return None
    return Plot("curvature-time", "WCI over time", chart(traces, "epoch", "WCI"), "Bars are standard errors.")


def _density(runs: Sequence[Reading]) -> Plot | None:
    traces = []
    for run in runs:
        if run.density is not None:
            grid, height = run.density.smooth()
            points = [(x, y + 1e-8) for x, y in zip(grid.tolist(), height.tolist(), strict=True)]
            traces.append(curve(run.name, points, run.number))
    if not traces:
        return None
    axis = {"title": {"text": "density"}, "type": "log", "exponentformat": "power"}
    return Plot("curvature-density", "Eigenvalues of the Hessian", chart(traces, "eigenvalue", "density", yaxis=axis))


def _numbers(run: Reading) -> list[Block]:
    if run.curvature is None:
        return []
    tree = run.curvature.tree
    rows: list[list[str | Cell]] = []
    for layer in entries(tree, "layers"):
        share = number(get(layer, "share"))
        cells = [digits(get(layer, "norm")), measured(get(layer, "trace")) or "–", digits(get(layer, "term"))]
        rows.append([plain(get(layer, "name")), *cells, "–" if share is None else f"{100 * share:.1f}"])
    lines = [f"WCI {measured(get(tree, 'wci')) or '–'}, at most {digits(get(tree, 'bound'))}."]
    total, estimator = measured(get(tree, "traces", "total")), plain(get(tree, "traces", "estimator"))
    lines.append(f"Trace of the whole Hessian {total or '–'}, by {estimator}: {plain(get(tree, 'traces', 'reason'))}.")
    if get(tree, "negative"):
        lines.append(f"{plain(get(tree, 'negative'))} traces were negative and count as zero.")
    if eigenvalues := entries(tree, "eigenvalues"):
        lines.append(f"Largest eigenvalues {', '.join(map(digits, eigenvalues[:20]))}.")
    if gap := get(tree, "gap"):
        error, loss = (measured(get(gap, name)) or "–" for name in ("error", "loss"))
        lines.append(f"Robust gap, test minus train: error {error}, loss {loss}.")
    where = f"{loss_at(tree)}, {about(tree)}"
    table = Table(["weight matrix", "norm", "trace", "norm √trace", "% of WCI"], rows)
    return [Title("Weight-Curvature Index", where), Words(lines), Fold("Layer by layer", [table]), *_bounds(tree)]


def _bounds(tree: object) -> list[Block]:
    """PAC-Bayes numbers, each with the word on whether it says anything."""
    columns = {"risk": "loss", "kl": "KL", "linear": "linear", "catoni": "Catoni", "square_root": "square root"}
    rows: list[list[str | Cell]] = [
        [
            Cell(plain(get(bound, "posterior")), plain(get(bound, "words"))),
            *(digits(get(bound, key)) for key in columns),
        ]
        for bound in entries(tree, "pac_bayes")
    ]
    return [Fold("PAC-Bayes numbers", [Table(["posterior", *columns.values()], rows)])] if rows else []
