"""The loss around test images, for networks trained with and without RAT."""

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
from atoll.studies.base import Cell, Claim, Numbers, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS, TRADES_AND_RAT, RecipeStudy, Setting, mean_table

SHOWN = 4  # images in the figure
COLUMNS = {"rise": Column("rise", "low", 4), "bend": Column("bend", "low", 5)}


@dataclass(frozen=True)
class LandscapeSetting(Setting):
    """Number of grid points per direction."""

    steps: int = 21


class RATLandscape(RecipeStudy[LandscapeSetting]):
    """Loss at x + a sign(gradient) + b (random signs) for each image, with a and b in [-eps, eps]."""

    name = "rat-landscape"
    title = "The loss around test images with and without RAT"
    reference = "RAT, figures 2 and 3"
    settings = {  # noqa: RUF012
        "smoke": LandscapeSetting(TRADES_AND_RAT["smoke"], points=4, steps=5, seeds=1, overrides=TINY_DIGITS),
        "cpu": LandscapeSetting(TRADES_AND_RAT["cpu"], points=100, overrides=SMALL_MNIST),
        "paper": LandscapeSetting(TRADES_AND_RAT["paper"], points=100),
    }
    rows = ("TRADES", "TRADES + RAT")

    def measure_run(self, run: Run, cell: Cell, setting: LandscapeSetting) -> Numbers:
        """Measure mean rise and bend over images, and the loss grids of the first images."""
        model, radius = run.model().to(default_device()), run.threat.radius
        x, y = run.data.tensors("test", setting.points)
        grids = [
            input_landscape(model, *one, radius=radius, steps=setting.steps, seed=("image", number)).loss
            for number, one in enumerate(zip(torch.split(x, 1), torch.split(y, 1), strict=True))
        ]
        shapes = [shape(grid) for grid in grids]
        numbers = {name: sum(each[name] for each in shapes) / len(shapes) for name in shapes[0]}
        return numbers | {"grids": [grid.tolist() for grid in grids[:SHOWN]], "radius": radius}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"The loss around test images": mean_table(results, COLUMNS)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        base, ours = self.rows
        claim = "RAT flattens the loss around images: less"
        return [claim_increase(f"{claim} {name}", results, [(ours, base)], name, sign=-1) for name in COLUMNS]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """One column per image and one row per method, as in the paper, for the first seed of each."""
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
        return {"landscape": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Rise is the highest loss on the grid minus the loss of the image itself. Bend is the mean absolute second"
            " difference of the loss between neighboring grid points. Both are means over test images, which are the"
            " same for all networks. The papers only show pictures."
        ]


def shape(loss: Tensor) -> dict[str, float]:
    """How high the loss on a grid rises above its center, and how much it bends between neighboring points.

    >>> shape(torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]))  # a slope
    {'rise': 1.0, 'bend': 0.0}
    >>> shape(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))["rise"]  # a dent
    1.0
    """
    bends = torch.cat([loss.diff(n=2, dim=dim).abs().flatten() for dim in (0, 1)])
    middle = loss[loss.shape[0] // 2, loss.shape[1] // 2]
    return {"rise": float(loss.max() - middle), "bend": float(bends.mean())}
