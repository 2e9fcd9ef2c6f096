"""Whether accurate and robust networks look at the object, and how attributions differ from those at the boundary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from atoll.data.base import SubSplit, sample_rows, to_float
from atoll.data.boxes import boxes_of
from atoll.distributed import default_device
from atoll.errors import InputError
from atoll.explain.attributions import attribution
from atoll.explain.boundary import boundary_search
from atoll.explain.faithfulness import distance
from atoll.explain.locality import locality, usable
from atoll.models import Classifier
from atoll.plots import plot_attributions
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import Difference, claim_above, pseudo_values
from atoll.studies.table import Column, Table
from atoll.training.checkpoint import Checkpoints
from atoll_papers.studies.measure import mean_table

LOSSES = ("standard", "at", "trades")
METHODS, CHEAP = ("SM", "IG", "BIG"), ("SM", "IG")  # the cheap ones need no boundary search
SCORES = {"precision": "P", "recall": "R", "f1": "F1"}
PAIRS = (("SM", "BSM"), ("IG", "BIG"))
START = "start"
WEAK = 0.3  # smaller rank correlations count as no effect
ROBUST = LOSSES[1:]
DISTANCES = tuple("-".join(pair) for pair in PAIRS)
RELATIVE = tuple(f"{name}, relative" for name in DISTANCES)


@dataclass(frozen=True)
class LocalityScale:
    """Networks and points at a scale.

    Args:
        nets: sizes of the recipe grid ``canvas``.
        seeds: number of seeds.
        points: number of test points for accuracies.
        explained: number of test points to explain.
        overrides: overrides for every recipe.
    """

    nets: tuple[str, ...]
    seeds: int
    points: int
    explained: int
    overrides: tuple[str, ...] = ()


SIZES: Mapping[Scale, LocalityScale] = {
    "smoke": LocalityScale(
        ("small",),
        1,
        20,
        2,
        (
            *("data.data=Digits", "data.size=10", "data.clutter=1", "data.limit=300", "attack.steps=1"),
            "model={class_path: MLP, init_args: {hidden: [16]}}",
            *("threat.eps=0.02", "trainer.batch_size=20", "trainer.epochs=2", "trainer.keep_epochs=[1, 2]"),
        ),
    ),
    "cpu": LocalityScale(("small", "medium", "large"), 3, 500, 100),
    # The thesis explains 1000 ImageNet images with published networks.
    "paper": LocalityScale(
        ("small", "medium", "large"),
        5,
        10_000,
        1000,
        ("data.limit=null", "trainer.epochs=20", "trainer.keep_epochs=[1, 2, 5, 10, 20]"),
    ),
}


class LocalityStudy(Study):
    """Base class of the locality studies.

    For each size and seed, a standard network is trained first.  The networks to compare start from its weights and
    differ only in their loss.
    """

    family = "locality"
    losses: Sequence[str] = LOSSES

    def cells(self, scale: Scale) -> list[Cell]:
        size = SIZES[scale]
        fixed = (*size.overrides, "trainer.test_steps=0")
        cells = []
        for net in size.nets:
            for seed in range(size.seeds):
                start = Cell(f"{START}, {net}", seed, f"canvas/standard-{net}", fixed)
                recipes = {f"{loss}, {net}": f"canvas/{loss}-{net}" for loss in self.losses}
                cells += [start, *(Cell(row, seed, name, fixed, (start.name,)) for row, name in recipes.items())]
        return cells

    def overrides(self, cell: Cell, dependencies: Mapping[str, Run]) -> tuple[str, ...]:
        weights = [run.checkpoint_path("last").resolve() / "model.safetensors" for run in dependencies.values()]
        return (*cell.overrides, *(f"pretrained={path}" for path in weights))

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Measure the cheap methods after every epoch of the first network, and all methods on the final networks."""
        assert run is not None
        steps = Checkpoints(run.folder / "checkpoints").steps()
        if cell.depends_on:
            return measure_step(run, steps[-1], METHODS, SIZES[scale])
        return {"epochs": [measure_step(run, step, CHEAP, SIZES[scale]) for step in steps]}


def select_points(run: Run, size: LocalityScale) -> SubSplit:
    """Random test points, the same for every network; some data sets are sorted by class."""
    test = run.data.test
    return SubSplit(test, sample_rows(test, size.points, "locality"))


def select_explained(model: Classifier, split: SubSplit, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and boxes of the first points that are classified correctly and have a usable box."""
    boxes = boxes_of(split)
    if boxes is None:
        raise InputError("data: expected a test set with bounding boxes, got one without")
    x, y = to_float(split.fetch(torch.arange(len(split)))), split.labels
    with torch.no_grad():
        correct = model(x.to(_device(model))).argmax(1).cpu() == y
    rows = (correct & usable(boxes, x.shape)).nonzero().squeeze(1)[:count]
    if not len(rows):
        raise InputError("data: expected correctly classified points with usable boxes, got none")
    return x[rows], y[rows], boxes[rows]


def attributions(model: Classifier, x: Tensor, y: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Attributions by method; boundary methods share one search."""
    x, y = x.to(_device(model)), y.to(_device(model))
    boundary = boundary_search(model, x) if {"BSM", "BIG"} & set(names) else None
    maps = {}
    for name in names:
        shared: dict[str, Any] = {"boundary": boundary} if name in ("BSM", "BIG") else {}
        maps[name] = attribution(name, model).attribute(x, y, **shared).cpu()
    return maps


def _device(model: Classifier) -> torch.device:
    return next(model.parameters()).device


def measure_step(run: Run, step: int, methods: Sequence[str], size: LocalityScale) -> Numbers:
    """Accuracies (as fractions), locality and distances of a checkpoint."""
    # Robustness is needed only for the final networks.
    accuracy = run.attack("PGD-20" if "BIG" in methods else "none", checkpoint=step, points=size.points).accuracy
    model = run.model(step).to(default_device())
    x, y, boxes = select_explained(model, select_points(run, size), size.explained)
    maps = attributions(model, x, y, (*methods, "BSM") if "BIG" in methods else methods)
    numbers: Numbers = {name: share.value for name, share in accuracy.items()} | {"points": len(x)}
    for name in methods:
        result = locality(maps[name], boxes)
        numbers |= {f"{name} {score}": result.means[score].value for score in SCORES}
        numbers[f"{name} undefined"] = result.undefined["f1"]
    for near, far in PAIRS if "BIG" in methods else ():
        gap, length = distance(maps[near], maps[far]), maps[near].flatten(1).norm(dim=1)
        numbers |= {f"{near}-{far}": gap.mean().item(), f"{near}-{far}, relative": (gap / length).mean().item()}
    sides = (boxes[:, 2:] - boxes[:, :2] + 1).double()
    numbers["share of the box"] = (sides.prod(1) / (x.shape[-1] * x.shape[-2])).mean().item()
    return numbers


def ends(results: StudyResults, *losses: str) -> dict[Cell, Numbers]:
    """The numbers of the final networks, without the networks that they start from."""
    return {cell: numbers for cell, numbers in results.numbers.items() if cell.row.partition(",")[0] in losses}


def robust_minus_standard(
    results: StudyResults, loss: str, name: str, of: Callable[[float], float] = float
) -> list[float]:
    """Differences of a number (or a function of it) between robust and standard networks with the same start."""
    return [
        difference
        for size in SIZES[results.scale].nets
        for difference in results.paired(f"{loss}, {size}", f"standard, {size}", name, of)
    ]


class LocalityAccuracy(LocalityStudy):
    """Rank correlations of accuracy and F1 of standard networks, over the epochs of a run and over networks."""

    name = "locality-accuracy"
    title = "Locality and accuracy of standard networks"
    reference = (
        "Thesis, figure 3.2 (with cluttered MNIST canvases instead of published ImageNet networks, at all scales)"
    )
    losses = ("standard",)

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        rows: dict[str, list[Estimate | str | None]] = {}
        for method, (within, across, p) in self.correlations(results).items():
            rows[method] = [
                within.text(3) if math.isfinite(within.low) else "not measured",
                None if math.isnan(across) else Estimate(across),
                None if math.isnan(p) else f"{p:.2g}",
            ]
        columns = [Column("over the epochs of a run, mean over runs"), Column("over sizes and seeds"), Column("p")]
        return {"Rank correlation of accuracy and F1": Table(columns, rows), **main_table(results, "standard")}

    def correlations(self, results: StudyResults) -> dict[str, tuple[Difference, float, float]]:
        """By method: the correlation over epochs, the correlation over networks, and the p-value of the latter."""
        epochs, nets = self._epochs(results), list(ends(results, "standard").values())
        within = {name: over_epochs(epochs, f"{name} f1") if name in CHEAP else [] for name in METHODS}
        return {name: (Difference.of(within[name]), *over_nets(nets, f"{name} f1")) for name in METHODS}

    def _epochs(self, results: StudyResults) -> list[list[Numbers]]:
        return [numbers["epochs"] for cell, numbers in results.numbers.items() if cell.row.startswith(START)]

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        nets = list(ends(results, "standard").values())
        values = {f"{name}, epochs": over_epochs(self._epochs(results), f"{name} f1") for name in CHEAP}
        if len(nets) > 2:
            each = {f"{name}, networks": f"{name} f1" for name in METHODS}
            values |= {
                title: pseudo_values(lambda some, key=key: over_nets(some, key)[0], nets)  # type: ignore[misc]
                for title, key in each.items()
            }
        else:
            values["networks"] = []
        claim = f"Accuracy does not raise locality (rank correlation with F1 below {WEAK:g})"
        return [claim_above(claim, values, WEAK, sign=-1)]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"locality": scatter(results, "clean", ("standard",))}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            f"{describe(results)} The table shows Spearman's rank correlation of clean accuracy and F1 of standard"
            " networks: over the epochs of the runs that all others start from (mean and 95 % interval over runs), and"
            " over the final standard networks. The claim uses jackknife intervals for the latter.",
            describe_baseline(results),
        ]


class LocalityRobustness(LocalityStudy):
    """Difference in locality between robust and standard networks with the same start."""

    name = "locality-robustness"
    title = "Locality: standard and robust networks"
    reference = "Thesis, figures 3.4 and 3.5 (with cluttered MNIST canvases instead of ImageNet, at all scales)"

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        names = [f"{method} {score}" for method in METHODS for score in SCORES]
        rows = {name: [change(results, loss, name) for loss in ROBUST] for name in names}
        return main_table(results, *LOSSES) | change_table(rows)

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        changes = {
            f"{loss}, {name}": robust_minus_standard(results, loss, f"{name} f1") for loss in ROBUST for name in METHODS
        }
        return [claim_above("Robustness raises locality (F1)", changes)]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"locality": scatter(results, "PGD-20", LOSSES)} | picture(results)

    def notes(self, results: StudyResults) -> Sequence[str]:
        pairs = len(robust_minus_standard(results, ROBUST[0], f"{METHODS[0]} f1"))
        return [
            f"{describe(results)} Differences are between networks with the same size, seed and start: mean and 95 %"
            f" interval (Student's t) over {pairs} pairs.",
            describe_baseline(results),
        ]


class AttributionDistance(LocalityStudy):
    """Distance between attributions at the input and at the boundary."""

    name = "attribution-distance"
    title = "SM-BSM and IG-BIG: standard and robust networks"
    reference = "Thesis, table 3.1 (with cluttered MNIST canvases instead of CIFAR-10 and ImageNet, at all scales)"

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        names = (*DISTANCES, *RELATIVE)
        columns, rows = {name: Column(name, "low", 3) for name in names}, [cell.row for cell in ends(results, *LOSSES)]
        logs = {f"log {name}": [change(results, loss, name, of=_log) for loss in ROBUST] for name in names}
        return {"Distances": mean_table(results, columns, rows)} | change_table(logs)

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        closer = "Robustness brings SM closer to BSM and IG closer to BIG"
        return [
            claim_above(
                f"{claim} (difference of logarithms)",
                {
                    f"{loss}, {name}": robust_minus_standard(results, loss, name, of=_log)
                    for loss in ROBUST
                    for name in names
                },
                sign=-1,
            )
            for claim, names in ((closer, DISTANCES), (f"{closer}, relative to the norm of SM and IG", RELATIVE))
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            f"{describe(results)} Distances are l2 distances between attributions, averaged over points. Relative"
            " distances are divided by the norm of SM or IG. Robust networks have smaller gradients, and therefore"
            " smaller distances."
        ]


def change(results: StudyResults, loss: str, name: str, of: Callable[[float], float] = float) -> Difference:
    """Mean difference of a number (or a function of it) between robust and standard networks."""
    return Difference.of(robust_minus_standard(results, loss, name, of))


def change_table(rows: Mapping[str, Sequence[Difference]]) -> dict[str, Table]:
    """A table of differences, with one column per robust loss."""
    texts = {name: [difference.text(3) for difference in differences] for name, differences in rows.items()}
    return {"Robust minus standard": Table([Column(f"{loss} - standard") for loss in ROBUST], texts)}


def _log(distance: float) -> float:
    return math.log(max(distance, 1e-30))  # the distance is 0 for a linear network


def over_epochs(runs: Sequence[Sequence[Numbers]], name: str) -> list[float]:
    """The rank correlation of accuracy with a number over the epochs of each run, except if either is constant."""
    return [r for run in runs if not math.isnan(r := over_nets(run, name)[0])]


def over_nets(nets: Sequence[Numbers], name: str) -> tuple[float, float]:
    """Spearman's rank correlation of accuracy with a number, and its p-value; NaN if either is constant.

    >>> over_nets([{"clean": 0.1, "F": 1.0}, {"clean": 0.2, "F": 2.0}, {"clean": 0.4, "F": 3.0}], "F")[0]
    1.0
    """
    from scipy.stats import spearmanr  # half a second to import

    accuracy, values = [net["clean"] for net in nets], [net[name] for net in nets]
    if len(set(accuracy)) < 2 or len(set(values)) < 2:
        return math.nan, math.nan
    correlation = spearmanr(accuracy, values)
    return float(correlation.statistic), float(correlation.pvalue)


def main_table(results: StudyResults, *losses: str) -> dict[str, Table]:
    """Table of accuracies and locality of every network, by title."""
    names = [f"{method} {score}" for method in METHODS for score in SCORES]
    columns = [Column("clean, %", "high", 1), Column("PGD-20, %", "high", 1)]
    columns += [Column(f"{method} {short}", "high", 3) for method in METHODS for short in SCORES.values()]
    rows = {}
    for cell in ends(results, *losses):
        accuracies = [results.mean(cell.row, name, 100) for name in ("clean", "PGD-20")]
        rows[cell.row] = [*accuracies, *(results.mean(cell.row, name) for name in names)]
    return {"Accuracy and locality": Table(columns, rows)}


def describe(results: StudyResults) -> str:
    """Describe networks, data and points."""
    size = SIZES[results.scale]
    text = (
        "Networks with the same size and seed start from the same standard network and differ only in their loss."
        f" Accuracies are measured on the first {size.points:,} test points. Attributions are computed at"
        f" {size.explained:,} random test points that a network classifies correctly and whose box covers at most 80 %"
        " of the image."
    )
    for run in results.runs.values():
        data, shape = run.data, " x ".join(map(str, run.data.shape))
        inner = getattr(data, "data", None)
        name = type(data).__name__ + (f" with {type(inner).__name__}" if inner is not None else "")
        threat = f"threat {run.threat.norm} {run.threat.eps}"
        return f"{name}, {len(data.train):,} training images of size {shape}; {threat}. {text}"
    return text


def describe_baseline(results: StudyResults) -> str:
    """Describe the scores of meaningless maps."""
    nets = [*ends(results, *LOSSES).values()]
    share = Estimate.mean_of(torch.tensor([net["share of the box"] for net in nets], dtype=torch.float64)).value
    undefined = sum(net[f"{method} undefined"] for net in nets for method in METHODS)
    return (
        f"A constant map has a precision of {share:.3f}, the box's share of the image. A map with random signs has a"
        " recall of 0.5. IG is 0 at black pixels, because its baseline is black. F1 was undefined (a map of zeros)"
        f" {undefined} times."
    )


def scatter(results: StudyResults, name: str, losses: Sequence[str]) -> Figure:
    """F1 of every network over an accuracy, for each attribution."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes: Any = figure.subplots(1, len(METHODS))
    for axis, method in zip(axes, METHODS, strict=True):
        for loss in losses:
            nets = ends(results, loss).values()
            axis.plot([100 * net[name] for net in nets], [net[f"{method} f1"] for net in nets], "o", label=loss)
        axis.set_title(method, fontsize=10)
        axis.set_xlabel(f"{name} accuracy in %")
    axes[0].set_ylabel("F1 of locality")
    axes[0].legend(fontsize=8)
    return figure


def picture(results: StudyResults, count: int = 4) -> dict[str, Figure]:
    """Attributions of a standard and a robust network side by side, at points that both classify correctly."""
    size = SIZES[results.scale]
    middle = size.nets[len(size.nets) // 2]
    by_name = {cell.name: run for cell, run in results.runs.items()}
    runs = {loss: by_name[name] for loss in ("standard", "at") if (name := f"{loss}-{middle}-0") in by_name}
    if len(runs) < 2:
        return {}
    models = {loss: run.model("last") for loss, run in runs.items()}
    data, split = runs["at"].data, select_points(runs["at"], size)
    x, y, boxes = select_explained(models["standard"], split, size.explained)
    with torch.no_grad():
        rows = (models["at"](x).argmax(1) == y).sort(descending=True, stable=True).indices[:count]
    x, y, boxes = x[rows], y[rows], boxes[rows]
    maps = {loss: attributions(model, x, y, METHODS) for loss, model in models.items()}
    columns = {f"{name}, {loss}": maps[loss][name] for name in METHODS for loss in maps}
    return {"attributions": plot_attributions(x, columns, boxes, [data.classes[label] for label in y.tolist()])}
