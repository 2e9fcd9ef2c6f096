"""Evaluations under attack: accuracies with intervals, what each attack broke, and adversarial examples."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.report import commands
from atoll.report.blocks import Block, Cell, Picture, Plot, Section, Side, Table, Title, Words
from atoll.report.figures import dots
from atoll.report.pictures import embedded
from atoll.report.read import Kept, Reading
from atoll.report.sections.shared import about, alarms, each, interval, lacking, suite
from atoll.report.sections.summary import strongest
from atoll.report.values import accuracy, count, entries, get, measured, number, plain
from atoll.stats import Accuracy


def section(runs: Sequence[Reading]) -> Section:
    missing = lacking(runs, "robust accuracy", "an evaluation")
    blocks: list[Block] = [*alarms(runs, "attacks"), *missing, *_plots(runs), *each(runs, _tables)]
    pictures = [picture for run in runs for picture in _pictures(run)]
    if pictures:
        words = "Left: the input; middle: the change, enlarged (grey is none); right: what the model took for another."
        blocks += [Title("Adversarial examples"), Words([words]), Side(pictures)]
    return Section("attacks", "Attacks", blocks)


def _plots(runs: Sequence[Reading]) -> list[Block]:
    """One for each threat: accuracies of all runs and attacks."""
    groups: dict[str, list[tuple[Reading, Kept]]] = {}
    for run in runs:
        for kept in run.evaluations:
            name = f"{commands.threat(kept.tree)}, {plain(get(kept.tree, 'split'))} points"
            groups.setdefault(name, []).append((run, kept))
    plots: list[Block] = []
    for place, (threat, group) in enumerate(groups.items()):
        several = len({suite(kept) for _, kept in group}) > 1
        rows = [row for run, kept in group for row in _accuracies(run, kept, several)]
        if rows:
            note = "Lines are 95 % intervals. In a cascade each attack only gets what those before it left."
            plots.append(Plot(f"attacks-{place}", f"Accuracy under attack, {threat}", dots(rows), note))
    return plots


def _accuracies(run: Reading, kept: Kept, several: bool) -> list[tuple[str, str, int, Accuracy]]:
    """Accuracies by name; where there are several suites, with the suite's."""
    tree = kept.tree
    mark = f" ({plain(get(tree, 'suite'))})" if several and isinstance(get(tree, "suite"), str) else ""
    named = {f"{plain(get(one, 'name'))}{mark}": get(one, "accuracy") for one in entries(tree, "attacks")}
    found = {"clean": get(tree, "clean"), **named, f"worst case{mark}": get(tree, "robust")}
    return [(run.name, name, run.number, share) for name, one in found.items() if (share := accuracy(one))]


def _tables(run: Reading) -> list[Block]:
    blocks: list[Block] = []
    for kept in run.evaluations:
        tree = kept.tree
        cascade = "a cascade: each attack on what is left" if get(tree, "cascade") else "each attack on all points"
        blocks.append(Title(f"{commands.threat(tree)}, {suite(kept)}", f"{about(tree)}; {cascade}"))
        rows = [_row("clean", get(tree, "clean"))]
        for attack in entries(tree, "attacks"):
            passes = [number(get(attack, name)) for name in ("forward", "backward")]
            rows.append(
                _row(
                    plain(get(attack, "name")),
                    get(attack, "accuracy"),
                    f"{count(get(attack, 'broken'))} of {count(get(attack, 'attacked'))}",
                    f"{sum(passes):,.0f}" if None not in passes else "–",  # type: ignore[arg-type]
                    "–" if (seconds := number(get(attack, "seconds"))) is None else f"{seconds:.1f}",
                )
            )
        rows.append(_row("worst case", get(tree, "robust")))
        blocks.append(Table(["attack", "accuracy", "95 %", "broken", "passes", "seconds"], rows))
        adbd = {"value": get(tree, "adbd", "mean"), "standard_error": get(tree, "adbd", "standard_error")}
        if distance := measured(adbd):
            blocks.append(Words([f"Mean distance to the decision boundary (ADBD, by RayS): {distance}"]))
    return blocks


def _row(name: str, tree: object, *more: str) -> list[str | Cell]:
    found = accuracy(tree)
    value = Cell("–") if found is None else Cell(f"{100 * found.value:.2f} %")
    return [name, value, interval(found), *(more or ("–",) * 3)]


def _pictures(run: Reading) -> list[Picture]:
    """One picture per run: that of the strongest evaluation that has one."""
    best = strongest(run, lambda kept: (kept.folder / "adversarial.png").exists())
    for kept in [best] if best else []:
        if source := embedded(kept.folder / "adversarial.png"):
            return [Picture(source, run.name, f"{commands.threat(kept.tree)}, {suite(kept)}", run.number)]
    return []
