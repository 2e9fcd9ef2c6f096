"""Plotly figures as plain data, and pictures; the page (page.js) colors text and grid, this module the runs."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from atoll.curvature.landscape import Landscape
from atoll.data.decode import decode
from atoll.report.text import number, plain
from atoll.stats import Accuracy

Figure = dict[str, Any]
Trace = dict[str, Any]
Range = list[float]

# One color per run, legible on white and on black.
PALETTE = ("#3b7ddd", "#e2703a", "#1d9a7c", "#a85fc4", "#c99a1e", "#d6457f", "#5f8a2f", "#7a8699")
MOST = 400  # points of a curve
WIDEST = 60  # characters of a label
PERCENT = [-2, 102]  # range of an axis
PICTURE = (1200, 2400)  # largest width and height of a picture in pixels


def color(run: int) -> str:
    return PALETTE[run % len(PALETTE)]


def label(value: object) -> str:
    """Text that Plotly shows as it is; it would interpret tags, entities and formulas.

    >>> label("<b>R&D</b>"), label("$x$")
    ('&lt;b&gt;R&amp;D&lt;/b&gt;', '&#36;x&#36;')
    """
    text = plain(value)
    return html.escape(text if len(text) <= WIDEST else text[:WIDEST] + "…", quote=False).replace("$", "&#36;")


def thin(points: Sequence[Any], most: int = MOST) -> list[Any]:
    """At most this many of the points, evenly spread, with the first and the last.

    >>> thin([0, 1, 2, 3, 4, 5, 6], 3), thin([0, 1], 3)
    ([0, 3, 6], [0, 1])
    """
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def curve(
    name: str,
    points: Sequence[tuple[float, float]],
    run: int,
    *,
    dash: str = "solid",
    shape: str = "linear",
    unit: str = "",
    errors: Sequence[float | None] | None = None,
) -> Trace:
    """A line in the color of its run; ``errors`` are those of each point, up and down."""
    rows = thin([*zip(points, errors or [None] * len(points), strict=True)])
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(rows) < 30 else "lines",  # a single point has no line
        "name": label(name),
        "x": [number(x) for (x, _), _ in rows],
        "y": [number(y) for (_, y), _ in rows],
        "line": {"color": color(run), "dash": dash, "shape": shape, "width": 2},
        "marker": {"color": color(run), "size": 5},
        "hovertemplate": f"%{{y:.4~g}}{unit}<extra>%{{fullData.name}}</extra>",
    }
    if errors is not None:
        trace["error_y"] = {"type": "data", "array": [error for _, error in rows], "thickness": 1.2, "width": 3}
    return trace


def chart(traces: Sequence[Trace], x: str, y: str, yaxis: Mapping[str, Any] | None = None, **layout: Any) -> Figure:
    """Curves over common axes, compared at each x."""
    axes = {"xaxis": {"title": {"text": label(x)}}, "yaxis": {"title": {"text": label(y)}, **(yaxis or {})}}
    return {"data": list(traces), "layout": {**axes, "hovermode": "x unified", **layout}}


def dots(series: Mapping[tuple[str, int], Mapping[str, Accuracy]]) -> Figure:
    """Accuracies with their intervals, one line for each name; series are by name and number of the run."""
    order = list(dict.fromkeys(name for accuracies in series.values() for name in accuracies))
    traces = []
    for place, ((run, who), accuracies) in enumerate(series.items()):
        shift = 0.16 * (place - (len(series) - 1) / 2)  # runs beside each other, not on top of each other
        rows = [(name, value, *value.interval) for name, value in accuracies.items() if value.total]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(run),
                "x": [100 * value.value for _, value, _, _ in rows],
                "y": [order.index(name) + shift for name, *_ in rows],
                "customdata": [[label(name), 100 * low, 100 * high] for name, _, low, high in rows],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [100 * (high - value.value) for _, value, _, high in rows],
                    "arrayminus": [100 * (value.value - low) for _, value, low, _ in rows],
                    "thickness": 2,
                    "width": 5,
                },
                "marker": {"color": color(who), "size": 10},
                "hovertemplate": "%{customdata[0]}: %{x:.2f} %, 95 %: %{customdata[1]:.1f}–%{customdata[2]:.1f}"
                "<extra>%{fullData.name}</extra>",
            }
        )
    axis = {"title": {"text": "accuracy in %"}, "range": PERCENT}
    layout = {"xaxis": axis, "yaxis": _names(order), "hovermode": "closest", "height": 150 + 46 * len(order)}
    return {"data": traces, "layout": layout}


def bars(series: Mapping[tuple[str, int], Sequence[tuple[str, float]]], x: str) -> Figure:
    """Horizontal bars, one group for each name, one bar in it for each run."""
    order = list(dict.fromkeys(name for rows in series.values() for name, _ in rows))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(run),
            "x": [number(value) for _, value in rows],
            "y": [order.index(name) for name, _ in rows],
            "customdata": [label(name) for name, _ in rows],
            "marker": {"color": color(who)},
            "hovertemplate": "%{customdata}: %{x:.4~g}<extra>%{fullData.name}</extra>",
        }
        for (run, who), rows in series.items()
    ]
    layout = {"xaxis": {"title": {"text": label(x)}}, "yaxis": _names(order), "barmode": "group"}
    height = 150 + len(order) * (14 + 12 * len(series))
    return {"data": traces, "layout": {**layout, "hovermode": "closest", "height": height}}


def _names(order: Sequence[str]) -> dict[str, Any]:
    """An axis from top to bottom with a name at each integer; names that look alike when cut stay apart."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(order))),
        "ticktext": [label(name) for name in order],
        "range": [len(order) - 0.5, -0.5],
        "automargin": True,
        "zeroline": False,
    }


def common_ranges(landscapes: Sequence[Landscape]) -> tuple[Range, Range, Range]:
    """Ranges of both axes and of the loss that all landscapes fit into, so that they can be compared."""

    def ends(tensors: Sequence[Tensor]) -> Range:
        values = torch.cat([tensor[tensor.isfinite()] for tensor in tensors])
        return [values.min().item(), values.max().item()]

    x, y, z = (ends([getattr(each, name) for each in landscapes]) for name in ("b", "a", "loss"))
    return x, y, z


def surface(landscape: Landscape, ranges: tuple[Range, Range, Range]) -> Figure:
    """A landscape in three dimensions."""
    # In three dimensions Plotly reads tags in a text, but no entities; and unusual letters take it seconds to draw.
    names = [axis if re.fullmatch("[A-Za-z ]{1,40}", axis) else "?" for axis in (*landscape.axes[::-1], "loss")]
    trace = {
        "type": "surface",
        **_grid(landscape),
        "cmin": ranges[2][0],
        "cmax": ranges[2][1],
        "colorscale": "Viridis",
        "showscale": False,  # that of the contours beside it
        "contours": {"z": {"show": True, "usecolormap": True, "width": 1}},
        "hovertemplate": "loss %{z:.4~g}<extra></extra>",
    }
    axes = [{"title": {"text": name}, "range": ends} for name, ends in zip(names, ranges, strict=True)]
    scene: dict[str, Any] = dict(zip(("xaxis", "yaxis", "zaxis"), axes, strict=True))
    scene |= {"camera": {"eye": {"x": 1.5, "y": -1.5, "z": 0.8}, "center": {"z": -0.12}}, "aspectmode": "cube"}
    return {"data": [trace], "layout": {"scene": scene, "height": 440, "margin": {"l": 0, "r": 0, "t": 0, "b": 0}}}


def contour(landscape: Landscape, ranges: tuple[Range, Range, Range]) -> Figure:
    """The same from above; it does not need WebGL."""
    low, high = ranges[2]
    trace = {
        "type": "contour",
        **_grid(landscape),
        "zmin": low,
        "zmax": high,
        "colorscale": "Viridis",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "loss"}, "tickformat": ".3~g"},
        "hovertemplate": "%{x:.3~g}, %{y:.3~g}: loss %{z:.4~g}<extra></extra>",
    }
    if 0 < (high - low) / 20 < float("inf"):
        trace |= {"autocontour": False, "contours": {"start": low, "end": high, "size": (high - low) / 20}}
    figure = chart([trace], landscape.axes[1], landscape.axes[0], hovermode="closest", height=440)
    for axis, ends in zip(("xaxis", "yaxis"), ranges, strict=False):
        figure["layout"][axis]["range"] = ends
    return figure


def _grid(landscape: Landscape) -> dict[str, list[Any]]:
    """``loss[i, j]`` is at ``a[i]``, ``b[j]``; Plotly wants rows along y."""

    def values(tensor: Tensor) -> list[float | None]:
        return [number(value) for value in tensor.tolist()]

    return {"x": values(landscape.b), "y": values(landscape.a), "z": [values(row) for row in landscape.loss]}


def embedded(path: Path) -> str:
    """A picture as a data URI, decoded and encoded again so that only pixels get in; a DataError if it is broken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (4, 3)).save(Path(folder, "small.png"))
    ...     embedded(Path(folder, "small.png"))[:22]
    'data:image/png;base64,'
    """
    image = Image.fromarray(decode(path, path.name).permute(1, 2, 0).contiguous().numpy())
    image.thumbnail(PICTURE)
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
