"""Accuracy under attack: intervals, how many points each attack broke, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.attacks.examples import EXAMPLES, Example
from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifyResult
from atoll.errors import DataError, InputError
from atoll.report.blocks import Block, Gallery, Paragraphs, Plot, Row, Section, TableCell, Tile, Title
from atoll.report.compare import Comparison, compare, notes, side_by_side
from atoll.report.figures import PERCENT, Trace, band, chart, curve, dots
from atoll.report.images import encode_image, read_images
from atoll.report.run_summary import RunSummary
from atoll.report.text import SPACE, accuracy, digits, estimate, plain
from atoll.stats import Accuracy, percent
from atoll.threat import ThreatModel

ORDER, KINDS = 20, ("attack",)
NAMED = ("attacks", "norm", "eps")
EXTRAS = ("adbd", "power", "curve", "corruptions")  # settings that ask for one more number about the same question
# Settings that clean accuracy does not depend on.
ATTACK_SETTINGS = (
    "attacks", "width", "budget", "escalate", "individual", "surrogate", *EXTRAS, "norm", "eps", "seed"
)  # fmt: skip
SUITES = {
    "standard": "AutoAttack", "plus": "AutoAttack (plus)", "rand": "AutoAttack (rand)", "fast": "Fast attack suite"
}  # fmt: skip


def _describe(result: AttackResult) -> str:
    settings = result.settings
    name = plain(settings.attacks)
    return f"{SUITES.get(name, name)} at {plain(settings.threat)}" if result.attacks else "No attack"


def _extras(result: AttackResult) -> tuple[str, ...]:
    """Settings that add numbers and do not change the others; without attacks, eps is one of them."""
    return EXTRAS if result.attacks else (*EXTRAS, "eps")


def comparisons(runs: Sequence[RunSummary], checkpoint: str | None = None) -> list[Comparison[AttackResult]]:
    """AutoAttack first, because it is what people report, then more points; averages of weights last."""
    pairs = compare(runs, AttackResult, _describe, named=NAMED, ignore=_extras, checkpoint=checkpoint)

    def rank(comparison: Comparison[AttackResult]) -> tuple[bool, bool, bool, int]:
        settings, weights = comparison.first.settings, comparison.first.subject.origin.weights
        return weights != "raw", not settings.cascade, settings.attacks == "fast", -comparison.first.points

    return sorted(pairs, key=rank)


def clean_comparisons(runs: Sequence[RunSummary], checkpoint: str | None = None) -> list[Comparison[AttackResult]]:
    """Clean accuracy depends on the points and the weights, not on the attacks."""
    return compare(runs, AttackResult, lambda result: "", ignore=lambda result: ATTACK_SETTINGS, checkpoint=checkpoint)


def summary_rows(runs: Sequence[RunSummary], checkpoint: str) -> list[Row]:
    clean = clean_comparisons(runs, checkpoint)
    rows = [each.row(runs, "Clean accuracy", lambda result: accuracy(result.clean)) for each in clean]
    attacked = [each for each in comparisons(runs, checkpoint) if each.first.attacks]
    return rows + [each.row(runs, "Robust accuracy", _best) for each in attacked]


def _robust(result: AttackResult) -> TableCell:
    note, mark = ("see the warning", "warning") if result.warnings else ("", "")
    return accuracy(result.robust, note, mark=mark)


def _best(result: AttackResult) -> TableCell:
    """The estimate of ``fast``, the worst case of other attacks."""
    if result.estimate is None:
        return _robust(result)
    return accuracy(result.estimate, "estimate", mark="warning" if result.warnings else "")


def section(runs: Sequence[RunSummary]) -> Section:
    text = (
        "Intervals are 95 % (Wilson; exact for estimates). In AutoAttack, each attack runs only on the points that are"
        " still robust."
    )
    blocks: list[Block] = [Paragraphs([text])]
    for place, comparison in enumerate(comparisons(runs)):
        series = {(run.name, run.number): _accuracies(result) for run, result in comparison.results}
        plot = Plot(f"attacks-{place}", "Accuracy under attack", dots(series))
        table = side_by_side([(run, _cells(run, result)) for run, result in comparison.results])
        blocks += [Title(comparison.title), plot, *curves(comparison, place), *table]
        blocks += examples(comparison, perturbations=True)
    return Section("attacks", "Attacks", [*notes(runs, "attacks"), *blocks])


def curves(comparison: Comparison[AttackResult], place: int = 0) -> list[Block]:
    """Accuracy against eps of all runs over the same axes; nothing if no run has a curve."""
    traces: list[Trace] = []
    for run, result in comparison.results:
        if result.curve is None or not result.curve.eps:
            continue
        points = [(eps, 100 * each.value) for eps, each in zip(result.curve.eps, result.curve.accuracy, strict=False)]
        # Between two eps, accuracy is at most that at the smaller one.
        traces += band(points, [each.interval for each in result.curve.accuracy], run.number)
        traces.append(curve(run.name, points, run.number, shape="hv", unit=" %"))
    if not traces:
        return []
    axis = f"eps ({plain(comparison.first.settings.norm)})"
    figure = chart(traces, axis, "accuracy in %", {"range": PERCENT}, height=400)
    note = "An upper bound at every eps, from the closest adversarial inputs of all attacks. Bands are 95 % intervals."
    return [Plot(f"curve-{place}", "Accuracy against eps", figure, note)]


def _accuracies(result: AttackResult) -> dict[str, Accuracy]:
    attacks = {plain(attack.name): attack.accuracy for attack in result.attacks}
    return {"clean": result.clean, **attacks, **({"worst case": result.robust} if len(attacks) > 1 else {})}


def _cells(run: RunSummary, result: AttackResult) -> dict[str, str | TableCell]:
    cells: dict[str, str | TableCell] = {"clean accuracy": accuracy(result.clean)}
    for attack in result.attacks:
        broken = f"broke {attack.broken:,} of {attack.attacked:,} points"
        cost = f"{attack.forward + attack.backward:,} passes, {attack.seconds:.1f} s"
        cells[plain(attack.name)] = accuracy(attack.accuracy, broken, cost)
    if result.estimate is not None:
        sample = f"{result.estimate.rejected:,} of {result.estimate.sampled:,} sampled points broken"
        cells |= {"at most": _robust(result), "estimate": accuracy(result.estimate, sample)}
    elif result.attacks:
        cells["worst case"] = _robust(result)
    if (verified := verified_accuracy(run, result)) is not None:
        cells["range of robust accuracy"] = _bracket(verified, result)
    if result.power is not None:
        share, random = result.power.share, result.power.random
        planted = f"found {share.correct:,} of {share.total:,} planted adversarial inputs"
        baseline = f"random points found {random.correct:,} of {random.total:,}"
        cells["power of the attacks"] = accuracy(share, planted, baseline, f"readout: {plain(result.power.layer)}")
    if result.adbd is not None:
        cells["ADBD: mean distance to the decision boundary"] = estimate(result.adbd)
    if result.curve is not None:
        names = ", ".join(plain(attack.name) for attack in result.curve.attacks)
        if result.at_eps is not None:
            cells["worst case on the curve"] = accuracy(result.at_eps, "at most", f"at this eps; {names}")
        cells["median distance to the decision boundary"] = TableCell(digits(result.curve.median), f"at most; {names}")
    return cells


def _bracket(verified: Accuracy, result: AttackResult) -> TableCell:
    """The true robust accuracy is between these numbers."""
    text = f"between {percent(verified)} % (verified) and {percent(result.robust)} % (attacked)"
    return TableCell(text, "" if result.estimate is None else f"estimate: {percent(result.estimate)} %")


def verified_accuracy(run: RunSummary, attacked: AttackResult) -> Accuracy | None:
    """Accuracy that is proven for the same weights, points and threat, if there is a proof."""
    if not attacked.attacks or attacked.settings.norm != "l2":
        return None
    try:
        radius = ThreatModel("l2", attacked.settings.eps or "").radius
    except (InputError, OverflowError):  # anybody may have written it
        return None
    for result in run.current(CertifyResult):
        same = (result.inputs, result.points, result.subject.digest, result.settings.split)
        if same == (attacked.inputs, attacked.points, attacked.subject.digest, attacked.settings.split):
            for row in result.verified:
                if row.eps == radius and not result.is_probabilistic:
                    return row.accuracy
    return None


def examples(comparison: Comparison[AttackResult], *, perturbations: bool = False) -> list[Block]:
    """The same images before and after the attack on each run, with the predictions; nothing if none are stored."""
    answers = {run.number: result.examples for run, result in comparison.results}
    images = [
        (run, tensors)
        for run, tensors in comparison.load("attacks", "examples.safetensors", _read)
        if answers[run.number] and len(answers[run.number]) == len(tensors["x"])
    ]
    if not images:
        return []
    first, originals = answers[images[0][0].number], images[0][1]["x"]
    images = [(run, tensors) for run, tensors in images if torch.equal(tensors["x"], originals)]
    rows = []
    for place, example in enumerate(first):
        label = plain(example.label)
        row = [Tile(encode_image(originals[place]), f"{label}, original", label)]
        for run, tensors in images:
            answer, x_adv = answers[run.number][place], tensors["x_adv"][place]
            shown = _amplified(x_adv - originals[place]) if perturbations else x_adv
            text, mark = _answer(answer)
            what = "perturbation" if perturbations else "attacked"
            row.append(Tile(encode_image(shown), f"{label}, {what}, {plain(run.name)}: {text}", text, mark))
        rows.append(row)
    columns = ["original", *(run.name for run, _ in images)]
    numbers = [None, *(run.number for run, _ in images)]
    if perturbations:
        note = "Amplified; gray is no change. Images that are already classified wrong are not attacked."
        return [Gallery("Perturbations", columns, rows, numbers, note, wide=True)]
    note = (
        f"{comparison.question}. Below each image: the prediction before → after the attack, or one word if it did not"
        " change. These are the first images of each class, not selected by their result."
    )
    return [Gallery("Before and after the attack", columns, rows, numbers, note, wide=True)]


def _read(path: Path) -> dict[str, Tensor]:
    images = read_images(path, ("x", "x_adv"), EXAMPLES)
    if images["x"].shape != images["x_adv"].shape:
        raise DataError("expected images of the same shape before and after the attack")
    return images


def _amplified(change: Tensor) -> Tensor:
    return 0.5 + change / (2 * change.abs().max().clamp_min(1e-12))


def _answer(example: Example) -> tuple[str, str]:
    """The predictions as text, and whether the one under attack is right.

    >>> _answer(Example(0, "coat", "coat", "shirt")), _answer(Example(0, "coat", "coat", "coat"))
    (('coat → shirt\\xa0✗', 'wrong'), ('coat\\xa0✓', 'right'))
    """
    before, after = plain(example.before), plain(example.after)
    is_right = example.after == example.label
    text = after if before == after else f"{before} → {after}"
    return f"{text}{SPACE}{'✓' if is_right else '✗'}", "right" if is_right else "wrong"
