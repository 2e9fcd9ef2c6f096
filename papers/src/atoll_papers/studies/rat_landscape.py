"""The loss around test images, of nets trained with and without RAT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from atoll.curvature import input_landscape
from atoll.distributed import default_device
from atoll.runs.run import Run
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import SMALL_MNIST, TINY_DIGITS

SHOWN = 4  # images in the figure


@dataclass(frozen=True)
class Setting:
    """Recipes of TRADES without and with RAT, overrides for both, seeds, test images, and steps of the grid."""

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
    shows = "RAT, figures 2 and 3"
    settings = {  # noqa: RUF012
        "smoke": Setting("digits-flat/trades-base", "digits-flat/trades-rat", TINY_DIGITS, 1, 4, 5),
        "cpu": Setting("mnist-flat/trades-base", "mnist-flat/trades-rat", SMALL_MNIST),
        "paper": Setting("rat/cifar10-preact18-linf-trades-0th", "rat/cifar10-preact18-linf-trades-both"),
    }
    rows = ("TRADES", "TRADES + RAT")

    def cells(self, scale: Scale) -> list[Cell]:
        setting = self.settings[scale]
        recipes = zip(self.rows, (setting.base, setting.ours), strict=True)
        return [Cell(row, seed, recipe, setting.overrides) for row, recipe in recipes for seed in range(setting.seeds)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """Mean rise and bend over images, and the loss on the grids of the first ones."""
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

    def conclude(self, found: Found) -> StudyReport:
        columns = {"rise": Column("rise", "low", 4), "bend": Column("bend", "low", 5)}
        rows = {row: [found.mean(row, name) for name in columns] for row in found.rows}
        words = (
            "Rise: the highest loss on the grid minus that of the image itself. Bend: mean absolute second difference"
            " of the loss from one grid point to the next. Both are means over test images, the same for all nets; the"
            " papers show pictures only."
        )
        ours, base = reversed(self.rows)
        verdicts = [
            claim_increase(f"RAT flattens the loss around images: less {name}", found, [(ours, base)], name, sign=-1)
            for name in columns
        ]
        table = Table(list(columns.values()), rows)
        return StudyReport({"The loss around test images": table}, verdicts, {"landscape": _figure(found)}, [words])


def shape(loss: Tensor) -> dict[str, float]:
    """How high the loss on a grid rises above its centre, and how much it bends from one point to the next.

    >>> shape(torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]))  # a slope
    {'rise': 1.0, 'bend': 0.0}
    >>> shape(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))["rise"]  # a dent
    1.0
    """
    bends = torch.cat([loss.diff(n=2, dim=dim).abs().flatten() for dim in (0, 1)])
    middle = loss[loss.shape[0] // 2, loss.shape[1] // 2]
    return {"rise": float(loss.max() - middle), "bend": float(bends.mean())}


def _figure(found: Found) -> Figure:
    """As in the paper: a column for each image, a row for each method; the first seed that each has."""
    first = {row: found.of(row)[0] for row in found.rows if found.of(row)}
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
            axis.set_zlim(float(both.min()), float(both.max()))  # the same for both methods, to see which is flatter
            axis.set_title(f"{row}, image {column}", fontsize=8)
            axis.tick_params(labelsize=6)
    return figure
