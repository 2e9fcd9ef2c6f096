"""What a GloRo Net and a Centroid Net reject on Two Moons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from atoll.certify import Certifier, GloRo, NearestCentroid
from atoll.certify.evaluate import rejected
from atoll.data.base import MemorySplit
from atoll.models import CentroidNet
from atoll.rng import PointRNG
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import Limits, claim_means
from atoll.studies.table import Column, Table

SQUARE = (-3.0, 4.0)  # the moons are in [-1, 2] x [-0.5, 1]
FAR = 30.0
SHARE = 0.2  # share of the test points with added noise, as in the thesis
SIGMA = 1.0  # standard deviation of the noise; not given in the thesis
TEST = "test points"
OUTLIERS = (
    f"test points with noise of {SIGMA:g}",
    f"uniform in [{SQUARE[0]:g}, {SQUARE[1]:g}]²",
    f"at distance {FAR:g}",
)
LITTLE = 1.0  # percentage points
COLUMNS = ("GloRo", "Centroid, eta layer", "Centroid, by radius")
CENTROIDS = {"centroid": "A Centroid Net", "centroid, encoder": "A Centroid Net with an encoder"}  # by row


class CentroidMoons(Study):
    """Compares inputs that GloRo cannot certify with inputs that the eta layer of a Centroid Net rejects."""

    name = "centroid-moons"
    title = "Two Moons: what is rejected"
    reference = "Thesis, figure 6.4"

    def cells(self, scale: Scale) -> list[Cell]:
        short = ("trainer.epochs=3", "model.hidden=[8]") if scale == "smoke" else ()
        cells = []
        for seed in range(1 if scale == "smoke" else 5):
            gloro = Cell("gloro", seed, "moons-gloro", short)
            small = (*short[:1], "model.encoder={class_path: MLP, init_args: {hidden: [8]}}") if short else ()
            cells += [
                gloro,
                Cell("centroid", seed, "moons-centroid", short[:1], (gloro.name,)),
                Cell("centroid, encoder", seed, "moons-centroid-encoder", small, (gloro.name,)),
            ]
        return cells

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Measure accuracies and, for the Centroid Nets, the shares in % that they and the GloRo Net reject."""
        assert run is not None
        result = run.certify(attack=False)
        numbers: Numbers = {"clean": 100 * result.clean.value, "vra": 100 * result.verified[0].accuracy.value}
        for other in dependencies.values():
            certifiers = certifiers_of(other, run, eta_for(other, run))
            numbers |= {"eta": certifiers[COLUMNS[1]][0].eta.eta, "apart": certifiers[COLUMNS[1]][0].global_radius}
            for name, split in outliers(other).items():
                for column, (certifier, eps) in certifiers.items():
                    numbers[f"{name}: {column}"] = 100 * rejected(certifier, split, eps).value
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        ways = [("centroid", column) for column in COLUMNS] + [("centroid, encoder", column) for column in COLUMNS[1:]]
        shares = {name: [results.mean(row, f"{name}: {way}") for row, way in ways] for name in (TEST, *OUTLIERS)}
        titles = [way if row == "centroid" else f"{way}, with encoder" for row, way in ways]
        accuracy = {row: [results.mean(row, name) for name in ("clean", "vra")] for row in results.rows}
        columns = [Column("test accuracy", "high", 1), Column("verified robust accuracy", "high", 1)]
        return {
            "Rejected, %": Table([Column(title, digits=1) for title in titles], shares),
            "Test accuracy and verified robust accuracy, %": Table(columns, accuracy),
        }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        """Whether the eta layer rejects more outliers of every kind but as many test points, paired by seed."""
        gloro, eta, _ = COLUMNS
        limits: dict[str, Limits] = dict.fromkeys(OUTLIERS, (0.0, math.inf)) | {TEST: (-LITTLE, LITTLE)}
        claims = []
        for row, net in CENTROIDS.items():
            nets = results.of(row)
            more = {name: [n[f"{name}: {eta}"] - n[f"{name}: {gloro}"] for n in nets] for name in (TEST, *OUTLIERS)}
            text = "rejects outliers that a GloRo Net accepts, but the same share of test points"
            claims.append(claim_means(f"{net} {text} (within {LITTLE:g} point)", more, limits))
        return claims

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Decisions of the first seed of each network."""
        runs = {cell.name: run for cell, run in results.runs.items()}
        shown: dict[str, tuple[Any, float]] = {}
        for row, title in (("centroid", "Centroid"), ("centroid, encoder", "Centroid with encoder")):
            for cell, numbers in results.numbers.items():
                if cell.row == row and {cell.name, *cell.depends_on} <= runs.keys():
                    gloro, eta = runs[cell.depends_on[0]], numbers["eta"]
                    certifiers = certifiers_of(gloro, runs[cell.name], eta)
                    shown.setdefault(COLUMNS[0], certifiers[COLUMNS[0]])
                    shown[f"{title}, eta {eta:g}"] = certifiers[COLUMNS[1]]
                    break
        return {"decisions": _decisions(shown, outliers(gloro)[TEST])} if shown else {}

    def notes(self, results: StudyResults) -> Sequence[str]:
        text = (
            "The study compares a GloRo Net (`moons-gloro`: MLP 100-100, MinMax) with Centroid Nets that have 20"
            " centroids per class, either in the plane (`moons-centroid`) or in the features of an encoder"
            " (`moons-centroid-encoder`), which is the GloRo Net without its head. All are trained for l2 0.1. The"
            " GloRo Net rejects inputs that it cannot certify at 0.1. The eta of each Centroid Net is set so that it"
            " rejects the same share of test points."
        )
        eta, distance = (results.mean("centroid", name) for name in ("eta", "apart"))
        if eta is not None and distance is not None:
            text += (
                f" Without an encoder, eta is {eta.value:.2f} on average. It guarantees that accepted points of"
                f" different classes are at least {distance.value:.3f} apart on average."
            )
        return [
            text,
            "In the picture, rejected regions are gray and crosses mark the centroids in the plane. Without an encoder,"
            " the eta layer accepts a bounded region, because far from all centroids the ratio of the distances to any"
            " two of them is close to 1. An encoder can map distant points close to centroids, so this is no longer"
            " guaranteed. GloRo and the certified radius alone accept unbounded regions, because both radii grow with"
            " the distance from the boundary.",
        ]


def outliers(run: Run) -> dict[str, MemorySplit]:
    """Test points, some of them with noise, uniform points in a square around them, and distant points."""
    x, y = run.data.tensors("test")
    index = torch.arange(len(x))
    streams = PointRNG("outliers", index=index)
    noisy = streams.uniform() < SHARE
    shifted = (x + SIGMA * streams.normal(2))[noisy]
    low, high = SQUARE
    square = low + (high - low) * streams.uniform(2)
    angle = 2 * math.pi * streams.uniform()
    ring = FAR * torch.stack([angle.cos(), angle.sin()], 1)
    no_labels = torch.zeros_like(y)
    splits = ((x, y), (shifted, y[noisy]), (square, no_labels), (ring, no_labels))
    return {name: MemorySplit(*split) for name, split in zip((TEST, *OUTLIERS), splits, strict=True)}


def certifiers_of(gloro: Run, centroid: Run, eta: float) -> dict[str, tuple[Any, float]]:
    """Three certifiers that reject inputs, each with the radius that it must certify."""
    eps, net = gloro.threat.radius, _net(centroid)
    ways = (GloRo.proven(gloro.model().double()), NearestCentroid.proven(net, eta=eta), NearestCentroid.proven(net))
    return dict(zip(COLUMNS, zip(ways, (eps, 0.0, eps), strict=True), strict=True))


def eta_for(gloro: Run, centroid: Run) -> float:
    """The eta at which the eta layer rejects as many test points as GloRo."""
    test = outliers(gloro)[TEST]
    share = rejected(GloRo.proven(gloro.model().double()), test, gloro.threat.radius).value
    return matching_eta(_net(centroid), test, share)


def matching_eta(model: CentroidNet, split: MemorySplit, share: float) -> float:
    """The eta at which the eta layer rejects a share of the points, to the nearest hundredth."""
    certifier, grid = NearestCentroid.proven(model), [k / 100 for k in range(100)]
    gaps = [abs(rejected(certifier.with_eta(eta), split, 0.0).value - share) for eta in grid]
    return grid[gaps.index(min(gaps))]


def _net(run: Run) -> CentroidNet:
    net = run.model().double()
    assert isinstance(net, CentroidNet)
    return net


def _decisions(certifiers: Mapping[str, tuple[Certifier, float]], points: MemorySplit, side: int = 250) -> Figure:
    figure = Figure(figsize=(5 * len(certifiers), 4.6), layout="constrained")
    axes: Any = figure.subplots(1, len(certifiers), sharey=True, squeeze=False)[0]
    axis_values = torch.linspace(*SQUARE, side)
    grid = torch.cartesian_prod(axis_values, axis_values)
    for axis, (name, (certifier, eps)) in zip(axes, certifiers.items(), strict=True):
        answer = certifier(grid).answer(eps).view(side, side).T
        colors = ListedColormap(["0.8", "#b6a0d6", "#a6d6a0"])  # rejected, upper, lower
        axis.pcolormesh(axis_values, axis_values, answer.numpy(), cmap=colors, vmin=-1, vmax=1, rasterized=True)
        for label, color in ((0, "#50308f"), (1, "#2f7f2a")):
            own = points.images[points.labels == label][:200]
            axis.plot(own[:, 0], own[:, 1], ".", color=color, markersize=2)
        if isinstance(certifier, NearestCentroid) and certifier.centroids.shape[1] == points.images.shape[1]:
            centroids = certifier.centroids
            axis.plot(centroids[:, 0], centroids[:, 1], "kx", markersize=4)
        axis.set_title(name, fontsize=10)
        axis.set_aspect("equal")
    return figure
