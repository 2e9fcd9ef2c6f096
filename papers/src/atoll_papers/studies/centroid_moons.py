"""What a GloRo Net and a Centroid Net reject on Two Moons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from atoll.certify import Certifier, GloRo, NearestCentroid
from atoll.certify.rejection import rejected
from atoll.data.base import MemorySplit
from atoll.models import CentroidNet
from atoll.rng import PointRNG
from atoll.runs.run import Run
from atoll.studies.base import Answer, Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import Difference
from atoll.studies.table import Column, Table

SQUARE = (-3.0, 4.0)  # the moons are in [-1, 2] x [-0.5, 1]
FAR = 30.0
SHARE = 0.2  # of the test points that get noise, as in the thesis
SIGMA = 1.0  # of that noise; the thesis does not say
TEST = "test points"
OUTLIERS = (
    f"test points with noise of {SIGMA:g}",
    f"uniform in [{SQUARE[0]:g}, {SQUARE[1]:g}]²",
    f"at distance {FAR:g}",
)
COLUMNS = ("GloRo", "Centroid, eta-layer", "Centroid, by its radius")


class CentroidMoons(Study):
    """GloRo rejects what it cannot certify, the Centroid Net what its eta-layer does not accept."""

    name = "centroid-moons"
    title = "Two Moons: what is rejected"
    shows = "Thesis, figure 6.4"

    def cells(self, scale: Scale) -> list[Cell]:
        short = ("trainer.epochs=3", "model.hidden=[20, 20]") if scale == "smoke" else ()
        cells = []
        for seed in range(1 if scale == "smoke" else 5):
            gloro = Cell("gloro", seed, "moons-gloro", short)
            cells += [gloro, Cell("centroid", seed, "moons-centroid", short[:1], (gloro.name,))]
        return cells

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """Accuracies; of the Centroid Net also what both reject, in %, with as many test points rejected by either."""
        assert run is not None
        tested = run.certify(attack=False)
        numbers: Numbers = {"clean": 100 * tested.clean.value, "vra": 100 * tested.verified[0].accuracy.value}
        for other in needed.values():
            certifiers = both(other, run, eta_for(other, run))
            numbers |= {"eta": certifiers[COLUMNS[1]][0].eta.eta, "apart": certifiers[COLUMNS[1]][0].global_radius}
            for name, split in outliers(other).items():
                for column, (certifier, eps) in certifiers.items():
                    numbers[f"{name}: {column}"] = 100 * rejected(certifier, split, eps).value
        return numbers

    def conclude(self, found: Found) -> StudyReport:
        rows = {name: [found.mean("centroid", f"{name}: {column}") for column in COLUMNS] for name in (TEST, *OUTLIERS)}
        tables = {"Rejected, %": Table([Column(name, digits=1) for name in COLUMNS], rows)}
        accuracy = {row: [found.mean(row, name) for name in ("clean", "vra")] for row in found.rows}
        columns = [Column("test accuracy", "high", 1), Column("verified robust accuracy", "high", 1)]
        tables["Test accuracy and verified robust accuracy, %"] = Table(columns, accuracy)
        eta, apart = (found.mean("centroid", name) for name in ("eta", "apart"))
        words = (
            "A GloRo Net (`moons-gloro`: MLP 100-100, MinMax) and a Centroid Net (`moons-centroid`: 20 centroids a"
            " class in the plane itself), both trained for l2 0.1. GloRo rejects what it cannot certify at 0.1. The"
            " Centroid Net has an eta-layer, eta chosen so that it rejects as many test points"
        )
        if eta is not None and apart is not None:
            words += (
                f" ({eta.value:.2f} on average); it promises that accepted points of different classes are at least"
                f" {apart.value:.3f} apart, on average"
            )
        shape = (
            "In the picture grey is rejected, crosses are centroids. What the eta-layer accepts is closed: far from all"
            " centroids, the distances to two of them hardly differ in proportion. Neither GloRo nor the radius of the"
            " Centroid Net alone does that: both grow with the distance from the boundary."
        )
        return StudyReport(tables, [verdict(found)], _figure(found), [words + ".", shape])


def verdict(found: Found) -> Claim:
    """Whether the eta-layer rejects more outliers of every kind, seed by seed."""
    claim = "A Centroid Net rejects outliers that a GloRo Net accepts, and as many test points"
    apart = {
        name: Difference.of(
            [numbers[f"{name}: {COLUMNS[1]}"] - numbers[f"{name}: {COLUMNS[0]}"] for numbers in found.of("centroid")]
        )
        for name in (TEST, *OUTLIERS)
    }
    if len(found.of("centroid")) < 2 or found.scale == "smoke":
        return Claim(claim, "not testable", "that takes two seeds that are trained to the end")
    more = [apart[name].low > 0 for name in OUTLIERS]
    answer: Answer = "held" if all(more) else "held in part" if any(more) else "did not hold"
    words = "; ".join(f"{name}: {difference.text(1)}" for name, difference in apart.items())
    return Claim(claim, answer, f"points of % that the eta-layer rejects more: {words}")


def outliers(run: Run) -> dict[str, MemorySplit]:
    """The test set, the part of it that gets noise, the square around it, and points far away."""
    x, y = run.data.tensors("test")
    index = torch.arange(len(x))
    streams = PointRNG("outliers", index=index)
    chosen = streams.uniform() < SHARE
    noisy = (x + SIGMA * streams.normal(2))[chosen]
    low, high = SQUARE
    square = low + (high - low) * streams.uniform(2)
    angle = 2 * math.pi * streams.uniform()
    ring = FAR * torch.stack([angle.cos(), angle.sin()], 1)
    splits = (
        MemorySplit(x, y),
        MemorySplit(noisy, y[chosen]),
        MemorySplit(square, torch.zeros_like(y)),
        MemorySplit(ring, torch.zeros_like(y)),
    )
    return dict(zip((TEST, *OUTLIERS), splits, strict=True))


def both(gloro: Run, centroid: Run, eta: float) -> dict[str, tuple[Any, float]]:
    """Three ways to reject, each with the radius that has to be certified."""
    eps, net = gloro.threat.radius, _net(centroid)
    ways = (GloRo.proven(gloro.model().double()), NearestCentroid.proven(net, eta=eta), NearestCentroid.proven(net))
    return dict(zip(COLUMNS, zip(ways, (eps, 0.0, eps), strict=True), strict=True))


def eta_for(gloro: Run, centroid: Run) -> float:
    """The eta whose layer rejects as many test points as GloRo does."""
    test = outliers(gloro)[TEST]
    share = rejected(GloRo.proven(gloro.model().double()), test, gloro.threat.radius).value
    return matching_eta(_net(centroid), test, share)


def matching_eta(model: CentroidNet, split: MemorySplit, share: float) -> float:
    """The eta whose layer rejects that share of the points, to a hundredth."""
    grid = [k / 100 for k in range(100)]
    gaps = [abs(rejected(NearestCentroid.proven(model, eta=eta), split, 0.0).value - share) for eta in grid]
    return grid[gaps.index(min(gaps))]


def _net(run: Run) -> CentroidNet:
    net = run.model().double()
    assert isinstance(net, CentroidNet)
    return net


def _figure(found: Found, side: int = 250) -> dict[str, Figure]:
    """Decisions of the first seed that has both nets."""
    runs = {cell.name: run for cell, run in found.runs.items()}
    for cell, numbers in found.numbers.items():
        if cell.row == "centroid" and {cell.name, *cell.needs} <= runs.keys():
            gloro = runs[cell.needs[0]]
            certifiers = both(gloro, runs[cell.name], numbers["eta"])
            shown = {COLUMNS[0]: certifiers[COLUMNS[0]], f"Centroid, eta {numbers['eta']:g}": certifiers[COLUMNS[1]]}
            return {"decisions": _decisions(shown, outliers(gloro)[TEST], side)}
    return {}


def _decisions(certifiers: Mapping[str, tuple[Certifier, float]], points: MemorySplit, side: int) -> Figure:
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes: Any = figure.subplots(1, len(certifiers), sharey=True)
    axis_values = torch.linspace(*SQUARE, side)
    grid = torch.cartesian_prod(axis_values, axis_values)
    for axis, (name, (certifier, eps)) in zip(axes, certifiers.items(), strict=True):
        answer = certifier(grid).answer(eps).view(side, side).T
        colours = ListedColormap(["0.8", "#b6a0d6", "#a6d6a0"])  # rejected, upper, lower
        axis.pcolormesh(axis_values, axis_values, answer.numpy(), cmap=colours, vmin=-1, vmax=1, rasterized=True)
        for label, colour in ((0, "#50308f"), (1, "#2f7f2a")):
            own = points.images[points.labels == label][:200]
            axis.plot(own[:, 0], own[:, 1], ".", color=colour, markersize=2)
        if isinstance(certifier, NearestCentroid):
            centroids = certifier.centroids
            axis.plot(centroids[:, 0], centroids[:, 1], "kx", markersize=4)
        axis.set_title(name, fontsize=10)
        axis.set_aspect("equal")
    return figure
