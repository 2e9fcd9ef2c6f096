"""The loss around test images of networks trained with and without RAT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from atoll.curvature import input_landscape
from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS

SHOWN = 4  # images in the figure
COLUMNS = {"rise": Column("rise", "low", 4), "bend": Column("bend", "low", 5)}


@dataclass(frozen=True)
class LandscapeSetting:
    """Recipes of TRADES without and with RAT, overrides for both, seeds, test images, and steps of the loss grid."""

    base: str
    ours: str
    overrides: tuple[str, ...] = ()
    seeds: int = 3
    images: int = 100
    steps: int = 21


class RATLandscape(Study):
    """Loss at x + a sign(gradient) + b (random signs), for a and b within eps, image by image."""

    name = "rat-landscape"
    title = "The loss around test images with and without RAT"
    reference = "RAT, figures 2 and 3"
    settings = {  # noqa: RUF012
        "smoke": LandscapeSetting("digits-flat/trades-base", "digits-flat/trades-rat", TINY_DIGITS, 1, 4, 5),
        "cpu": LandscapeSetting("mnist-flat/trades-base", "mnist-flat/trades-rat", SMALL_MNIST),
        "paper": LandscapeSetting("rat/cifar10-preact18-linf-trades-0th", "rat/cifar10-preact18-linf-trades-both"),
    }
    rows = ("TRADES", "TRADES + RAT")

    def cells(self, scale: Scale) -> list[Cell]:
        setting = self.settings[scale]
        recipes = zip(self.rows, (setting.base, setting.ours), strict=True)
        return [Cell(row, seed, recipe, setting.overrides) for row, recipe in recipes for seed in range(setting.seeds)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        """Mean rise and bend over images, and the loss on the grids of the first images."""
        assert run is not None
        setting = self.settings[scale]
        model, radius = run.model().to(default_device()), run.threat.radius
        x, y = run.data.tensors("test", setting.images)
        grids = [
            input_landscape(model, *one, radius=radius, steps=setting.steps, seed=("image", number)).loss
            for number, one in enumerate(zip(torch.split(x, 1), torch.split(y, 1), strict=True))
        ]
        shapes = [shape(grid) for grid in grids]
        numbers = {name: sum(each[name] for each in shapes) / len(shapes) for name in shapes[0]}
        return numbers | {"grids": [grid.tolist() for grid in grids[:SHOWN]], "radius": radius}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        rows = {row: [results.mean(row, name) for name in COLUMNS] for row in results.rows}
        return {"The loss around test images": Table(list(COLUMNS.values()), rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        base, ours = self.rows
        claim = "RAT flattens the loss around images: less"
        return [claim_increase(f"{claim} {name}", results, [(ours, base)], name, sign=-1) for name in COLUMNS]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"landscape": _figure(results)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Rise: the highest loss on the grid minus that of the image itself. Bend: mean absolute second difference"
            " of the loss from one grid point to the next. Both are means over test images, the same for all networks."
            " The papers only show pictures."
        ]


def shape(loss: Tensor) -> dict[str, float]:
    """How high the loss on a grid rises above its center, and how much it bends from one point to the next.

    >>> shape(torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]))  # a slope
    {'rise': 1.0, 'bend': 0.0}
    >>> shape(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))["rise"]  # a dent
    1.0
    """
    bends = torch.cat([loss.diff(n=2, dim=dim).abs().flatten() for dim in (0, 1)])
    middle = loss[loss.shape[0] // 2, loss.shape[1] // 2]
    return {"rise": float(loss.max() - middle), "bend": float(bends.mean())}


def _figure(results: StudyResults) -> Figure:
    """A column per image and a row per method, as in the paper; the first seed of each."""
    first = {row: results.of(row)[0] for row in results.rows if results.of(row)}
    columns = max(len(numbers["grids"]) for numbers in first.values())
    figure = Figure(figsize=(3 * columns, 3 * len(first)), layout="constrained")
    for line, (row, numbers) in enumerate(first.items()):
        for column, grid in enumerate(numbers["grids"]):
            axis: Any = figure.add_subplot(len(first), columns, line * columns + column + 1, projection="3d")
            loss = torch.tensor(grid)
            ticks = torch.linspace(-numbers["radius"], numbers["radius"], len(loss))
            a, b = torch.meshgrid(ticks, ticks, indexing="ij")
            axis.plot_surface(a.numpy(), b.numpy(), loss.numpy(), cmap="viridis")
            both = torch.stack([torch.tensor(other["grids"][column]) for other in first.values()])
            axis.set_zlim(float(both.min()), float(both.max()))  # the same for both methods, to compare them
            axis.set_title(f"{row}, image {column}", fontsize=8)
            axis.tick_params(labelsize=6)
    return figure
