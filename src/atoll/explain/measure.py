"""The measurement of attributions and their faithfulness, used by ``atoll explain``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from atoll.data.base import Data, MemorySplit, Split, SubSplit, sample_rows, to_float
from atoll.data.boxes import boxes_of
from atoll.data.decode import image_size
from atoll.data.images import check_readable, decode_images
from atoll.display import TextTable, cell
from atoll.distributed import is_main
from atoll.errors import InputError, ResultError
from atoll.explain.attributions import ATTRIBUTIONS, NAMES, STANDARD
from atoll.explain.explanation import AttributionMetrics, Explanation, explain
from atoll.files import write_atomic, write_figure
from atoll.graph import tensors_digest
from atoll.measure import (
    MEASUREMENTS,
    Context,
    Measurement,
    Ranges,
    Result,
    Settings,
    execution,
    foreign_code,
    select,
    split_digest,
)
from atoll.plots import plot_attributions
from atoll.stats import Estimate
from atoll.subject import Subject
from atoll.threat import Norm

SHOWN = 8  # number of rows of figures
CHECKS, FEW_CHECKS = 16, 2  # default number of points of the checks: few for large images
LARGE = 64 * 64  # pixels


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(Settings):
    """Settings of ``atoll explain``: attributions, points and checks.

    Args:
        points: number of random points of the split.
        methods: attributions by name, such as SM or my_map.py:Mine.
        norm: norm of boundary distances.
        budget: model calls per point for the boundary search (default: 400).
        pool: number of training examples from which the search may start.
        sigma: standard deviation of the noise of INFD.
        radius: l2 radius of the local sensitivity.
        checks: number of points for the sanity check and the local sensitivity, which cost the most (0: skip both;
            default: 16, or 2 if images have more than 64 x 64 pixels).
        images: image files to explain instead of points of the data set.
        batch_size: rows per batch (default: chosen to fit memory).
    """

    kind: ClassVar[str] = "explain"
    ranges: ClassVar[Ranges] = {
        "budget": 1, "pool": 0, "sigma": "(0, inf)", "radius": "(0, inf)", "checks": 0, "batch_size": 1
    }  # fmt: skip
    points: int | None = 100
    methods: tuple[str, ...] = STANDARD
    norm: Norm = "l2"
    budget: int | None = None
    pool: int = 1000
    sigma: float = 0.1
    radius: float = 0.1
    checks: int | None = None
    images: tuple[str, ...] = ()
    batch_size: int | None = execution(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.methods:
            raise InputError("methods: expected at least one attribution, got none")

    def resolve(self, subject: Subject) -> Self:
        names = {ATTRIBUTIONS.resolve(name).cls: name for name in NAMES}  # short names, such as SM for Saliency
        methods = dict.fromkeys(names.get(ATTRIBUTIONS.resolve(name).cls, name) for name in self.methods)
        pixels = math.prod(subject.data.shape[-2:])
        checks = self.checks if self.checks is not None else FEW_CHECKS if pixels > LARGE else CHECKS
        return dataclasses.replace(self, methods=tuple(methods), checks=checks)


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """The metrics of one attribution method, as means over the points.

    Args:
        undefined: number of points without an attribution, because the boundary search failed.
        infidelity: INFD.
        scaled_infidelity: INFD at the best scale.
        scale: the factor that minimizes INFD.
        completeness_gap: completeness gap, for path attributions.
        sanity_passed: whether the attribution depends on the weights.
        sanity_layers: rank correlation after randomizing the layers down to each one; of deep networks, to some.
        sensitivity: lower bound of the local Lipschitz constant.
        precision: locality: share of the positive attribution that is on the object.
        recall: locality: share of the attribution on the object that is positive.
        f1: harmonic mean of precision and recall.
        boxes: number of points whose box is known and small enough for locality.
    """

    undefined: int
    infidelity: Estimate
    scaled_infidelity: Estimate
    scale: Estimate | None = None
    completeness_gap: Estimate | None = None
    sanity_passed: bool | None = None
    sanity_layers: tuple[tuple[str, Estimate], ...] = ()
    sensitivity: Estimate | None = None
    precision: Estimate | None = None
    recall: Estimate | None = None
    f1: Estimate | None = None
    boxes: int = 0

    @staticmethod
    def of(metrics: AttributionMetrics) -> MethodResult:
        """Summarize the metrics of one attribution method."""
        sanity, locality = metrics.sanity, metrics.locality
        return MethodResult(
            undefined=int(metrics.attributions.flatten(1).isnan().any(1).sum()),
            infidelity=Estimate.mean_of(metrics.infidelity.value),
            scaled_infidelity=Estimate.mean_of(metrics.infidelity.scaled),
            scale=Estimate.mean_of(metrics.infidelity.scale),
            completeness_gap=None if metrics.gap is None else Estimate.mean_of(metrics.gap.abs()),
            sanity_passed=None if sanity is None else bool(sanity.passed),
            sanity_layers=() if sanity is None else tuple(zip(sanity.layers, sanity.means, strict=True)),
            sensitivity=None if metrics.sensitivity is None else Estimate.mean_of(metrics.sensitivity),
            **({} if locality is None else locality.means),
            boxes=0 if locality is None else len(locality.f1),
        )


@dataclass(frozen=True, kw_only=True)
class ExplainResult(Result):
    """Attributions of a model and their faithfulness.

    Args:
        predictions: predicted class of every point.
        titles: title of every point: its class, or the name of its file.
        distance: mean distance to the decision boundary.
        success: share of points for which the boundary search succeeded.
        methods: metrics by name of the attribution.
        distances: distance of every point to the boundary, None if the search failed.
        others: class on the other side of the boundary for every point.
        searches: number of boundary points by search method.
        calls: model calls per point for the boundary search.
        pairs: mean distance of attributions from their counterparts at the boundary.
        notes: notes about the inputs and the boundary search.
    """

    kind: ClassVar[str] = "explain"
    settings: ExplainSettings
    predictions: tuple[str, ...]
    titles: tuple[str, ...]
    distance: Estimate
    success: float
    methods: dict[str, MethodResult]
    distances: tuple[float | None, ...] = ()
    others: tuple[str, ...] = ()
    searches: dict[str, int] = field(default_factory=dict)
    calls: float = math.nan
    pairs: dict[str, Estimate] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def table(self) -> TextTable:
        columns = {
            "infidelity": "infidelity",
            "at best scale": "scaled_infidelity",
            "completeness gap": "completeness_gap",
            "sanity check passed": "sanity_passed",
            "local sensitivity": "sensitivity",
            "F1 with boxes": "f1",
        }
        names = {
            title: name
            for title, name in columns.items()
            if any(getattr(method, name) is not None for method in self.methods.values())
        }
        short = short_names(self.methods)
        rows = [
            [short[name], *(cell(getattr(method, field)) for field in names.values())]
            for name, method in self.methods.items()
        ]
        distance = f"mean distance to the boundary ({self.settings.norm}): {cell(self.distance)}"
        notes = [f"{distance}, of {100 * self.success:.1f} % of the points"]
        return TextTable(self._title, ["attribution", *names], rows, notes)

    def tensors(self) -> dict[str, Tensor]:
        """Load inputs, attributions and boundary points from the folder of the result."""
        path = self.file("attributions.safetensors")
        if path is None:
            raise ResultError("the attributions of this result were not stored")
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ResultError(f"{path} cannot be read: {error}") from None


@MEASUREMENTS.register("explain", own_name=False)
class MeasureExplanation(Measurement):
    """Attributions of a model and their faithfulness."""

    settings = ExplainSettings
    result = ExplainResult

    def inputs(self, subject: Subject, settings: ExplainSettings) -> Split:
        if settings.images:
            x, _ = read_images(settings.images, subject.data)
            return MemorySplit(x, torch.zeros(len(x), dtype=torch.int64))
        return _sample(subject, settings.split, settings.points, settings.split, settings.seed)

    def depends_on(self, subject: Subject, settings: ExplainSettings, context: Context) -> tuple[str, ...]:
        """Return digests of the pool, the boxes, and the code of attributions from outside Atoll."""
        pool, boxes = _pool(subject, settings), boxes_of(self.inputs(subject, settings))
        return (
            "" if pool is None else split_digest(pool),
            "" if boxes is None else tensors_digest(boxes),
            *foreign_code(ATTRIBUTIONS.resolve(name).cls for name in settings.methods),
        )

    def measure(self, subject: Subject, settings: ExplainSettings, context: Context) -> dict[str, Any]:
        split, pool, device = self.inputs(subject, settings), _pool(subject, settings), context.device
        x = _tensor(split)
        names = [str(name) for name in subject.data.classes]
        labels, boxes = None, None
        notes: list[str] = []
        if settings.images:
            _, notes = read_images(settings.images, subject.data)
            titles = [Path(path).name for path in settings.images]
        else:
            labels, boxes = split.labels, boxes_of(split)
            titles = [names[label] for label in labels]
        explanation = explain(
            subject.model,
            x.to(device),
            methods=settings.methods,
            pool=None if pool is None else _tensor(pool).to(device),
            boxes=boxes,
            norm=settings.norm,
            budget=settings.budget,
            bounds=subject.data.bounds,
            sigma=settings.sigma,
            eps=settings.radius,
            check_points=settings.checks or 0,
            batch_size=settings.batch_size,
            seed=settings.seed,
            on_progress=context.on_progress,
        )
        boundary = explanation.boundary
        predictions = [names[label] for label in explanation.target.tolist()]
        if context.folder is not None and is_main():
            _save(explanation, labels, context.folder)
            if x.dim() == 4:
                short = short_names(explanation.methods)
                maps = {short[name]: method.attributions.cpu() for name, method in explanation.methods.items()}
                captions = [f"{a}, predicted {b}" for a, b in zip(titles, predictions, strict=True)]
                picture(context.folder / "attributions.png", x, maps, captions, boxes)
        return {
            "predictions": tuple(predictions),
            "titles": tuple(titles),
            "distance": Estimate.mean_of(boundary.distance[boundary.success].cpu()),
            "success": float(boundary.success.double().mean()),
            "distances": tuple(d if math.isfinite(d) else None for d in boundary.distance.tolist()),
            "others": tuple(names[label] for label in boundary.other.tolist()),
            "searches": {name: boundary.method.count(name) for name in dict.fromkeys(boundary.method)},
            "calls": float(boundary.calls.sum()) / len(boundary),
            "methods": {name: MethodResult.of(metrics) for name, metrics in explanation.methods.items()},
            "pairs": {name: Estimate.mean_of(values.cpu()) for name, values in explanation.distances.items()},
            "notes": (*notes, *boundary.notes),
        }


def _sample(subject: Subject, name: str, points: int | None, *seed: object) -> Split:
    """Return random points of a split."""
    split = select(subject.data, name, None)
    return SubSplit(split, sample_rows(split, points or len(split), "explain", *seed))


def _pool(subject: Subject, settings: ExplainSettings) -> Split | None:
    """Return training examples from which the boundary search may start."""
    return _sample(subject, "train", settings.pool, "pool", settings.seed) if settings.pool else None


def _tensor(split: Split) -> Tensor:
    return to_float(split.fetch(torch.arange(len(split))))


def read_images(files: Sequence[str], data: Data) -> tuple[Tensor, list[str]]:
    """Read image files as inputs of the model, and return them with notes about resizing."""
    images, faults = decode_images(data, [Path(file) for file in files], data.shape, fit=True)
    check_readable(faults, len(files))
    height, width = data.shape[1:]
    sizes = [(Path(file).name, *image_size(Path(file))) for file in files]
    notes = [
        f"{name}: {own_width} x {own_height} pixels, resized and cropped to {width} x {height}"
        for name, own_width, own_height in sizes
        if (own_width, own_height) != (width, height)
    ]
    return to_float(images), notes


def _save(explanation: Explanation, labels: Tensor | None, folder: Path) -> None:
    tensors = {f"attributions/{name}": method.attributions for name, method in explanation.methods.items()}
    names = ("x", "x_inside", "x_outside", "distance", "prediction")
    tensors |= {name: getattr(explanation.boundary, name) for name in names}
    if labels is not None:
        tensors["label"] = labels
    content = {name: values.cpu().contiguous() for name, values in tensors.items()}
    write_atomic(folder / "attributions.safetensors", save(content))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short names of attributions for tables and figures: the class of a file or module, if it is unique.

    >>> short_names(["SM", "maps/my_map.py:Mine"])
    {'SM': 'SM', 'maps/my_map.py:Mine': 'Mine'}
    """
    short = {name: name.rpartition(":")[2].rpartition(".")[2] for name in names}
    return {name: label if list(short.values()).count(label) == 1 else name for name, label in short.items()}


def picture(path: Path, x: Tensor, maps: dict[str, Tensor], titles: list[str], boxes: Tensor | None = None) -> bool:
    """Plot the first rows for which every map is defined; returns whether there are any."""
    defined = torch.stack([~values.flatten(1).isnan().any(1) for values in maps.values()]).all(0)
    rows = defined.nonzero().squeeze(1)[:SHOWN]
    if not len(rows):
        return False
    selected = {name: values[rows] for name, values in maps.items()}
    boxes = None if boxes is None else boxes[rows]
    figure = plot_attributions(x[rows], selected, boxes, [titles[row] for row in rows])
    write_figure(path, figure)
    return True


def side_by_side(results: dict[str, ExplainResult]) -> Path | None:
    """Plot the attributions of several models in one figure, if they explain the same images."""
    tensors = {name: result.tensors() for name, result in results.items()}
    first = next(iter(results))
    x = tensors[first]["x"]
    if x.dim() != 4 or any(t["x"].shape != x.shape or not torch.equal(t["x"], x) for t in tensors.values()):
        return None
    maps = {
        f"{label}, {name}": tensors[name][f"attributions/{method}"]
        for method, label in short_names(results[first].methods).items()
        for name in results
        if method in results[name].methods
    }
    folder = results[first].folder
    assert folder is not None
    path = folder / "side-by-side.png"
    return path if picture(path, x, maps, list(results[first].titles)) else None
