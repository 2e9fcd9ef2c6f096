"""Plotly figures as plain data; the page (page.js) colors text and grid, this module the runs."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.curvature.landscape import Landscape
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
WIDE = 20  # ratio of the largest to the smallest loss above which a landscape gets a logarithmic scale


def color(run: int) -> str:
    return PALETTE[run % len(PALETTE)]


def label(value: object) -> str:
    """Escape text for Plotly, which would interpret tags, entities and formulas.

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
    """A line in the color of its run; ``errors`` are the error bars of the points."""
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


def band(points: Sequence[tuple[float, float]], intervals: Sequence[tuple[float, float]], run: int) -> list[Trace]:
    """The 95 % intervals of the accuracies of a step curve, as an area in the color of its run."""
    rows = thin([*zip(points, intervals, strict=False)])
    common = {"type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    x, line = [number(x) for (x, _), _ in rows], {"width": 0, "shape": "hv", "color": color(run)}
    low, high = ([number(100 * ends[side]) for _, ends in rows] for side in (0, 1))
    area = {"fill": "tonexty", "fillcolor": f"{color(run)}22"}
    return [{**common, "x": x, "y": low, "line": line}, {**common, "x": x, "y": high, "line": line, **area}]


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
    scale = LossScale(*ranges[2])
    trace = {
        "type": "surface",
        **_grid(landscape),
        "surfacecolor": _rows(scale.of(landscape.loss)),
        "cmin": scale.ends[0],
        "cmax": scale.ends[1],
        "colorscale": "Viridis",
        "showscale": False,  # that of the contours beside it
        "contours": {"z": {"highlight": False}},
        "hovertemplate": "loss %{z:.4~g}<extra></extra>",
    }
    axes: list[dict[str, Any]] = [
        {"title": {"text": name}, "range": ends, "nticks": 4} for name, ends in zip(names, ranges, strict=True)
    ]
    axes[2] |= {"range": scale.ends, "type": "log" if scale.is_log else "linear"}
    axes[2] |= {"tickmode": "array", "tickvals": [float(text) for _, text in scale.ticks()]}
    scene: dict[str, Any] = dict(zip(("xaxis", "yaxis", "zaxis"), axes, strict=True))
    scene |= {"camera": {"eye": {"x": 1.5, "y": -1.5, "z": 0.8}, "center": {"z": -0.12}}, "aspectmode": "cube"}
    return {"data": [trace], "layout": {"scene": scene, "height": 440, "margin": {"l": 0, "r": 0, "t": 0, "b": 0}}}


def contour(landscape: Landscape, ranges: tuple[Range, Range, Range]) -> Figure:
    """The same from above; it does not need WebGL."""
    scale = LossScale(*ranges[2])
    low, high = scale.ends
    bar = {"thickness": 10, "outlinewidth": 0, "title": {"text": "loss"}, "tickmode": "array"}
    ticks = scale.ticks()
    trace = {
        "type": "contour",
        **_grid(landscape),
        "z": _rows(scale.of(landscape.loss)),
        "text": [[f"{value:.4g}" for value in row] for row in landscape.loss.tolist()],
        "zmin": low,
        "zmax": high,
        "colorscale": "Viridis",
        "colorbar": {**bar, "tickvals": [place for place, _ in ticks], "ticktext": [text for _, text in ticks]},
        "hovertemplate": "%{x:.3~g}, %{y:.3~g}: loss %{text}<extra></extra>",
    }
    if 0 < (high - low) / 20 < math.inf:
        trace |= {"autocontour": False, "contours": {"start": low, "end": high, "size": (high - low) / 20}}
    figure = chart([trace], landscape.axes[1], landscape.axes[0], hovermode="closest", height=440)
    for axis, ends in zip(("xaxis", "yaxis"), ranges, strict=False):
        figure["layout"][axis]["range"] = ends
    return figure


class LossScale:
    """A scale for losses from ``low`` to ``high``: logarithmic if they are positive and far apart, so that a landscape
    that is flat compared with another one keeps its shape.

    >>> LossScale(1.0, 100.0).ends, LossScale(1.0, 2.0).ends, LossScale(-1.0, 100.0).ends
    ([0.0, 2.0], [1.0, 2.0], [-1.0, 100.0])
    >>> LossScale(0.7, 68.2).ticks()
    [(0.0, '1'), (0.699, '5'), (1.0, '10'), (1.699, '50')]
    """

    def __init__(self, low: float, high: float) -> None:
        self.is_log = low > 0 and WIDE * low < high < math.inf
        self.ends = [math.log10(low), math.log10(high)] if self.is_log else [low, high]

    def of(self, loss: Tensor) -> Tensor:
        return loss.log10() if self.is_log else loss

    def ticks(self) -> list[tuple[float, str]]:
        """Places on the scale, and the losses there."""
        low, high = self.ends
        if not self.is_log:
            places = torch.linspace(low, high, 5, dtype=torch.float64).tolist()
            return [(place, f"{place:.3g}") for place in places]
        powers = range(math.floor(low), math.ceil(high) + 1)
        losses = [digit * 10.0**power for power in powers for digit in ((1, 5) if high - low < 4 else (1,))]
        return [(round(math.log10(x), 3), f"{x:g}") for x in losses if low <= math.log10(x) <= high]


def _grid(landscape: Landscape) -> dict[str, list[Any]]:
    """``loss[i, j]`` is at ``a[i]``, ``b[j]``; Plotly wants rows along y."""
    return {"x": _numbers(landscape.b), "y": _numbers(landscape.a), "z": _rows(landscape.loss)}


def _rows(values: Tensor) -> list[list[float | None]]:
    return [_numbers(row) for row in values]


def _numbers(values: Tensor) -> list[float | None]:
    return [number(value) for value in values.tolist()]
