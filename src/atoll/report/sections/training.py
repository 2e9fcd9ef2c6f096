"""Learning curves: clean and robust accuracy, the gap between training and held-out points, loss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from atoll.report.blocks import Block, Columns, Paragraphs, Plot, Row, Section, TableCell
from atoll.report.compare import notes
from atoll.report.figures import PERCENT, Trace, chart, curve
from atoll.report.run_summary import RunSummary
from atoll.report.text import listed, number, plain

ORDER, KINDS = 10, ()
# Averages of weights (SWA) have their name in the middle: validation_swa_robust.
METRIC = re.compile(r"(train|validation|test)_(?:(\w+)_)?(clean|robust|vra_estimate|vra)")
DASHES = {"train": "dot", "validation": "solid", "test": "dash"}
ACCURACIES = {
    "robust": "Robust accuracy",
    "clean": "Clean accuracy",
    "vra": "Verified accuracy",
    "vra_estimate": "Estimated verified accuracy",
}
# What the numbers depend on, as parts of the recipe.
POINTS = (("data", "class_path"), *(("data", "init_args", name) for name in ("limit", "validation", "split_seed")))
VALIDATION = (*POINTS, ("threat",), ("trainer", "validation_steps"))
TRAINING = (("data",), ("threat",), ("attack",))


def summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    return [["Training", *map(_overview, runs)]]


def _overview(run: RunSummary) -> TableCell:
    parts = [run.recipe_value(part, "class_path") for part in ("model", "data")]
    setup = " on ".join(plain(part).rpartition(".")[2] for part in parts if part)
    threat = f"{plain(run.recipe_value('threat', 'norm'))} {plain(run.recipe_value('threat', 'eps'))}"
    epochs = f"{len(run.epochs)} of {plain(run.recipe_value('trainer', 'epochs'))} epochs"
    note, mark = ("", "") if run.run.is_finished else (", not finished", "warning")
    return TableCell(run.method, f"{setup}; threat model {threat}; {epochs}{note}", mark)


def section(runs: Sequence[RunSummary]) -> Section:
    plots: list[Block] = []
    # One run: all points in one plot.  Several: a plot for each kind of points, because their conditions may differ.
    for splits in [("train", "validation", "test")] if len(runs) == 1 else [("validation",), ("test",), ("train",)]:
        for name, title in ACCURACIES.items():
            place = f"training-{name.replace('_', '-')}" + ("" if len(runs) == 1 else f"-{splits[0]}")
            title += "" if len(runs) == 1 else f", {splits[0]}"
            traces = partial(_accuracy, name=name, splits=splits)
            depends_on = TRAINING if "train" in splits else VALIDATION
            if name == "clean":  # which does not depend on attacks
                depends_on = (("data",),) if "train" in splits else POINTS
            plots += curves(runs, place, title, traces, depends_on, "%", yaxis={"range": PERCENT})
    gap = "Training accuracy is averaged over each epoch, while the weights change, unless the gap was measured."
    plots += curves(runs, "training-gap", "Robust gap", _gap, (*TRAINING, *VALIDATION), "percentage points", gap)
    plots += curves(runs, "training-loss", "Training loss", _loss, (("loss",), *TRAINING), "loss")
    lines = ["Solid lines: validation. Dotted lines: training, with its augmentation and attack. Dashed lines: test."]
    blocks = [Paragraphs(lines), Columns(plots)] if plots else [Paragraphs(["No epoch is recorded yet."])]
    return Section("training", "Training", [*notes(runs, "training"), *blocks])


def curves(
    runs: Sequence[RunSummary],
    place: str,
    title: str,
    traces: Callable[[RunSummary], list[Trace]],
    depends_on: Sequence[tuple[str, ...]],
    y: str,
    note: str = "",
    **layout: Any,
) -> list[Block]:
    """Curves over epochs, in one plot if the runs agree on what the numbers depend on; otherwise in several."""
    groups: dict[str, list[tuple[RunSummary, list[Trace]]]] = {}
    for run in runs:
        if lines := traces(run):
            values = [run.recipe_value(*path) for path in depends_on]
            groups.setdefault(json.dumps(values, sort_keys=True, default=str), []).append((run, lines))
    epochs = [
        x for group in groups.values() for _, lines in group for line in lines for x in line["x"] if x is not None
    ]
    plots: list[Block] = []
    for i, group in enumerate(groups.values()):
        name, figure = title, chart([line for _, lines in group for line in lines], "epoch", y, **layout)
        if len(groups) > 1:
            name = f"{title}: {', '.join(run.name for run, _ in group)}"
            note = f"Shown apart because the recipes differ in {_differences(list(groups), depends_on)}."
            figure["layout"]["xaxis"]["range"] = [0, 1.03 * max(epochs, default=1)]  # at least time is the same
        plots.append(Plot(f"{place}-{i}" if i else place, name, figure, note))
    return plots


def _differences(groups: Sequence[str], depends_on: Sequence[tuple[str, ...]]) -> str:
    """The parts of the recipe that differ."""
    columns = zip(*map(json.loads, groups), strict=True)
    names = [path[0] for path, values in zip(depends_on, columns, strict=True) if any(v != values[0] for v in values)]
    return listed(list(dict.fromkeys(names)))


def series(run: RunSummary, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """A metric over the epochs."""
    points = [(number(record.get("epoch")), number(record.get(key))) for record in run.epochs]
    return [(epoch, factor * value) for epoch, value in points if epoch is not None and value is not None]


def _accuracy(run: RunSummary, name: str, splits: Sequence[str]) -> list[Trace]:
    traces = []
    for key in sorted({key for record in run.epochs for key in record if isinstance(key, str)}):
        match = METRIC.fullmatch(key)
        if match and match[3] == name and match[1] in splits and (points := series(run, key, 100.0)):
            text = f"{run.name}, {match[1]}" + (f" ({match[2]})" if match[2] else "")
            traces.append(curve(text, points, run.number, dash="dashdot" if match[2] else DASHES[match[1]], unit=" %"))
    return traces


def _gap(run: RunSummary) -> list[Trace]:
    """Robust accuracy on training points minus that on held-out points, in percentage points."""
    if points := series(run, "gap_error", 100.0):
        return [curve(f"{run.name}, measured with one attack", points, run.number, unit=" points")]
    traces = []
    train = dict(series(run, "train_robust", 100.0))
    for split in ("validation", "test"):
        points = [(e, train[e] - value) for e, value in series(run, f"{split}_robust", 100.0) if e in train]
        if points:
            traces.append(curve(f"{run.name}, train − {split}", points, run.number, unit=" points"))
    return traces


def _loss(run: RunSummary) -> list[Trace]:
    points = series(run, "train_loss")
    return [curve(run.name, points, run.number, dash="dot")] if points else []
