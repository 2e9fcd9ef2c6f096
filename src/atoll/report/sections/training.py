"""Learning curves: clean and robust accuracy, the gap between training and held-out points, loss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atoll.report.blocks import Block, Cell, Plot, Section, Side, Table, Words
from atoll.report.figures import Trace, chart, curve, percent_axis
from atoll.report.read import Reading
from atoll.report.sections.shared import alarms, interval, lacking
from atoll.report.values import accuracy, digits, get, number, plain

# Averages of weights (SWA) have their name in the middle: validation_swa_robust.
METRIC = re.compile(r"(train|validation|test)_(?:(\w+)_)?(clean|robust|vra_estimate|vra)")
DASHES = {"train": "dot", "validation": "solid", "test": "dash"}
ACCURACIES = {
    "robust": "Robust accuracy",
    "clean": "Clean accuracy",
    "vra": "Verified accuracy",
    "vra_estimate": "Verified accuracy, estimated",
}


def section(runs: Sequence[Reading]) -> Section:
    figures = [plot for name in ACCURACIES if (plot := _accuracy(runs, name))]
    figures += [plot for plot in (_gap(runs), _loss(runs)) if plot]
    tables = [_tests(runs)] if any(run.tests for run in runs) else []
    note = Words(["Dotted: training points, as they were trained on. Solid: validation points. Dashed: test points."])
    plots: list[Block] = [note, Side(figures)] if figures else [Words(["No epoch is recorded yet."])]
    missing = lacking(runs, "test results", "some metrics", "learning curves")
    return Section("training", "Training", [*alarms(runs, "training"), *missing, *tables, *plots])


def _series(run: Reading, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    found = []
    for record in run.epochs:
        epoch, value = number(record.get("epoch")), number(record.get(key))
        if epoch is not None and value is not None:
            found.append((epoch, factor * value))
    return found


def _label(runs: Sequence[Reading], run: Reading, words: str) -> str:
    return words if len(runs) == 1 else f"{run.name}, {words}"


def _accuracy(runs: Sequence[Reading], name: str) -> Plot | None:
    traces: list[Trace] = []
    for run in runs:
        keys = sorted({key for record in run.epochs for key in record if isinstance(key, str)})
        for key in keys:
            match = METRIC.fullmatch(key)
            if match and match[3] == name and (points := _series(run, key, 100.0)):
                words = match[1] + (f" ({match[2]})" if match[2] else "")
                # Averages are thin dashes, whatever they are measured on.
                dash = "dashdot" if match[2] else DASHES[match[1]]
                traces.append(curve(_label(runs, run, words), points, run.number, dash=dash, unit=" %"))
    if not traces:
        return None
    figure = chart(traces, "epoch", "%", yaxis=percent_axis("%"))
    return Plot(f"training-{name.replace('_', '-')}", ACCURACIES[name], figure)


def _gap(runs: Sequence[Reading]) -> Plot | None:
    """Robust accuracy on training points minus that on held-out points, in points of percentage."""
    traces = []
    for run in runs:
        if points := _series(run, "gap_error", 100.0):
            traces.append(curve(_label(runs, run, "measured with one attack"), points, run.number, unit=" points"))
            continue
        trained = dict(_series(run, "train_robust", 100.0))
        for split in ("validation", "test"):
            held = _series(run, f"{split}_robust", 100.0)
            points = [(epoch, trained[epoch] - value) for epoch, value in held if epoch in trained]
            if points:
                traces.append(curve(_label(runs, run, f"train minus {split}"), points, run.number, unit=" points"))
    if not traces:
        return None
    note = "Training accuracy is the mean over an epoch in which the weights move, unless the gap was measured apart."
    return Plot("training-gap", "Robust gap", chart(traces, "epoch", "points of %"), note)


def _loss(runs: Sequence[Reading]) -> Plot | None:
    traces = [
        curve(_label(runs, run, "training loss"), points, run.number, dash="dot")
        for run in runs
        if (points := _series(run, "train_loss"))
    ]
    return Plot("training-loss", "Training loss", chart(traces, "epoch", "loss")) if traces else None


def _tests(runs: Sequence[Reading]) -> Table:
    """The training's own tests of its best and last weights, averages included."""
    rows: list[list[str | Cell]] = []
    for run in runs:
        attack = plain(get(run.tests, "attack"))
        averages = {plain(name): tree for name, tree in run.tests.items() if get(tree, "last") and name != "last"}
        for weights, tree in {"": run.tests, **averages}.items():
            for which in ("best", "last"):
                if not get(tree, which):
                    continue
                row: list[str | Cell] = [_label(runs, run, f"{which} {weights}".strip())]
                row.append(digits(get(tree, which, "epoch")))
                for name in ("clean", "robust", "vra"):
                    found = accuracy(get(tree, which, name))
                    words = f"95 %: {interval(found)}" + (f"; {attack}" if name == "robust" else "")
                    row.append(Cell(f"{100 * found.value:.2f} %", words) if found else "–")
                rows.append(row)
    return Table(["weights", "epoch", "clean", "robust", "verified"], rows)
