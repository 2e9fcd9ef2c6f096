"""What the studies of locality share: standard and robust nets on canvases, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.attacks import PGD
from atoll.attacks.evaluate import evaluate
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
from atoll.studies.base import Cell, Found, Numbers, Scale, Study
from atoll.training.checkpoint import Checkpoints

LOSSES = ("standard", "at", "trades")
METHODS, CHEAP = ("SM", "IG", "BIG"), ("SM", "IG")  # the latter without a boundary search, also after every epoch
SCORES = {"precision": "P", "recall": "R", "f1": "F1"}
PAIRS = (("SM", "BSM"), ("IG", "BIG"))
START = "start"


@dataclass(frozen=True)
class Size:
    """How much a scale takes.

    Args:
        nets: sizes of the book ``canvas``.
        seeds: how many.
        points: test points for accuracies.
        explained: of these, as many that are classified correctly and have a usable box.
        overrides: for every recipe.
    """

    nets: tuple[str, ...]
    seeds: int
    points: int
    explained: int
    overrides: tuple[str, ...] = ()


SIZES: Mapping[Scale, Size] = {
    "smoke": Size(
        ("small",),
        1,
        20,
        2,
        (
            *("data.data=Digits", "data.size=10", "data.clutter=1", "data.limit=300"),
            *("threat.eps=0.02", "trainer.batch_size=20", "trainer.epochs=2", "trainer.keep_epochs=[1, 2]"),
        ),
    ),
    "cpu": Size(("small", "medium", "large"), 3, 500, 100),
    # The thesis takes 1000 images; its nets were trained by others, on ImageNet.
    "paper": Size(
        ("small", "medium", "large"),
        5,
        10_000,
        1000,
        ("data.limit=null", "trainer.epochs=20", "trainer.keep_epochs=[1, 2, 5, 10, 20]"),
    ),
}


class LocalityStudy(Study):
    """For each size and seed a standard net is trained first; the nets that are compared start from it and differ in
    their loss only."""

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

    def overrides(self, cell: Cell, needed: Mapping[str, Run]) -> tuple[str, ...]:
        weights = [run.checkpoint_path("last").resolve() / "model.safetensors" for run in needed.values()]
        return (*cell.overrides, *(f"pretrained={path}" for path in weights))

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        """Of the net that others start from, epoch by epoch, what is cheap; of the others all, at the end."""
        assert run is not None
        steps = Checkpoints(run.folder / "checkpoints").steps()
        if cell.needs:
            return measured(run, steps[-1], METHODS, SIZES[scale])
        return {"epochs": [measured(run, step, CHEAP, SIZES[scale]) for step in steps]}


def points_of(run: Run, size: Size) -> SubSplit:
    """The same random test points for every net; some data sets are sorted by class."""
    test = run.data.test
    return SubSplit(test, sample_rows(test, size.points, "locality"))


def explained(model: Classifier, split: SubSplit, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and boxes of points that are classified correctly and have a usable box."""
    boxes = boxes_of(split)
    if boxes is None:
        raise InputError("data: expected a test set with boxes, got one without")
    x, y = to_float(split.fetch(torch.arange(len(split)))), split.labels
    with torch.no_grad():
        right = model(x.to(_device(model))).argmax(1).cpu() == y
    rows = (right & usable(boxes, x.shape)).nonzero().squeeze(1)[:count]
    if not len(rows):
        raise InputError("data: expected points that the net classifies correctly, with usable boxes, got none")
    return x[rows], y[rows], boxes[rows]


def attributions(model: Classifier, x: Tensor, y: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """By method; those that need a boundary share one search."""
    x, y = x.to(_device(model)), y.to(_device(model))
    boundary = boundary_search(model, x) if {"BSM", "BIG"} & set(names) else None
    found = {}
    for name in names:
        shared: dict[str, Any] = {"boundary": boundary} if name in ("BSM", "BIG") else {}
        found[name] = attribution(name, model).attribute(x, y, **shared).cpu()
    return found


def _device(model: Classifier) -> torch.device:
    return next(model.parameters()).device


def measured(run: Run, step: int, methods: Sequence[str], size: Size) -> Numbers:
    """Accuracies (shares), locality and distances of a checkpoint."""
    device = default_device()
    model, split = run.model(step).to(device), points_of(run, size)
    # Whether a net of an early epoch is robust is not asked.
    attacks = {"PGD-20": PGD(run.threat, steps=20)} if "BIG" in methods else {}
    accuracy = evaluate(model, split, attacks, seed="evaluation", check=False, device=device)
    x, y, boxes = explained(model, split, size.explained)
    maps = attributions(model, x, y, (*methods, "BSM") if "BIG" in methods else methods)
    found: Numbers = {name: share.value for name, share in accuracy.accuracy.items()} | {"points": len(x)}
    for name in methods:
        result = locality(maps[name], boxes)
        found |= {f"{name} {score}": result.means[score].value for score in SCORES}
        found[f"{name} undefined"] = result.undefined["f1"]
    for near, far in PAIRS if "BIG" in methods else ():
        gap, length = distance(maps[near], maps[far]), maps[near].flatten(1).norm(dim=1)
        found |= {f"{near}-{far}": gap.mean().item(), f"{near}-{far}, relative": (gap / length).mean().item()}
    sides = (boxes[:, 2:] - boxes[:, :2] + 1).double()
    found["share of the box"] = (sides.prod(1) / (x.shape[-1] * x.shape[-2])).mean().item()
    return found


def ends(found: Found, *losses: str) -> dict[Cell, Numbers]:
    """What was measured of the nets that are compared, not of those they start from."""
    return {cell: numbers for cell, numbers in found.numbers.items() if cell.row.partition(",")[0] in losses}


def apart(found: Found, loss: str, name: str, of: Callable[[float], float] = float) -> list[float]:
    """A number (or a function of it) of robust nets minus that of the standard net of the same start."""
    return [
        difference
        for size in SIZES[found.scale].nets
        for difference in found.paired(f"{loss}, {size}", f"standard, {size}", name, of)
    ]
