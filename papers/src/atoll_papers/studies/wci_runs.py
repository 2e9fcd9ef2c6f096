"""Trainings with the Weight-Curvature Index measured on the way, which several studies look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from atoll.runs.run import Run
from atoll.studies.base import Cell, Found, Numbers, Scale
from atoll_papers.studies.measure import SMALL_MNIST, series

SIGNIFICANT = 0.05  # what the paper asks of p
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
    "data={class_path: Digits, init_args: {limit: 100}}",
    "methods.0.points=16",
    "methods.0.interval=1",
    "trainer.epochs=4",
    "trainer.test_steps=0",
)
SETTING = (
    "AT (PGD-10, linf 0.2) of a small ConvNet on 1,000 images of MNIST, 32 epochs; book `mnist-wci`. WCI and the gap"
    " (test minus training, 256 points each, the training's attack) every other epoch."
)

Array = NDArray[np.float64]


def wci_cell(row: str, seed: int, scale: Scale, choice: str, *overrides: str, data: str = "cifar10") -> Cell:
    """A choice of ``mnist-wci``, or of ``wci`` at the scale of the paper, where ``data`` is chosen as well."""
    if scale == "paper":
        return Cell(row, seed, f"wci/{data}-{choice}", overrides)
    fixed = TINY if scale == "smoke" else SMALL_MNIST
    # What the index needs to be seen by comes last, in case that a row has methods of its own.
    first = [override for override in fixed if override.startswith("data")]
    return Cell(row, seed, f"mnist-wci/{choice}", (*first, *overrides, *(o for o in fixed if o not in first)))


def curves(run: Run) -> Numbers:
    """All that was measured after epochs, as series over those epochs that have it."""
    return {"curves": series(run, *METRICS)}


def stacked(found: Found, row: str, *names: str) -> Array:
    """Series of a row: ``(seeds, names, epochs)``; nothing of seeds that were cut short."""
    each = [numbers["curves"] for numbers in found.of(row)]
    longest = max((len(curve["epoch"]) for curve in each), default=0)
    kept = [[curve[name] for name in names] for curve in each if len(curve["epoch"]) == longest]
    return np.array(kept, dtype=np.float64).reshape(len(kept), len(names), longest)


def words_of(scale: Scale) -> Sequence[str]:
    """What was trained."""
    return [SETTING] if scale == "cpu" else []


def plot(axis: Any, found: Found, key: str, colours: Mapping[str, str]) -> None:
    """Means over seeds of one metric over epochs, a line for each row."""
    for row, colour in colours.items():
        both = stacked(found, row, "epoch", key)
        if len(both):
            axis.plot(both[0, 0], both[:, 1].mean(0), color=colour, label=row)
    axis.set_title(TITLES.get(key, key), fontsize=9)
    axis.set_xlabel("epoch", fontsize=8)
    if key in ("wci", "learning_rate"):
        axis.set_yscale("log")


def plot_all(found: Found) -> Figure:
    """WCI, both gaps, robust test error and learning rate over epochs."""
    colours = {row: f"C{number}" for number, row in enumerate(found.rows)}
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes: Any = figure.subplots(2, 3)
    for axis, key in zip(axes.flat, TITLES, strict=False):
        plot(axis, found, key, colours)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, 2].axis("off")
    axes[1, 2].legend(handles, labels, fontsize=8, loc="center")
    return figure


def legend(axis: Any) -> None:
    """If there is anything to tell apart: matplotlib warns where there is not."""
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)
