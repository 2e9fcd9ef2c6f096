"""What the model looks at: attributions, whether they are faithful, and whether they lie on the object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.report.blocks import Block, Cell, Picture, Section, Table, Title, Words
from atoll.report.pictures import embedded
from atoll.report.read import Kept, Reading
from atoll.report.sections.shared import about, alarms, each, lacking
from atoll.report.values import entries, get, measured, number, plain

FAITHFULNESS: Mapping[str, tuple[str, ...]] = {
    "infidelity": ("infidelity", "value"),
    "at best scale": ("infidelity", "scaled"),
    "completeness gap": ("completeness_gap",),
    "Lipschitz, at least": ("lipschitz_at_least",),
}
LOCALITY: Mapping[str, tuple[str, ...]] = {
    "precision": ("locality", "precision"),
    "recall": ("locality", "recall"),
    "F1": ("locality", "f1"),
}


def section(runs: Sequence[Reading]) -> Section:
    pictures = [picture for run in runs for kept in run.explanations for picture in _pictures(run, kept)]
    grid: list[Block] = [Title("Attributions"), *pictures] if pictures else []
    blocks = [*alarms(runs, "explanation"), *lacking(runs, "explanations"), *each(runs, _results), *grid]
    return Section("explanation", "Explanation", blocks)


def _results(run: Reading) -> list[Block]:
    blocks: list[Block] = []
    for kept in run.explanations:
        tree = kept.tree
        blocks.append(Title("Faithfulness" if get(tree, "images") is None else "Image files", about(tree)))
        methods = get(tree, "methods")
        if isinstance(methods, Mapping) and methods:
            blocks.append(_methods(methods, FAITHFULNESS, sanity=True))
        blocks.append(Words([*_boundary(tree), *map(plain, entries(tree, "words"))]))
        if isinstance(methods, Mapping) and any(get(each, "locality") for each in methods.values()):
            blocks += [Title("Locality", "how much of an attribution is on the object"), _methods(methods, LOCALITY)]
    return blocks


def _methods(methods: Mapping[str, Any], columns: Mapping[str, tuple[str, ...]], *, sanity: bool = False) -> Table:
    """A row for each method; columns that no method has a number for are left out."""
    shown = {name: path for name, path in columns.items() if any(get(tree, *path) for tree in methods.values())}
    rows: list[list[str | Cell]] = [
        [plain(name), *(measured(get(tree, *path)) or "–" for path in shown.values()), *([_sanity(tree)] * sanity)]
        for name, tree in methods.items()
    ]
    return Table(["method", *shown, *(["sanity check"] * sanity)], rows)


def _sanity(tree: object) -> Cell:
    """Whether the attribution changes when layers are randomised, as it should."""
    passed = get(tree, "sanity", "passed")
    if not isinstance(passed, bool):
        return Cell("not run", mark="absent")
    return Cell("passed") if passed else Cell("NOT passed", mark="alarm")


def _boundary(tree: Mapping[str, Any]) -> list[str]:
    boundary = get(tree, "boundary")
    distance = measured({"value": get(boundary, "mean_distance"), "standard_error": get(boundary, "standard_error")})
    found = number(get(boundary, "success"))
    lines = []
    if distance is not None and found is not None:
        norm = plain(get(boundary, "norm"))
        lines.append(f"Mean distance to the decision boundary ({norm}): {distance}, found for {100 * found:.1f} %.")
    distances = get(tree, "distances")
    for pair, value in distances.items() if isinstance(distances, Mapping) else ():
        lines.append(f"Distance between the attributions {plain(pair)}: {measured(value) or '–'}.")
    return lines


def _pictures(run: Reading, kept: Kept) -> list[Picture]:
    source = embedded(kept.folder / "attributions.png")
    note = "Input, then one heat map per method; boxes are the objects, where the data set knows them."
    return [Picture(source, run.name, note, run.number)] if source else []
