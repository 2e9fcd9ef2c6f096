"""Accuracy under common corruptions against severity, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from atoll.attacks.corruptions import FROST, NAMES, STRIP, STRIP_SEVERITY, Corruptions, title_of
from atoll.attacks.measure import AttackResult
from atoll.corruptions import COMMON
from atoll.errors import DataError
from atoll.report.blocks import (
    Block,
    Collapsible,
    Columns,
    Gallery,
    Paragraphs,
    Plot,
    Row,
    Section,
    TableCell,
    Tile,
    Title,
)
from atoll.report.compare import Comparison, compare
from atoll.report.figures import PERCENT, Trace, chart, curve
from atoll.report.images import encode_image, read_images
from atoll.report.run_summary import RunSummary
from atoll.report.sections.attacks import ATTACK_SETTINGS
from atoll.report.text import accuracy, estimate, plain
from atoll.stats import Accuracy

ORDER, KINDS = 25, ("attack",)
DASHES = ("solid", "dash", "dot", "dashdot")

_mean = partial(estimate, scale=100, form=".2f", unit=" %")


def _comparisons(runs: Sequence[RunSummary], checkpoint: str | None = None) -> list[Comparison[AttackResult]]:
    """Corrupted images depend on the points and the seed, not on the attacks."""
    ignore = [name for name in ATTACK_SETTINGS if name != "seed"]
    return compare(
        runs,
        AttackResult,
        lambda result: "Common corruptions",
        ignore=lambda result: ignore,
        where=lambda result: result.corruptions is not None,
        checkpoint=checkpoint,
    )


def summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    return [
        each.row(runs, "Accuracy under corruptions", lambda result: _mean(_corruptions(result).mean))
        for each in _comparisons(runs, checkpoint)
    ]


def _corruptions(result: AttackResult) -> Corruptions:
    assert result.corruptions is not None
    return result.corruptions


def section(runs: Sequence[RunSummary]) -> Section | None:
    comparisons = _comparisons(runs)
    if not comparisons:
        return None
    text = (
        "The fifteen common corruptions of ImageNet-C at five severities. Severity 0 is the clean image. Intervals are"
        f" 95 %. {FROST[0].upper()}{FROST[1:]}; accuracies under it are not comparable with published ones."
    )
    blocks: list[Block] = [Paragraphs([text])]
    for place, comparison in enumerate(comparisons):
        plots = [
            Plot(
                f"corruptions-{place}-{group}",
                f"{group.capitalize()} corruptions",
                _figure(_group_curves(comparison, names)),
            )
            for group, names in COMMON.items()
        ]
        mean = Plot(f"corruptions-{place}-mean", "Mean over all corruptions", _figure(_mean_curves(comparison)))
        details = Collapsible("Accuracy under each corruption", comparison.table(_cells))
        blocks += [Title(comparison.title), mean, Columns(plots[:2]), Columns(plots[2:])]
        blocks += [*comparison.table(_means), *_strip(comparison), details]
    return Section("corruptions", "Corruptions", blocks)


def _figure(traces: Sequence[Trace]) -> dict[str, object]:
    figure = chart(traces, "severity", "accuracy in %", {"range": PERCENT}, height=420)
    figure["layout"]["xaxis"] |= {"range": [-0.2, 5.2], "dtick": 1}
    return figure


def _mean_curves(comparison: Comparison[AttackResult]) -> list[Trace]:
    traces = []
    for run, result in comparison.results:
        means = _corruptions(result).severities
        errors = [0.0, *(100 * (each.interval[1] - each.value) for each in means)]
        points = _points(result.clean, [each.value for each in means])
        traces.append(curve(run.name, points, run.number, unit=" %", errors=errors))
    return traces


def _group_curves(comparison: Comparison[AttackResult], names: Sequence[str]) -> list[Trace]:
    """One color per run, one dash per corruption."""
    traces = []
    for run, result in comparison.results:
        entries = {each.name: each.severities for each in _corruptions(result).accuracies}
        for name, dash in zip(names, DASHES, strict=False):
            points = _points(result.clean, [each.value for each in entries.get(name, ())])
            traces.append(curve(f"{_title(name)}, {plain(run.name)}", points, run.number, dash=dash, unit=" %"))
    return traces


def _points(clean: Accuracy, values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(severity), 100 * value) for severity, value in enumerate([clean.value, *values])]


def _title(name: str) -> str:
    return plain(title_of(name)).replace("_", " ")


def _means(result: AttackResult) -> dict[str, str | TableCell]:
    corruptions = _corruptions(result)
    rows = {f"mean, severity {severity}": _mean(each) for severity, each in enumerate(corruptions.severities, 1)}
    return {"clean accuracy": accuracy(result.clean), "mean over all corruptions": _mean(corruptions.mean), **rows}


def _cells(result: AttackResult) -> dict[str, str | TableCell]:
    return {
        f"{_title(each.name)}, severity {severity}": accuracy(value)
        for each in _corruptions(result).accuracies
        for severity, value in enumerate(each.severities, 1)
    }


def _strip(comparison: Comparison[AttackResult]) -> list[Block]:
    """One image under each corruption; it is the same for all runs, because they have the same points and seed."""
    for _, images in comparison.load("corruptions", STRIP, _read):
        tiles = [
            Tile(encode_image(image), f"{name}, severity {STRIP_SEVERITY}", name)
            for name, image in zip(["original", *map(_title, NAMES)], images, strict=True)
        ]
        rows = [list(row) for row in zip(tiles[:4], tiles[4:8], tiles[8:12], tiles[12:], strict=True)]
        title = f"One image at severity {STRIP_SEVERITY}"
        return [Gallery(title, [group.capitalize() for group in COMMON], rows, [None] * len(COMMON))]
    return []


def _read(path: Path) -> Tensor:
    images = read_images(path, ("x",), len(NAMES) + 1)["x"]
    if len(images) != len(NAMES) + 1:
        raise DataError(f"x: expected {len(NAMES) + 1} images, got {len(images)}")
    return images
