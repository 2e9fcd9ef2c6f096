"""Plotly figures as plain data; colours of text and grid are the page's (page.js), those of runs are here."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from atoll.curvature.landscape import Landscape
from atoll.report.values import number, plain
from atoll.stats import Accuracy

Figure = dict[str, Any]
Trace = dict[str, Any]

# One colour per run, legible on white and on black alike.
PALETTE = ("#3b7ddd", "#e2703a", "#1d9a7c", "#a85fc4", "#c99a1e", "#d6457f", "#5f8a2f", "#7a8699")
MOST = 400  # points of a curve
WIDEST = 60  # characters of a label


def colour(run: int) -> str:
    return PALETTE[run % len(PALETTE)]


def label(value: object) -> str:
    """Text that Plotly shows as it is; it would read tags, entities and formulas in it.

    >>> label("<b>R&D</b>"), label("$x$")
    ('&lt;b&gt;R&amp;D&lt;/b&gt;', '&#36;x&#36;')
    """
    text = plain(value)
    return html.escape(text if len(text) <= WIDEST else text[:WIDEST] + "…", quote=False).replace("$", "&#36;")


def thin(points: Sequence[Any], most: int = MOST) -> list[Any]:
    """At most so many of the points, evenly spread, first and last among them.

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
    """A line in the colour of its run; ``errors`` are those of each point, up and down."""
    rows = thin([*zip(points, errors or [None] * len(points), strict=True)])
    trace: Trace = {
        "type": "scatter",
        # A single point makes no line.
        "mode": "lines+markers" if len(rows) < 30 else "lines",
        "name": label(name),
        "x": [number(x) for (x, _), _ in rows],
        "y": [number(y) for (_, y), _ in rows],
        "line": {"color": colour(run), "dash": dash, "shape": shape, "width": 2},
        "marker": {"color": colour(run), "size": 5},
        "hovertemplate": f"%{{y:.4~g}}{unit}<extra>%{{fullData.name}}</extra>",
    }
    if errors is not None:
        trace["error_y"] = {"type": "data", "array": [error for _, error in rows], "thickness": 1.2, "width": 3}
    return trace


def chart(traces: Sequence[Trace], x: str, y: str, **layout: Any) -> Figure:
    """Curves over common axes, compared at each x."""
    return {
        "data": list(traces),
        "layout": {
            "xaxis": {"title": {"text": label(x)}},
            "yaxis": {"title": {"text": label(y)}},
            "hovermode": "x unified",
            **layout,
        },
    }


def percent_axis(y: str) -> dict[str, Any]:
    return {"title": {"text": label(y)}, "range": [-2, 102]}


def dots(rows: Sequence[tuple[str, str, int, Accuracy]]) -> Figure:
    """Accuracies with their intervals, one line for each name (run, name, number of the run, accuracy)."""
    order = list(dict.fromkeys(name for _, name, _, _ in rows))
    runs = list(dict.fromkeys((run, who) for run, _, who, _ in rows))
    traces = []
    for place, (run, who) in enumerate(runs):
        mine = [(name, found) for owner, name, number_, found in rows if (owner, number_) == (run, who)]
        # Runs beside each other, not on top of each other.
        shift = 0.16 * (place - (len(runs) - 1) / 2)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(run),
                "x": [100 * found.value for _, found in mine],
                "y": [order.index(name) + shift for name, _ in mine],
                "customdata": [[label(name), *(100 * end for end in found.interval)] for name, found in mine],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [100 * (found.interval[1] - found.value) for _, found in mine],
                    "arrayminus": [100 * (found.value - found.interval[0]) for _, found in mine],
                    "thickness": 2,
                    "width": 5,
                },
                "marker": {"color": colour(who), "size": 10},
                "hovertemplate": "%{customdata[0]}: %{x:.2f} %, 95 %: %{customdata[1]:.1f}–%{customdata[2]:.1f}"
                "<extra>%{fullData.name}</extra>",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "accuracy in %"}, "range": [-2, 102]},
            "yaxis": _named(order),
            "hovermode": "closest",
            "height": 130 + 46 * len(order),
        },
    }


def bars(series: Mapping[tuple[str, int], Sequence[tuple[str, float]]], x: str) -> Figure:
    """Horizontal bars, one group for each name, one bar in it for each run."""
    order = list(dict.fromkeys(name for rows in series.values() for name, _ in rows))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(run),
            "x": [value for _, value in rows],
            "y": [order.index(name) for name, _ in rows],
            "customdata": [label(name) for name, _ in rows],
            "marker": {"color": colour(who)},
            "hovertemplate": "%{customdata}: %{x:.4~g}<extra>%{fullData.name}</extra>",
        }
        for (run, who), rows in series.items()
    ]
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": label(x)}},
            "yaxis": _named(order),
            "barmode": "group",
            "hovermode": "closest",
            "height": 130 + len(order) * (14 + 12 * len(series)),
        },
    }


def _named(order: Sequence[str]) -> dict[str, Any]:
    """An axis from top to bottom with a name at each whole number; names that look alike when cut stay apart."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(order))),
        "ticktext": [label(name) for name in order],
        "range": [len(order) - 0.5, -0.5],
        "automargin": True,
        "zeroline": False,
    }


def surface(landscape: Landscape) -> Figure:
    """A landscape to turn with the mouse."""
    # In three dimensions Plotly reads tags in a text, but no entities; and strange letters take it seconds to draw.
    names = [axis if re.fullmatch("[A-Za-z ]{1,40}", axis) else "?" for axis in (*landscape.axes[::-1], "loss")]
    axes = [{"title": {"text": name}} for name in names]
    trace = {
        "type": "surface",
        **_grid(landscape),
        "colorscale": "Viridis",
        "colorbar": {"thickness": 10, "len": 0.7, "outlinewidth": 0},
        "contours": {"z": {"show": True, "usecolormap": True, "width": 1}},
        "hovertemplate": "loss %{z:.4~g}<extra></extra>",
    }
    scene: dict[str, Any] = dict(zip(("xaxis", "yaxis", "zaxis"), axes, strict=True))
    scene |= {"camera": {"eye": {"x": 1.7, "y": -1.7, "z": 0.9}}, "aspectmode": "cube"}
    return {"data": [trace], "layout": {"scene": scene, "height": 440, "margin": {"l": 0, "r": 0, "t": 8, "b": 8}}}


def contour(landscape: Landscape) -> Figure:
    """The same from above; it needs no WebGL."""
    trace = {
        "type": "contour",
        **_grid(landscape),
        "colorscale": "Viridis",
        "ncontours": 20,
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{x:.3~g}, %{y:.3~g}: loss %{z:.4~g}<extra></extra>",
    }
    return chart([trace], landscape.axes[1], landscape.axes[0], hovermode="closest", height=440)


def _grid(landscape: Landscape) -> dict[str, list[Any]]:
    """``loss[i, j]`` is at ``a[i]``, ``b[j]``; Plotly wants rows along y."""

    def values(tensor: Tensor) -> list[float | None]:
        return [number(value) for value in tensor.tolist()]

    return {"x": values(landscape.b), "y": values(landscape.a), "z": [values(row) for row in landscape.loss]}
