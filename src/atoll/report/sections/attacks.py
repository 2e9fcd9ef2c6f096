"""Accuracy under attack: intervals, how many points each attack broke, and adversarial examples."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.attacks.measure import AttackResult
from atoll.report.blocks import Block, Columns, Paragraphs, Plot, Row, Section, TableCell, Title
from atoll.report.compare import Comparison, compare, notes
from atoll.report.figures import dots
from atoll.report.run_summary import RunSummary
from atoll.report.text import accuracy, estimate, plain
from atoll.stats import Accuracy

ORDER, KINDS = 20, ("attack",)
NAMED = ("attacks", "norm", "eps")


def _describe(result: AttackResult) -> str:
    settings = result.settings
    return f"{plain(settings.attacks)} at {plain(settings.threat)}" if result.attacks else "no attack"


def _comparisons(runs: Sequence[RunSummary]) -> list[Comparison[AttackResult]]:
    """AutoAttack first, because it is what people report."""
    comparisons = compare(runs, AttackResult, _describe, named=NAMED, ignore=lambda result: ("adbd",))
    return sorted(comparisons, key=lambda each: not each.first.settings.cascade)


def summary_rows(runs: Sequence[RunSummary]) -> list[Row]:
    # Clean accuracy depends on the points and the weights, not on the attacks.
    attack = ("attacks", "individual", "surrogate", "adbd", "norm", "eps", "seed")
    clean = compare(runs, AttackResult, lambda result: "", ignore=lambda result: attack)
    rows = [each.row(runs, "Clean accuracy", lambda result: accuracy(result.clean)) for each in clean]
    return rows + [each.row(runs, "Robust accuracy", _robust) for each in _comparisons(runs) if each.first.attacks]


def _robust(result: AttackResult) -> TableCell:
    note, mark = ("see the warning", "warning") if result.warnings else ("", "")
    return accuracy(result.robust, note, mark=mark)


def section(runs: Sequence[RunSummary]) -> Section:
    text = "Intervals are 95 % (Wilson). In AutoAttack, each attack runs only on the points that are still robust."
    blocks: list[Block] = [Paragraphs([text])]
    for place, comparison in enumerate(_comparisons(runs)):
        series = {(run.name, run.number): _accuracies(result) for run, result in comparison.results}
        plot = Plot(f"attacks-{place}", "Accuracy under attack", dots(series))
        blocks += [Title(comparison.title), plot, *comparison.table(_cells)]
        note = "Left: input. Middle: perturbation, amplified (gray is zero). Right: adversarial input."
        blocks.append(Columns(comparison.pictures("attacks", "adversarial.png", "Adversarial examples", note)))
    return Section("attacks", "Attacks", [*notes(runs, "attacks"), *blocks])


def _accuracies(result: AttackResult) -> dict[str, Accuracy]:
    attacks = {plain(attack.name): attack.accuracy for attack in result.attacks}
    return {"clean": result.clean, **attacks, **({"worst case": result.robust} if len(attacks) > 1 else {})}


def _cells(result: AttackResult) -> dict[str, str | TableCell]:
    cells: dict[str, str | TableCell] = {"clean": accuracy(result.clean)}
    for attack in result.attacks:
        broken = f"broke {attack.broken:,} of {attack.attacked:,} points"
        cost = f"{attack.forward + attack.backward:,} passes, {attack.seconds:.1f} s"
        cells[plain(attack.name)] = accuracy(attack.accuracy, broken, cost)
    if result.attacks:
        cells["worst case"] = _robust(result)
    if result.adbd is not None:
        cells["mean distance to the decision boundary (RayS)"] = estimate(result.adbd)
    return cells
