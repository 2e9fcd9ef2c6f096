"""Attributions of a subject and how faithful they are: the measurement behind ``atoll explain``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from atoll.data.base import MemorySplit, Split, SubSplit, sample, sample_rows, to_float
from atoll.data.boxes import boxes_of
from atoll.data.decode import decode, image_size
from atoll.distributed import is_main
from atoll.errors import InputError
from atoll.explain.attributions import STANDARD
from atoll.explain.gradients import ATTRIBUTIONS
from atoll.explain.report import AttributionMetrics, Explanation, explain
from atoll.files import write_atomic
from atoll.measure import MEASUREMENTS, Context, Measurement, Result, Settings, execution
from atoll.plots import plot_attributions
from atoll.stats import Estimate
from atoll.subject import Subject
from atoll.threat import Norm

SHOWN = 8  # rows of the pictures
GREY = (0.299, 0.587, 0.114)  # luma of red, green and blue (ITU-R BT.601)


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(Settings):
    """Which attributions, of which points, and how they are checked.

    Args:
        points: number of random points of the split.
        methods: attributions by name.
        norm: norm of boundary distances.
        budget: model calls per point of the boundary search (default: 400).
        pool: training examples that the search may start from.
        sigma: standard deviation of the noise of INFD.
        radius: l2 radius of the local sensitivity.
        checks: points for the sanity check and the local sensitivity, which cost most (0: skip both).
        images: image files to explain instead of points of the data set.
        batch_size: rows per batch.
    """

    kind: ClassVar[str] = "explain"
    points: int | None = 100
    methods: tuple[str, ...] = STANDARD
    norm: Norm = "l2"
    budget: int | None = None
    pool: int = 1000
    sigma: float = 0.1
    radius: float = 0.1
    checks: int = 16
    images: tuple[str, ...] = ()
    batch_size: int = execution(256)

    def __post_init__(self) -> None:
        self.at_least(points=1, pool=0, checks=0, batch_size=1, budget=1)

    def resolve(self, subject: Subject) -> Self:
        for name in self.methods:
            ATTRIBUTIONS.resolve(name)
        return self


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One attribution: what is known about it, means over the points.

    Args:
        undefined: points without an attribution, because no boundary point was found for them.
        infidelity: INFD.
        scaled_infidelity: INFD at the best scale.
        completeness_gap: for attributions along paths.
        sanity_passed: whether the attribution depends on the weights.
        sanity_layers: rank correlation after the layers down to each one were randomized.
        sensitivity: lower bound of the local Lipschitz constant.
        precision: locality: share of the positive attribution that lies on the object.
        recall: share of what lies on the object that is positive.
        f1: their harmonic mean.
    """

    undefined: int
    infidelity: Estimate
    scaled_infidelity: Estimate
    completeness_gap: Estimate | None = None
    sanity_passed: bool | None = None
    sanity_layers: tuple[tuple[str, Estimate], ...] = ()
    sensitivity: Estimate | None = None
    precision: Estimate | None = None
    recall: Estimate | None = None
    f1: Estimate | None = None

    @staticmethod
    def of(metrics: AttributionMetrics) -> MethodResult:
        sanity, locality = metrics.sanity, metrics.locality
        return MethodResult(
            undefined=int(metrics.attributions.flatten(1).isnan().any(1).sum()),
            infidelity=Estimate.mean_of(metrics.infidelity.value),
            scaled_infidelity=Estimate.mean_of(metrics.infidelity.scaled),
            completeness_gap=None if metrics.gap is None else Estimate.mean_of(metrics.gap.abs()),
            sanity_passed=None if sanity is None else bool(sanity.passed),
            sanity_layers=() if sanity is None else tuple(zip(sanity.layers, sanity.means, strict=True)),
            sensitivity=None if metrics.lipschitz is None else Estimate.mean_of(metrics.lipschitz),
            **({} if locality is None else {name: locality.means[name] for name in ("precision", "recall", "f1")}),
        )


@dataclass(frozen=True, kw_only=True)
class ExplainResult(Result):
    """What a model looks at, and whether that is faithful.

    Args:
        predictions: predicted class of every point.
        titles: what each point is: its class, or the name of its file.
        distance: to the decision boundary.
        success: share of points for which a boundary point was found.
        distances: distance of every point, None where no boundary point was found.
        others: the class on the other side.
        searches: how many boundary points each search found.
        calls: model calls per point of the boundary search.
        methods: by name of the attribution.
        pairs: mean distance of attributions to their counterparts at the boundary.
        notes: what was done to the inputs.
    """

    kind: ClassVar[str] = "explain"
    settings: ExplainSettings
    predictions: tuple[str, ...]
    titles: tuple[str, ...]
    distance: Estimate
    success: float
    distances: tuple[float | None, ...]
    others: tuple[str, ...]
    searches: dict[str, int]
    calls: float
    methods: dict[str, MethodResult]
    pairs: dict[str, Estimate]
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Inputs, attributions and boundary points, from the folder of the result."""
        if self.folder is None:
            raise InputError("this result was not stored")
        return load_file(self.folder / "attributions.safetensors")


@MEASUREMENTS.register("explain")
class MeasureExplanation(Measurement):
    """What a model looks at, and whether that is faithful."""

    settings = ExplainSettings
    result = ExplainResult

    def inputs(self, subject: Subject, settings: ExplainSettings) -> Split:
        if settings.images:
            x, _ = read_images([Path(path) for path in settings.images], subject.data.shape)
            return MemorySplit(x, torch.zeros(len(x), dtype=torch.int64))
        whole = subject.data.split(settings.split)
        if not len(whole):
            raise InputError(f"split: the run holds out no {settings.split} points")
        rows = sample_rows(whole, settings.points or len(whole), "explain", settings.split, settings.seed)
        return SubSplit(whole, rows)

    def measure(self, subject: Subject, settings: ExplainSettings, context: Context) -> dict[str, Any]:
        split, device = self.inputs(subject, settings), context.device
        notes: list[str] = []
        x = to_float(split.fetch(torch.arange(len(split))))
        names = [str(name) for name in subject.data.classes]
        labels, boxes = None, None
        if settings.images:
            _, notes = read_images([Path(path) for path in settings.images], subject.data.shape)
            titles = [Path(path).name for path in settings.images]
        else:
            labels, boxes = split.labels, boxes_of(split)
            titles = [names[label] for label in labels]
        pool = None
        if settings.pool:
            pool = sample(subject.data.split("train"), settings.pool, "explain", "pool", settings.seed)[0].to(device)
        explanation = explain(
            subject.model,
            x.to(device),
            methods=settings.methods,
            pool=pool,
            boxes=boxes,
            norm=settings.norm,
            budget=settings.budget,
            bounds=subject.data.bounds,
            sigma=settings.sigma,
            eps=settings.radius,
            check_points=settings.checks,
            batch_size=settings.batch_size,
            seed=settings.seed,
            on_progress=context.on_progress,
        )
        boundary = explanation.boundary
        predictions = [names[label] for label in explanation.target.tolist()]
        if context.folder is not None and is_main():
            _save(explanation, labels, context.folder)
            if x.dim() == 4:
                maps = {name: method.attributions.cpu() for name, method in explanation.methods.items()}
                shown = [f"{a}, seen as {b}" for a, b in zip(titles, predictions, strict=True)]
                picture(context.folder / "attributions.png", x, maps, shown, boxes)
        distances = boundary.distance.tolist()
        return {
            "predictions": tuple(predictions),
            "titles": tuple(titles),
            "distance": Estimate.mean_of(boundary.distance[boundary.success].cpu()),
            "success": float(boundary.success.double().mean()),
            "distances": tuple(d if s else None for d, s in zip(distances, boundary.success.tolist(), strict=True)),
            "others": tuple(names[label] for label in boundary.other.tolist()),
            "searches": {name: boundary.method.count(name) for name in dict.fromkeys(boundary.method)},
            "calls": float(boundary.forward.sum() + boundary.backward.sum()) / len(boundary),
            "methods": {name: MethodResult.of(metrics) for name, metrics in explanation.methods.items()},
            "pairs": {name: Estimate.mean_of(values.cpu()) for name, values in explanation.distances.items()},
            "notes": (*notes, *([boundary.words] if boundary.words else [])),
        }


def read_images(paths: list[Path], shape: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """Image files as the model wants them, and what was done to them."""
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise InputError(f"images: the model takes inputs of {shape}, not square images")
    channels, size = shape[0], shape[1]
    rows, notes = [], []
    for path in paths:
        width, height = image_size(path)
        if (width, height) != (size, size):
            notes.append(f"{path.name}: {width} x {height} pixels, resized and cropped to {size} x {size}")
        pixels = to_float(decode(path, str(path), resize=None if (width, height) == (size, size) else size, size=size))
        if channels == 1:
            pixels = (pixels * pixels.new_tensor(GREY)[:, None, None]).sum(0, keepdim=True)
        rows.append(pixels.clamp(0, 1))
    return torch.stack(rows), notes


def _save(explanation: Explanation, labels: Tensor | None, folder: Path) -> None:
    tensors = {f"attributions/{name}": method.attributions for name, method in explanation.methods.items()}
    names = ("x", "inside", "across", "distance", "prediction")
    tensors |= {name: getattr(explanation.boundary, name) for name in names}
    if labels is not None:
        tensors["label"] = labels
    content = {name: values.cpu().contiguous() for name, values in tensors.items()}
    write_atomic(folder / "attributions.safetensors", save(content))


def picture(path: Path, x: Tensor, maps: dict[str, Tensor], titles: list[str], boxes: Tensor | None = None) -> bool:
    """Draw the first rows for which every map is defined; whether there were any."""
    defined = torch.stack([~values.flatten(1).isnan().any(1) for values in maps.values()]).all(0)
    rows = defined.nonzero().squeeze(1)[:SHOWN]
    if not len(rows):
        return False
    shown = {name: values[rows] for name, values in maps.items()}
    figure = plot_attributions(x[rows], shown, None if boxes is None else boxes[rows], [titles[row] for row in rows])
    figure.savefig(path, dpi=120)
    return True


def side_by_side(results: dict[str, ExplainResult]) -> Path | None:
    """The attributions of several models in one picture, if they explain the same images."""
    tensors = {name: result.tensors() for name, result in results.items()}
    first = next(iter(results))
    x = tensors[first]["x"]
    if x.dim() != 4 or any(t["x"].shape != x.shape or not torch.equal(t["x"], x) for t in tensors.values()):
        return None
    maps = {
        f"{method}, {name}": tensors[name][f"attributions/{method}"]
        for method in results[first].methods
        for name in results
        if method in results[name].methods
    }
    folder = results[first].folder
    assert folder is not None
    path = folder / "side-by-side.png"
    return path if picture(path, x, maps, list(results[first].titles)) else None
