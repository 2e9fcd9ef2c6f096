"""Does accuracy, does robustness make a net look at the object, and bring attributions closer to the boundary's?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from atoll.plots import plot_attributions
from atoll.stats import Estimate
from atoll.studies.base import Answer, Claim, Found, Numbers, StudyReport
from atoll.studies.claims import TOO_FEW, Difference
from atoll.studies.table import Column, Table
from atoll_papers.studies.locality_nets import (
    CHEAP,
    LOSSES,
    METHODS,
    PAIRS,
    SCORES,
    SIZES,
    START,
    LocalityStudy,
    apart,
    attributions,
    ends,
    explained,
    points_of,
)

ROBUST = LOSSES[1:]
DISTANCES = tuple("-".join(pair) for pair in PAIRS)


class LocalityAccuracy(LocalityStudy):
    """Rank correlations of accuracy and F1 within standard nets: over the epochs of a run, and over nets."""

    name = "locality-accuracy"
    title = "Locality and accuracy of standard nets"
    shows = "Thesis, figure 3.2 (which has published ImageNet nets; here nets are trained on cluttered canvases)"
    losses = ("standard",)

    def conclude(self, found: Found) -> StudyReport:
        epochs = [numbers["epochs"] for cell, numbers in found.numbers.items() if cell.row.startswith(START)]
        nets = list(ends(found, "standard").values())
        rows: dict[str, list[Estimate | str | None]] = {}
        rose, fell, told = [], [], []
        for method in METHODS:
            within = Difference.of(over_epochs(epochs, f"{method} f1") if method in CHEAP else [])
            across, p = over_nets(nets, f"{method} f1")
            if within.low > 0 or (across > 0 and p < 0.05):
                rose.append(method)
            if within.high < 0 or (across < 0 and p < 0.05):
                fell.append(method)
            measured = math.isfinite(within.low)
            told.append(f"{method} {within.text() if measured else '-'} and {across:.2f}")
            rows[method] = [
                within.text(3) if measured else "not measured",
                None if math.isnan(across) else Estimate(across),
                None if math.isnan(p) else f"{p:.2g}",
            ]
        columns = [
            Column("over the epochs of a run, mean of all runs"),
            Column("over sizes and seeds"),
            Column("p"),
        ]
        words = (
            f"{describe(found)} Rank correlation (Spearman) of clean accuracy and F1 within standard nets: over the"
            " epochs of the runs that all others start from, mean and 95 % interval over runs; and over the standard"
            " nets at the end."
        )
        claim = "Accuracy does not raise locality"
        if len(epochs) < 2 or len(nets) < 3:
            verdict = Claim(claim, "not testable", "that takes three nets at least")
        else:
            verdict = Claim(
                claim,
                "did not hold" if rose else "held",
                f"within standard nets F1 rose with accuracy for {', '.join(rose) or 'no method'} and fell for"
                f" {', '.join(fell) or 'none'} (whole interval on one side of 0 over epochs, or p < 0.05 over nets);"
                f" correlations over epochs and over nets: {', '.join(told)}",
            )
        return StudyReport(
            {"Rank correlation of accuracy and F1": Table(columns, rows), **main_table(found, "standard")},
            [verdict],
            {"locality": scatter(found, "clean", ("standard",))},
            [words, precision_words(found)],
        )


class LocalityRobustness(LocalityStudy):
    """Locality of robust nets minus that of standard nets of the same start."""

    name = "locality-robustness"
    title = "Locality: standard and robust nets"
    shows = "Thesis, figures 3.4 and 3.5 (which have published ImageNet nets; here they are trained on canvases)"

    def conclude(self, found: Found) -> StudyReport:
        names = [f"{method} {score}" for method in METHODS for score in SCORES]
        rows = {name: [Difference.of(apart(found, loss, name)).text(3) for loss in ROBUST] for name in names}
        table = Table([Column(f"{loss} - standard") for loss in ROBUST], rows)
        pairs = len(apart(found, ROBUST[0], names[0]))
        words = (
            f"{describe(found)} Differences are those of nets of the same size, seed and start: mean and 95 % interval"
            f" (Student's t) over {pairs} pairs."
        )
        verdict = every(
            "Robustness raises locality",
            {
                loss: {method: Difference.of(apart(found, loss, f"{method} f1")) for method in METHODS}
                for loss in ROBUST
            },
            "of the difference in F1 is above 0",
        )
        figures = {"locality": scatter(found, "PGD-20", LOSSES)} | picture(found)
        tables = main_table(found, *LOSSES) | {"Robust minus standard": table}
        return StudyReport(tables, [verdict], figures, [words, precision_words(found)])


class AttributionDistance(LocalityStudy):
    """How far attributions are from those at the boundary."""

    name = "attribution-distance"
    title = "SM-BSM and IG-BIG: standard and robust nets"
    shows = "Thesis, table 3.1 (which has ResNet50 on CIFAR-10 and ImageNet; here nets are trained on canvases)"

    def conclude(self, found: Found) -> StudyReport:
        names = [*DISTANCES, *(f"{name}, relative" for name in DISTANCES)]
        rows = {cell.row: [found.mean(cell.row, name) for name in names] for cell in ends(found, *LOSSES)}
        table = Table([Column(name, "low", 3) for name in names], rows)
        changes = {name: {loss: Difference.of(apart(found, loss, name, of=_log)) for loss in ROBUST} for name in names}
        logs = Table(
            [Column(f"{loss} - standard") for loss in ROBUST],
            {f"log {name}": [each[loss].text(3) for loss in ROBUST] for name, each in changes.items()},
        )
        verdicts = [
            every(
                claim,
                {loss: {name: changes[name][loss].negative for name in chosen} for loss in ROBUST},
                "of the difference of logarithms is below 0",
            )
            for claim, chosen in (
                ("Robustness brings SM closer to BSM and IG closer to BIG", DISTANCES),
                ("It does so in units of the length of SM and IG, too", names[len(DISTANCES) :]),
            )
        ]
        words = (
            f"{describe(found)} l2 distances between attributions, mean over points; relative: in units of the length"
            " of SM and IG. The gradients of robust nets are smaller, and so are all distances."
        )
        return StudyReport({"Distances": table, "Robust minus standard": logs}, verdicts, words=[words])


def _log(distance: float) -> float:
    return math.log(max(distance, 1e-30))  # a linear net has a distance of 0


def over_epochs(runs: Sequence[Sequence[Numbers]], name: str) -> list[float]:
    """The rank correlation of accuracy with a number over the epochs of each run; not where either never changes."""
    return [r for run in runs if not math.isnan(r := over_nets(run, name)[0])]


def over_nets(nets: Sequence[Numbers], name: str) -> tuple[float, float]:
    """Rank correlation (Spearman) of accuracy with a number, and its p-value; NaN where either never changes.

    >>> over_nets([{"clean": 0.1, "F": 1.0}, {"clean": 0.2, "F": 2.0}, {"clean": 0.4, "F": 3.0}], "F")[0]
    1.0
    """
    from scipy.stats import spearmanr  # half a second to import

    accuracy, values = [net["clean"] for net in nets], [net[name] for net in nets]
    if len(set(accuracy)) < 2 or len(set(values)) < 2:
        return math.nan, math.nan
    found = spearmanr(accuracy, values)
    return float(found.statistic), float(found.pvalue)


def every(claim: str, differences: Mapping[str, Mapping[str, Difference]], side: str) -> Claim:
    """Whether every interval is above 0, by loss and name; held in part if some are."""
    each = [d for named in differences.values() for d in named.values()]
    if any(math.isinf(d.low) for d in each):
        return Claim(claim, "not testable", TOO_FEW)
    above = {loss: [name for name, d in named.items() if d.low > 0] for loss, named in differences.items()}
    count = sum(map(len, above.values()))
    answer: Answer = "held" if count == len(each) else "held in part" if count else "did not hold"
    spelled = "; ".join(f"{loss}: {', '.join(names) or 'none'}" for loss, names in above.items())
    return Claim(claim, answer, f"the 95 % interval {side} for {spelled}")


def main_table(found: Found, *losses: str) -> dict[str, Table]:
    """Accuracies and locality of every net, by title."""
    names = [f"{method} {score}" for method in METHODS for score in SCORES]
    columns = [Column("clean, %", "high", 1), Column("PGD-20, %", "high", 1)]
    columns += [Column(f"{method} {short}", "high", 3) for method in METHODS for short in SCORES.values()]
    rows = {}
    for cell in ends(found, *losses):
        accuracies = [found.mean(cell.row, name, 100) for name in ("clean", "PGD-20")]
        rows[cell.row] = [*accuracies, *(found.mean(cell.row, name) for name in names)]
    return {"Accuracy and locality": Table(columns, rows)}


def describe(found: Found) -> str:
    """What was measured, and on what."""
    size = SIZES[found.scale]
    text = (
        "The nets of a size and seed start from the same standard net and differ in their loss only. Accuracies on"
        f" {size.points:,} random test points; attributions at the first {size.explained:,} of them that a net"
        " classifies correctly and whose box covers at most 80 % of the image."
    )
    for run in found.runs.values():
        data, shape = run.data, " x ".join(map(str, run.data.shape))
        inner = getattr(data, "data", None)
        name = type(data).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
        threat = f"threat {run.threat.norm} {run.threat.eps}"
        return f"{name}, {len(data.train):,} training images of {shape}; {threat}. {text}"
    return text


def precision_words(found: Found) -> str:
    """What the numbers would be of maps that mean nothing."""
    nets = [*ends(found, *LOSSES).values()]
    share = Estimate.mean_of(torch.tensor([net["share of the box"] for net in nets], dtype=torch.float64)).value
    undefined = sum(net[f"{method} undefined"] for net in nets for method in METHODS)
    return (
        f"A map that is the same everywhere has a precision of {share:.3f}, the box's share of the image; one with"
        " random signs a recall of 0.5. IG is 0 where an image is black, as its baseline is. F1 was undefined (a map"
        f" of zeros) {undefined} times."
    )


def scatter(found: Found, name: str, losses: Sequence[str]) -> Figure:
    """F1 of every net against an accuracy, for each attribution."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes: Any = figure.subplots(1, len(METHODS))
    for axis, method in zip(axes, METHODS, strict=True):
        for loss in losses:
            nets = ends(found, loss).values()
            axis.plot([100 * net[name] for net in nets], [net[f"{method} f1"] for net in nets], "o", label=loss)
        axis.set_title(method, fontsize=10)
        axis.set_xlabel(f"{name} accuracy in %")
    axes[0].set_ylabel("F1 of locality")
    axes[0].legend(fontsize=8)
    return figure


def picture(found: Found, count: int = 4) -> dict[str, Figure]:
    """Attributions of a standard and a robust net side by side, at points that both get right if there are such."""
    size = SIZES[found.scale]
    middle = size.nets[len(size.nets) // 2]
    known = {cell.name: run for cell, run in found.runs.items()}
    runs = {loss: known[name] for loss in ("standard", "at") if (name := f"{loss}-{middle}-0") in known}
    if len(runs) < 2:
        return {}
    models = {loss: run.model("last") for loss, run in runs.items()}
    data, split = runs["at"].data, points_of(runs["at"], size)
    x, y, boxes = explained(models["standard"], split, size.explained)
    with torch.no_grad():
        rows = (models["at"](x).argmax(1) == y).sort(descending=True, stable=True).indices[:count]
    x, y, boxes = x[rows], y[rows], boxes[rows]
    maps = {loss: attributions(model, x, y, METHODS) for loss, model in models.items()}
    columns = {f"{name}, {loss}": maps[loss][name] for name in METHODS for loss in maps}
    return {"attributions": plot_attributions(x, columns, boxes, [data.classes[label] for label in y.tolist()])}
