"""What the model looks at: attributions, whether they are faithful, and whether they lie on the object."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.explain.measure import ExplainResult, MethodResult, short_names
from atoll.plots import heat_map
from atoll.report.blocks import Block, Columns, Gallery, Paragraphs, Section, TableCell, Tile, Title
from atoll.report.compare import Comparison, compare, notes
from atoll.report.glossary import MEANINGS
from atoll.report.images import encode_image, read_images
from atoll.report.run_summary import RunSummary
from atoll.report.text import estimate, number, plain

ORDER, KINDS = 50, ("explain",)
SHOWN = 4  # images
MAPS = "attributions/"  # what the names of attributions in the file of a result start with
METRICS = {
    "infidelity": "infidelity",
    "scaled_infidelity": "infidelity at the best scale",
    "completeness_gap": "completeness gap",
    "sensitivity": "local sensitivity, at least",
    "precision": "locality: precision",
    "recall": "locality: recall",
    "f1": "locality: F1",
}


def _describe(result: ExplainResult) -> str:
    return f"{', '.join(map(plain, result.settings.methods))}, {result.settings.norm} boundary"


def section(runs: Sequence[RunSummary]) -> Section:
    blocks: list[Block] = []
    for comparison in compare(runs, ExplainResult, _describe, named=("methods", "norm", "checks")):
        text = "Red pixels support the predicted class, blue pixels oppose it. Every map has its own color scale."
        blocks += [Title("Attributions", comparison.title), Paragraphs([text])]
        blocks += [Columns(_galleries(comparison)), *comparison.table(_cells)]
        for field, name in METRICS.items():
            blocks += comparison.table(partial(_metric, field), name)
        blocks += comparison.table(_sanity_checks, "sanity check")
    return Section("explanation", "Explanation", [*notes(runs, "explanation"), *blocks])


def _galleries(comparison: Comparison[ExplainResult]) -> list[Block]:
    """For every method the same images, with the attribution of each run."""
    images = comparison.load("explanation", "attributions.safetensors", _read, whole=False)
    if not images:
        return []
    x = images[0][1]["x"]
    images = [(run, tensors) for run, tensors in images if torch.equal(tensors["x"], x)]
    results = {run.number: result for run, result in comparison.results}
    count = min(len(x), *(min(len(result.titles), len(result.predictions)) for result in results.values()))
    galleries: list[Block] = []
    for method, short in short_names(comparison.first.methods).items():
        maps = [(run, tensors[MAPS + method]) for run, tensors in images if MAPS + method in tensors]
        rows = []
        for place in range(count):
            title = plain(results[images[0][0].number].titles[place])
            row = [Tile(encode_image(x[place]), f"{title}, original", title)]
            for run, values in maps:
                seen = plain(results[run.number].predictions[place])
                picture = encode_image(heat_map(x[place].clamp(0, 1), values[place].sum(0)))
                mark = "" if results[run.number].settings.images else "right" if seen == title else "wrong"
                row.append(Tile(picture, f"{plain(short)} of {plain(run.name)}: {seen}", seen, mark))
            rows.append(row)
        columns = ["original", *(run.name for run, _ in maps)]
        numbers = [None, *(run.number for run, _ in maps)]
        galleries.append(Gallery(plain(short), columns, rows, numbers, MEANINGS.get(short, "")))
    return galleries


def _read(path: Path) -> dict[str, Tensor]:
    images = read_images(path, None, SHOWN)
    if "x" not in images or len({values.shape for values in images.values()}) > 1:
        raise DataError("expected images and attributions of the same shape")
    return images


def _cells(result: ExplainResult) -> dict[str, str | TableCell]:
    share = number(result.success)
    success = "" if share is None else f"boundary found for {100 * share:.1f} % of the points"
    cells: dict[str, str | TableCell] = {"distance to the decision boundary": estimate(result.distance, success)}
    cells |= {f"distance between the attributions {plain(pair)}": estimate(v) for pair, v in result.pairs.items()}
    for method, numbers in result.methods.items():
        if numbers.undefined:
            cells[f"points without attribution, {plain(method)}"] = f"{numbers.undefined:,}"
    if result.notes:
        cells["notes"] = " ".join(map(plain, result.notes))
    return cells


def _metric(field: str, result: ExplainResult) -> dict[str, str | TableCell]:
    values = {method: getattr(numbers, field) for method, numbers in result.methods.items()}
    return {plain(method): estimate(value, form=".3g") for method, value in values.items() if value is not None}


def _sanity_checks(result: ExplainResult) -> dict[str, str | TableCell]:
    return {plain(method): _sanity(numbers) for method, numbers in result.methods.items()}


def _sanity(method: MethodResult) -> TableCell:
    """Whether the attribution changes when layers are randomized, as it should."""
    if method.sanity_passed is None:
        return TableCell("not run", mark="absent")
    return TableCell("passed") if method.sanity_passed else TableCell("not passed", mark="warning")
