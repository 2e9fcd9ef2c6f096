"""What the model looks at: attributions, whether they are faithful, and whether they lie on the object."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.explain.measure import ExplainResult, MethodResult
from atoll.report.blocks import Block, Section, TableCell, Title
from atoll.report.compare import compare, notes
from atoll.report.run_summary import RunSummary
from atoll.report.text import estimate, number, plain

ORDER, KINDS = 50, ("explain",)
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
    for comparison in compare(runs, ExplainResult, _describe, named=("methods", "norm")):
        blocks += [Title("Attributions", comparison.title), *comparison.table(_cells)]
        note = "Input, then one heat map per method. Boxes show the object if the data set has them."
        blocks += comparison.pictures("explanation", "attributions.png", "Attributions", note)
    return Section("explanation", "Explanation", [*notes(runs, "explanation"), *blocks])


def _cells(result: ExplainResult) -> dict[str, str | TableCell]:
    share = number(result.success)
    success = "" if share is None else f"boundary found for {100 * share:.1f} % of the points"
    cells: dict[str, str | TableCell] = {"distance to the decision boundary": estimate(result.distance, success)}
    for field, name in METRICS.items():
        for method, numbers in result.methods.items():
            if (value := getattr(numbers, field)) is not None:
                cells[f"{name}, {plain(method)}"] = estimate(value)
    for method, numbers in result.methods.items():
        cells[f"sanity check, {plain(method)}"] = _sanity(numbers)
        if numbers.undefined:
            cells[f"points without attribution, {plain(method)}"] = f"{numbers.undefined:,}"
    cells |= {f"distance between the attributions {plain(pair)}": estimate(v) for pair, v in result.pairs.items()}
    if result.notes:
        cells["notes"] = " ".join(map(plain, result.notes))
    return cells


def _sanity(method: MethodResult) -> TableCell:
    """Whether the attribution changes when layers are randomized, as it should."""
    if method.sanity_passed is None:
        return TableCell("not run", mark="absent")
    return TableCell("passed") if method.sanity_passed else TableCell("not passed", mark="warning")
