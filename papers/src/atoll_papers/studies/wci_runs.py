"""Runs that measure the Weight-Curvature Index during training, for several studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from atoll.runs.run import Run
from atoll.studies.base import Cell, Numbers, Scale, StudyResults
from atoll_papers.studies.measure import SMALL_MNIST, series

SIGNIFICANT = 0.05  # the paper's threshold for p
GAPS = {"gap_error": "robust error", "gap_loss": "robust loss"}
METRICS = ("epoch", "wci", *GAPS, "gap_test_error", "learning_rate", "wci_weight_norm", "wci_root_trace")
TITLES = {
    "wci": "WCI",
    "gap_error": "gap in robust error",
    "gap_loss": "gap in robust loss",
    "gap_test_error": "robust test error",
    "learning_rate": "learning rate",
}
TINY = (
    *("data={class_path: Digits, init_args: {limit: 100}}", "attack.steps=1"),
    "model={class_path: MLP, init_args: {hidden: [4]}}",
    *("methods.0.points=16", "methods.0.interval=1", "trainer.epochs=4", "trainer.validation_steps=1"),
    *("trainer.test_steps=0",),
)
SETTING = (
    "AT (PGD-10, linf 0.2) of a small ConvNet on 1,000 MNIST images for 32 epochs, with recipes from the grid"
    " `mnist-wci`. WCI and the gap (test minus training, 256 points each, under the training attack) are measured every"
    " other epoch."
)

Array = NDArray[np.float64]


def wci_cell(row: str, seed: int, scale: Scale, variant: str, *overrides: str, data: str = "cifar10") -> Cell:
    """A variant of ``mnist-wci``, or at the paper's scale of ``wci`` for the given data set."""
    if scale == "paper":
        return Cell(row, seed, f"wci/{data}-{variant}", overrides)
    fixed = TINY if scale == "smoke" else SMALL_MNIST
    # Overrides of the method come last, because a row may change the methods.
    first = [override for override in fixed if override.startswith("data")]
    return Cell(row, seed, f"mnist-wci/{variant}", (*first, *overrides, *(o for o in fixed if o not in first)))


def curves(run: Run) -> Numbers:
    """Metrics as series over the epochs that have all of them."""
    return {"curves": series(run, *METRICS)}


def stacked(results: StudyResults, row: str, *names: str) -> Array:
    """Series of a row, ``(seeds, names, epochs)``, without the seeds that ended early."""
    each = [numbers["curves"] for numbers in results.of(row)]
    longest = max((len(curve["epoch"]) for curve in each), default=0)
    complete = [[curve[name] for name in names] for curve in each if len(curve["epoch"]) == longest]
    return np.array(complete, dtype=np.float64).reshape(len(complete), len(names), longest)


def describe_setting(scale: Scale) -> Sequence[str]:
    """Describe the training setup."""
    return [SETTING] if scale == "cpu" else []


def plot(axis: Any, results: StudyResults, key: str, colors: Mapping[str, str]) -> None:
    """Means over seeds of one metric over epochs, one line per row."""
    for row, color in colors.items():
        both = stacked(results, row, "epoch", key)
        if len(both):
            axis.plot(both[0, 0], both[:, 1].mean(0), color=color, label=row)
    axis.set_title(TITLES.get(key, key), fontsize=9)
    axis.set_xlabel("epoch", fontsize=8)
    if key in ("wci", "learning_rate"):
        axis.set_yscale("log")


def plot_all(results: StudyResults) -> Figure:
    """WCI, both gaps, robust test error and learning rate over epochs."""
    colors = {row: f"C{number}" for number, row in enumerate(results.rows)}
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes: Any = figure.subplots(2, 3)
    for axis, key in zip(axes.flat, TITLES, strict=False):
        plot(axis, results, key, colors)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, 2].axis("off")
    axes[1, 2].legend(handles, labels, fontsize=8, loc="center")
    return figure


def legend(axis: Any) -> None:
    """Add a legend unless it would be empty, which matplotlib warns about."""
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)
