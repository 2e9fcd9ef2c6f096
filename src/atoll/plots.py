"""Matplotlib figures that the caller shows or saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from atoll.data.boxes import check_boxes, known
from atoll.errors import InputError
from atoll.modules import evaluation_mode


class HasMetrics(Protocol):
    """A run, as far as learning curves are concerned."""

    @property
    def folder(self) -> Path: ...

    @property
    def metrics(self) -> list[dict[str, Any]]: ...


def plot_adversarial(
    model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, classes: Sequence[str] | None = None, *, rows: int = 6
) -> Figure:
    """One row per image: clean, perturbation (scaled, gray is no change), adversarial; with the predictions.

    >>> from atoll.models import SmallConvNet
    >>> x = torch.rand(2, 1, 8, 8)
    >>> len(plot_adversarial(SmallConvNet((1, 8, 8), 10), x, x, torch.tensor([3, 5])).axes)
    6
    """
    if x.dim() != 4 or x.shape != x_adv.shape:
        raise InputError(f"expected images of one shape, got {tuple(x.shape)} and {tuple(x_adv.shape)}")
    x, x_adv, y = x[:rows].cpu(), x_adv[:rows].cpu(), y[:rows].cpu()
    device = next(iter(model.parameters()), x).device
    with torch.no_grad(), evaluation_mode(model):
        before, after = (model(batch.to(device)).argmax(1).cpu() for batch in (x, x_adv))
    names = [str(c) for c in classes] if classes is not None else None
    figure = Figure(figsize=(6, 2 * len(x)), layout="constrained")
    axes = figure.subplots(len(x), 3, squeeze=False)
    for row, axis in enumerate(axes):
        delta = x_adv[row] - x[row]
        scale = delta.abs().max().clamp_min(1e-12)
        pictures = (x[row], 0.5 + delta / (2 * scale), x_adv[row])
        titles = (
            f"{_name(before[row], names)} (true {_name(y[row], names)})",
            f"max |change| {float(scale):.3f}",
            _name(after[row], names),
        )
        for place, picture, title in zip(axis, pictures, titles, strict=True):
            color = "black" if title != titles[2] or after[row] == y[row] else "red"
            # matplotlib would read $...$ in a class name as mathematics.
            place.set_title(title, fontsize=9, color=color, parse_math=False)
            _image(place, picture.clamp(0, 1))
    return figure


def plot_curves(runs: HasMetrics | Mapping[str, HasMetrics]) -> Figure:
    """Accuracy over epochs on training and selection data, clean and robust, of one run or several."""
    named = runs if isinstance(runs, Mapping) else {runs.folder.name: runs}
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    for axis, kind in zip(axes, ("clean", "robust"), strict=True):
        for number, (name, run) in enumerate(named.items()):
            records = [r for r in run.metrics if r["kind"] == "epoch"]
            for prefix, style in (("train", ":"), ("validation", "-"), ("test", "--")):
                points = [(r["epoch"], 100 * r[key]) for r in records if (key := f"{prefix}_{kind}") in r]
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"{name}, {prefix}")
        axis.set_title(f"{kind} accuracy in %")
        axis.set_xlabel("epoch")
        if axis.has_data():
            axis.legend(fontsize=8)
    return figure


def plot_certified(curves: Mapping[str, tuple[Tensor, Tensor]], marks: Sequence[float] = ()) -> Figure:
    """Certified accuracy against the radius, of one model or several, with the radii of interest marked.

    >>> radius, accuracy = torch.linspace(0, 1, 3), torch.tensor([0.9, 0.5, 0.0])
    >>> len(plot_certified({"model": (radius, accuracy)}, [0.5]).axes[0].lines)
    2
    """
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    for name, (radius, accuracy) in curves.items():
        axis.plot(radius.numpy(), 100 * accuracy.numpy(), label=name)
    for mark in marks:
        axis.axvline(mark, color="gray", linestyle=":", linewidth=1)
    axis.set_xlabel("radius (l2)")
    axis.set_ylabel("certified accuracy in %")
    axis.set_ylim(0, 100)
    for text in axis.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
    return figure


def plot_prototypes(x: Tensor, prototypes: Tensor, examples: Tensor, *, rows: int = 6) -> Figure:
    """One row per image: the input, its prototype, and training examples close to that.

    >>> x = torch.rand(2, 1, 8, 8)
    >>> len(plot_prototypes(x, x, torch.rand(2, 3, 1, 8, 8)).axes)
    10
    """
    if x.dim() != 4 or x.shape != prototypes.shape or examples.shape[2:] != x.shape[1:]:
        shapes = ", ".join(str(tuple(v.shape)) for v in (x, prototypes, examples))
        raise InputError(f"expected images of one shape, got {shapes}")
    pictures = torch.cat([x[:rows, None].cpu(), prototypes[:rows, None].cpu(), examples[:rows].cpu()], 1)
    count, columns = pictures.shape[:2]
    figure = Figure(figsize=(1.2 * columns, 1.3 * count), layout="constrained")
    for axis, row in zip(figure.subplots(count, columns, squeeze=False), pictures, strict=True):
        for place, picture in zip(axis, row, strict=True):
            _image(place, picture.clamp(0, 1))
    for place, title in zip(figure.axes[:columns], ("input", "prototype", "examples"), strict=False):
        place.set_title(title, fontsize=9)
    return figure


def plot_attributions(
    images: Tensor,
    attributions: Mapping[str, Tensor],
    boxes: Tensor | None = None,
    titles: Sequence[str] | None = None,
    *,
    percentile: float = 99.0,
) -> Figure:
    """One row per image: the image, then a column for each method (of one model or several) with its heat map.

    Attributions are summed over channels and drawn over the image (see ``heat_map``).  Each map has its full color at
    its ``percentile`` of absolute values, so that a single pixel does not wash out the others.

    Args:
        images: ``(N, C, H, W)`` in [0, 1].
        attributions: by the title of their column, ``(N, C, H, W)`` or ``(N, H, W)``.
        boxes: ``(N, 4)``, x1, y1, x2, y2 inclusive, drawn where they are known.
        titles: of the rows.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> maps = {"SM, standard": torch.randn(2, 3, 8, 8), "SM, robust": torch.randn(2, 8, 8)}
    >>> len(plot_attributions(x, maps, torch.tensor([[1, 2, 5, 6], [-1, -1, -1, -1]]), ["cat", "dog"]).axes)
    6
    """
    if images.dim() != 4:
        raise InputError(f"images: expected (N, C, H, W), got {tuple(images.shape)}")
    maps = {}
    for name, values in attributions.items():
        maps[name] = (values.detach().sum(1) if values.dim() == 4 else values.detach()).double().cpu()
        if maps[name].shape != (len(images), *images.shape[2:]):
            raise InputError(f"{name}: expected attributions of {tuple(images.shape)}, got {tuple(values.shape)}")
        if not maps[name].isfinite().all():
            raise InputError(f"{name}: expected finite attributions, got NaN or infinity")
    if boxes is not None:
        check_boxes(boxes, len(images), images.shape, "boxes")
    if titles is not None and len(titles) != len(images):
        raise InputError(f"titles: expected one for each of {len(images)} images, got {len(titles)}")
    images = images.detach().cpu().clamp(0, 1)
    figure = Figure(figsize=(1.6 * (1 + len(maps)), 1.7 * len(images)), layout="constrained")
    axes = figure.subplots(len(images), 1 + len(maps), squeeze=False)
    for row, (image, axis) in enumerate(zip(images, axes, strict=True)):
        _image(axis[0], image)
        for place, values in zip(axis[1:], maps.values(), strict=True):
            _image(place, heat_map(image, values[row], percentile=percentile))
        for place in axis:
            if boxes is not None and bool(known(boxes[row : row + 1])):
                x1, y1, x2, y2 = boxes[row].tolist()
                place.add_patch(Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1, fill=False, edgecolor="gold"))
        if titles is not None:
            _row_title(axis[0], titles[row])
    for place, name in zip(axes[0, 1:], maps, strict=True):
        place.set_title(name, fontsize=9, parse_math=False)
    return figure


def heat_map(image: Tensor, values: Tensor, *, percentile: float = 99.0) -> Tensor:
    """An attribution over its image, ``(3, H, W)``: red supports the class, blue opposes it, gray matters little.

    Args:
        image: ``(C, H, W)`` in [0, 1].
        values: the attribution, ``(H, W)``; it has its full color at its ``percentile`` of absolute values.

    >>> heat_map(torch.zeros(1, 1, 3), torch.tensor([[-2.0, 0.0, 2.0]]))[:, 0].T
    tensor([[0.0000, 0.0000, 1.0000],
            [0.3000, 0.3000, 0.3000],
            [1.0000, 0.0000, 0.0000]])
    """
    size = values.abs()
    # A map with few pixels that are not zero has nothing at its percentile.
    limit = float(size.flatten().quantile(percentile / 100)) or float(size.max()) or 1.0
    strength = (values / limit).clamp(-1, 1).to(image.dtype)
    pale = (0.3 + 0.4 * image.mean(0)).expand(3, *values.shape)  # so that colors stand out from it
    supports, opposes, rest = strength.clamp_min(0), (-strength).clamp_min(0), 1 - strength.abs()
    color = torch.stack([supports + opposes * rest, strength.abs() * rest, opposes + supports * rest])
    return pale * rest + color


def _image(axis: Any, image: Tensor) -> None:
    axis.set(xticks=[], yticks=[])  # the layout would measure their labels, although they are not shown
    axis.set_axis_off()
    axis.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)


def _row_title(axis: Any, title: str) -> None:
    """Label the first picture of a row; its axis is off, so an axis label would be hidden."""
    place = {"rotation": 90, "va": "center", "ha": "right", "transform": axis.transAxes}
    axis.text(-0.05, 0.5, shorten(title, 24, placeholder="…"), fontsize=8, parse_math=False, **place)


def _name(label: Tensor, names: Sequence[str] | None) -> str:
    return names[int(label)] if names is not None else str(int(label))
