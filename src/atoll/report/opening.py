"""What a reader sees first: the main finding in one sentence, and a picture of it.

Both come from typed results that answer the same question: one threat, the same points, one kind of checkpoint.
Whatever is not comparable is not compared; the sentence says less instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.attacks.measure import AttackResult
from atoll.report.blocks import Block, Lead
from atoll.report.compare import Comparison
from atoll.report.run_summary import RunSummary
from atoll.report.sections.attacks import clean_comparisons, comparisons, examples, verified_accuracy
from atoll.report.text import SPACE, listed, plain
from atoll.stats import Accuracy, SampledAccuracy

MOST = 4  # runs that a sentence can list


def opening(runs: Sequence[RunSummary], checkpoint: str) -> list[Block]:
    """The sentence and the picture."""
    pairs = comparisons(runs, checkpoint)
    attacked = [each for each in pairs if each.first.attacks and each.first.settings.surrogate is None]
    if not attacked:
        return [Lead(_without_attack(runs, checkpoint))]
    # The first of those that cover most runs: attacks that people report come first.
    main = max(attacked, key=lambda each: len(each.results))
    if len(runs) > 1 and len(main.results) == 1:
        text = (
            "The networks were not attacked in the same way on the same images, so no robust accuracies are compared."
        )
        return [Lead(text)]
    return [Lead(_finding(runs, main)), *examples(main)]


def _without_attack(runs: Sequence[RunSummary], checkpoint: str) -> str:
    clean = clean_comparisons(runs, checkpoint)
    if not clean:
        return "Nothing has been measured yet."
    main = max(clean, key=lambda each: len(each.results))
    shares = _shares(main, {run.number: result.clean for run, result in main.results}, len(runs))
    return f"Without an attack, {shares}; robust accuracy has not been measured."


def _finding(runs: Sequence[RunSummary], main: Comparison[AttackResult]) -> str:
    shares = _shares(main, {run.number: result.estimate or result.robust for run, result in main.results}, len(runs))
    text = f"Under attack, {shares}"
    if len(runs) == 1:
        text += f", down from {percent(main.first.clean)} without an attack"
    attacked = {run.number for run, _ in main.results}
    missing = [f"the {plain(run.name)} network" for run in runs if run.number not in attacked]
    if missing:
        text += f"; {listed(missing)} {'was' if len(missing) == 1 else 'were'} not attacked in the same way"
    if any(result.warnings for _, result in main.results):
        text += "; read the warnings about these numbers"
    return f"{text}."


def _shares(main: Comparison[AttackResult], shares: Mapping[int, Accuracy | SampledAccuracy], count: int) -> str:
    """Which network is right on how many of the images."""
    images = f"of {main.first.points:,} {main.first.settings.split} images"
    networks = [(run, shares[run.number], verified_accuracy(run, result)) for run, result in main.results]
    if len(networks) > MOST:
        low, high = (pick(networks, key=lambda each: each[1].value) for pick in (min, max))
        ends = [f"{percent(share)} ({plain(run.name)})" for run, share, _ in (low, high)]
        return f"the {len(networks)} networks are right on {ends[0]} to {ends[1]} {images}"
    parts: list[str] = []
    for run, share, proven in networks:
        name = f"the {plain(run.name)} network" if count > 1 else "the network"
        text = f"{name} is right on {percent(share)} {images}" if not parts else f"{name} on {percent(share)}"
        parts.append(text + (f" ({percent(proven)} proven)" if proven else ""))
    return listed(parts)


def percent(share: Accuracy | SampledAccuracy) -> str:
    """A share in whole percent; 0 and 100 only if they are exact, and "about" for estimates.

    >>> [percent(Accuracy(correct, 1000)).replace(SPACE, " ") for correct in (0, 1, 712, 999, 1000)]
    ['0 %', 'under 1 %', '71 %', 'over 99 %', '100 %']
    """
    if not share.total:
        return "an unknown share"
    rounded = round(100 * share.value)
    if isinstance(share, SampledAccuracy):
        return f"about {rounded}{SPACE}%"
    if rounded == 0 and share.correct:
        return f"under 1{SPACE}%"
    return f"over 99{SPACE}%" if rounded == 100 and share.correct < share.total else f"{rounded}{SPACE}%"
