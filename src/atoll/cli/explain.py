"""Explain the predictions of trained models with attributions, and measure how faithful these are.

The command explains the predicted class of some test points, or of image files. The default methods are SM, IxG, IG
and SG, and their counterparts at the closest decision boundary, BSM and BIG. If the data set has bounding boxes, it
also measures how much of the attribution lies on the object.

Results and figures are stored in RUN/results. Rerun the same command to show them again.

Examples:
  atoll explain runs/digits-at
  atoll explain runs/digits-standard runs/digits-at --points 200
  atoll explain runs/digits-at three.png
  atoll explain runs/digits-at --methods SM,BIG --checks 0
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.measure import add_flags, run_measurement
from atoll.cli.output import print_lines, print_table
from atoll.errors import InputError
from atoll.stats import Estimate

if TYPE_CHECKING:
    from atoll.explain.measure import ExplainResult, ExplainSettings, MethodResult

arguments = partial(add_flags, kind="explain", runs="folder of a run, or an image file to explain")


def run(options: argparse.Namespace) -> None:
    images = [path for path in options.runs if path.is_file()]
    options.runs = [path for path in options.runs if path not in images]
    if not options.runs:
        raise InputError(f"RUN: expected the folder of a run, got only files: {', '.join(map(str, images))}")
    run_measurement(options, "explain", show, **({"images": tuple(map(str, images))} if images else {}))


def show(results: Mapping[str, ExplainResult]) -> None:
    """One table per question with all runs in it; then notes about each run."""
    from atoll.explain.measure import short_names, side_by_side

    first = next(iter(results.values()))
    points = f"{first.points:,} images" if first.settings.images else f"{first.points:,} {first.settings.split} points"
    rows = [
        [folder, str(r.distance), f"{100 * r.success:.1f}", *(_number(r.pairs.get(p)) for p in ("SM-BSM", "IG-BIG"))]
        for folder, r in results.items()
    ]
    columns = ["", f"distance ({first.settings.norm})", "success %", "SM-BSM", "IG-BIG"]
    print_table(f"decision boundary, {points}", columns, rows)
    methods = {
        label if len(results) == 1 else f"{label}, {Path(folder).name}": results[folder].methods[name]
        for name, label in short_names(first.methods).items()
        for folder in results
    }
    _tables(methods, first.settings)
    for folder, result in results.items():
        print_lines(*_lines(folder, result))
    if len(results) > 1:
        try:
            path = side_by_side({Path(name).name: result for name, result in results.items()})
        except OSError as error:  # results of read-only runs can still be shown
            print_lines(f"side by side: no figure ({error.strerror})", style="yellow")
        else:
            print_lines(*([f"side by side: {path}"] if path else []))


def _tables(methods: dict[str, MethodResult], settings: ExplainSettings) -> None:
    rows = [
        [name, *map(_number, (method.infidelity, method.scaled_infidelity, method.completeness_gap))]
        for name, method in methods.items()
    ]
    columns = ["", f"INFD, sigma {settings.sigma:g}", "at best scale", "completeness gap"]
    print_table("faithfulness", columns, rows)
    if settings.checks:
        rows = []
        for name, method in methods.items():
            correlation = _number(method.sanity_layers[-1][1] if method.sanity_layers else None)
            outcome = "passed" if method.sanity_passed else "NOT passed"
            rows.append([name, correlation, outcome, _number(method.sensitivity)])
        columns = ["", "rank correlation", "sanity check", f"Lipschitz at least (l2 {settings.radius:g})"]
        print_table(f"sanity check and local sensitivity, {settings.checks} points", columns, rows)
    if any(method.f1 is not None for method in methods.values()):
        rows = [[name, *map(_number, (method.precision, method.recall, method.f1))] for name, method in methods.items()]
        print_table("locality: on the object", ["", "precision", "recall", "F1"], rows)


def _lines(folder: str, result: ExplainResult) -> list[str]:
    searches = ", ".join(f"{count} by {name}" for name, count in result.searches.items())
    lines = [f"{folder}: {result.calls:.0f} model calls per point for the boundary; {searches}", *result.notes]
    if result.settings.images:
        columns = (result.titles, result.predictions, result.distances, result.others)
        for name, prediction, distance, other in zip(*columns, strict=True):
            lines.append(f"{name}: {prediction}" + ("" if distance is None else f"; {other} at {distance:.4g}"))
    return [*lines, f"attributions, results and figures: {result.folder}"]


def _number(estimate: Estimate | None) -> str:
    """``1.23 ± 0.06``, ``-`` if there is no estimate."""
    return "-" if estimate is None or estimate.value != estimate.value else str(estimate)
