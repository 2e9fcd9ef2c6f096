"""What a GloRo Net and a Centroid Net reject on Two Moons (thesis, figure 6.4).

    python -m benchmarks.results.centroid_moons runs/centroid-moons docs/results/centroid-moons.md

Finished runs are kept.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.certify import Certifier, GloRo, NearestCentroid
from atoll.certify.rejection import rejected
from atoll.data import MemorySplit
from atoll.models import CentroidNet
from atoll.run import Run, train
from atoll.streams import Streams

SQUARE = (-3.0, 4.0)  # the moons are in [-1, 2] x [-0.5, 1]
FAR = 30.0
SHARE = 0.2  # of the test points that get noise, as in the thesis
SIGMA = 1.0  # of that noise; the thesis does not say


def outliers(run: Run) -> dict[str, MemorySplit]:
    """The test set, the part of it that gets noise, the square around it, and points far away."""
    x, y = run.data.tensors("test")
    index = torch.arange(len(x))
    streams = Streams("outliers", index=index)
    chosen = streams.uniform() < SHARE
    noisy = (x + SIGMA * streams.normal(2))[chosen]
    low, high = SQUARE
    square = low + (high - low) * streams.uniform(2)
    angle = 2 * math.pi * streams.uniform()
    ring = FAR * torch.stack([angle.cos(), angle.sin()], 1)
    return {
        "test points": MemorySplit(x, y),
        f"test points with noise of {SIGMA:g}": MemorySplit(noisy, y[chosen]),
        f"uniform in [{low:g}, {high:g}]²": MemorySplit(square, torch.zeros_like(y)),
        f"at distance {FAR:g}": MemorySplit(ring, torch.zeros_like(y)),
    }


def matching_eta(model: CentroidNet, split: MemorySplit, share: float) -> float:
    """The eta whose layer rejects that share of the points, to a hundredth."""
    grid = [k / 100 for k in range(100)]
    gaps = [abs(rejected(NearestCentroid.proven(model, eta=eta), split, 0.0).value - share) for eta in grid]
    return grid[gaps.index(min(gaps))]


def plot(certifiers: dict[str, tuple[Certifier, float]], points: MemorySplit, path: Path) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes: Any = figure.subplots(1, len(certifiers), sharey=True)
    axis_values = torch.linspace(*SQUARE, 250)
    grid = torch.cartesian_prod(axis_values, axis_values)
    for axis, (name, (certifier, eps)) in zip(axes, certifiers.items(), strict=True):
        answer: Tensor = certifier(grid).answer(eps).view(250, 250).T
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
    figure.savefig(path, dpi=80)


def page(rows: list[list[str]], accuracy: dict[str, str], eta: float, eps: float, radius: float, picture: str) -> str:
    return "\n".join(
        [
            "# Two Moons: what is rejected",
            "",
            "A GloRo Net (`moons-gloro`: MLP 100-100, MinMax) and a Centroid Net (`moons-centroid`: 20 centroids a"
            f" class in the plane itself), both trained for l2 {eps:g} (thesis, figure 6.4). GloRo rejects what it"
            f" cannot certify at {eps:g}. The Centroid Net has an eta-layer, eta {eta:g}, chosen so that it rejects as"
            " many test points; it promises that accepted points of different classes are at least"
            f" {radius:.3f} apart.",
            "",
            "    python -m benchmarks.results.centroid_moons runs/centroid-moons docs/results/centroid-moons.md",
            "",
            "| rejected, % | GloRo | Centroid, eta-layer | Centroid, by its radius |",
            "| --- | --- | --- | --- |",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"![decisions]({picture})",
            "",
            "Grey is rejected, crosses are centroids. What the eta-layer accepts is closed: far from all centroids, the"
            " distances to two of them hardly differ in proportion. Neither GloRo nor the radius of the Centroid Net"
            " alone does that: both grow with the distance from the boundary.",
            "",
            "Test accuracy and verified robust accuracy in %: "
            + "; ".join(f"{name} {value}" for name, value in accuracy.items())
            + ".",
            "",
        ]
    )


def main(runs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    trained = {name: train(f"moons-{name}", out=runs / name, resume=True) for name in ("gloro", "centroid")}
    eps, net = trained["gloro"].threat.radius, trained["centroid"].model().double()
    assert isinstance(net, CentroidNet)
    splits = outliers(trained["gloro"])
    gloro = GloRo.proven(trained["gloro"].model().double())
    test = splits["test points"]
    eta = matching_eta(net, test, rejected(gloro, test, eps).value)
    with_layer, alone = NearestCentroid.proven(net, eta=eta), NearestCentroid.proven(net)
    columns = ((gloro, eps), (with_layer, 0.0), (alone, eps))
    rows = [
        [name, *(f"{100 * rejected(certifier, split, r).value:.1f}" for certifier, r in columns)]
        for name, split in splits.items()
    ]
    accuracy = {}
    for name, run in trained.items():
        assert run.result is not None
        best = run.result["best"]
        accuracy[name] = f"{100 * best['clean']['value']:.1f}, {100 * best['vra']['value']:.1f}"
    picture = out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    shown: dict[str, tuple[Certifier, float]] = {"GloRo": (gloro, eps), f"Centroid, eta {eta:g}": (with_layer, 0.0)}
    plot(shown, test, picture)
    out.write_text(page(rows, accuracy, eta, eps, with_layer.global_radius, picture.name))
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
