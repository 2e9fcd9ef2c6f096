"""Cells and measurements of the locality studies: standard and robust networks on canvases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from atoll.runs.run import Run
from atoll.studies.base import Cell, Numbers, Scale, Study, StudyResults
from atoll.training.checkpoint import Checkpoints

LOSSES = ("standard", "at", "trades")
METHODS, CHEAP = ("SM", "IG", "BIG"), ("SM", "IG")  # the cheap ones need no boundary search
SCORES = {"precision": "P", "recall": "R", "f1": "F1"}
PAIRS = (("SM", "BSM"), ("IG", "BIG"))
START = "start"


@dataclass(frozen=True)
class LocalityScale:
    """Networks and points of a scale.

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
    # The thesis explains 1000 images of ImageNet, with published networks.
    "paper": LocalityScale(
        ("small", "medium", "large"),
        5,
        10_000,
        1000,
        ("data.limit=null", "trainer.epochs=20", "trainer.keep_epochs=[1, 2, 5, 10, 20]"),
    ),
}


class LocalityStudy(Study):
    """Base of the locality studies.

    For each size and seed a standard network is trained first.  The networks that are compared start from its weights
    and differ only in their loss.
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
        """The cheap methods after every epoch of the first network, all methods at the end of the others."""
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
        raise InputError("data: expected a test set with boxes, got one without")
    x, y = to_float(split.fetch(torch.arange(len(split)))), split.labels
    with torch.no_grad():
        correct = model(x.to(_device(model))).argmax(1).cpu() == y
    rows = (correct & usable(boxes, x.shape)).nonzero().squeeze(1)[:count]
    if not len(rows):
        raise InputError("data: expected points that are classified correctly and have usable boxes, got none")
    return x[rows], y[rows], boxes[rows]


def attributions(model: Classifier, x: Tensor, y: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Attributions by method; those that need a boundary share one search."""
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
    """Accuracies (as shares), locality and distances of a checkpoint."""
    # Robustness matters only at the end.
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
    """The numbers of the networks that are compared, without those that they start from."""
    return {cell: numbers for cell, numbers in results.numbers.items() if cell.row.partition(",")[0] in losses}


def robust_minus_standard(
    results: StudyResults, loss: str, name: str, of: Callable[[float], float] = float
) -> list[float]:
    """A number (or a function of it) of robust networks minus that of the standard network of the same start."""
    return [
        difference
        for size in SIZES[results.scale].nets
        for difference in results.paired(f"{loss}, {size}", f"standard, {size}", name, of)
    ]
