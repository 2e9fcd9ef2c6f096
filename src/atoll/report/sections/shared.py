"""What several tabs say in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.losses import LOSSES
from atoll.report import commands
from atoll.report.blocks import Block, Cell, Title
from atoll.report.read import Kept, Reading
from atoll.report.values import count, entries, get, plain, step
from atoll.stats import Accuracy


def share(found: Accuracy | None, note: str = "", mark: str = "") -> Cell:
    """An accuracy with its interval.

    >>> share(Accuracy(90, 100), "360 points").text, share(Accuracy(90, 100)).note, share(None).text
    ('90.00 %', '95 %: 82.6–94.5', 'not measured')
    """
    if found is None:
        return Cell("not measured", note, "absent")
    low, high = found.interval
    interval = f"95 %: {100 * low:.1f}–{100 * high:.1f}"
    return Cell(f"{100 * found.value:.2f} %", f"{interval}; {note}" if note else interval, mark)


def interval(found: Accuracy | None) -> str:
    return "–" if found is None else "{:.1f}–{:.1f}".format(*(100 * end for end in found.interval))


def about(tree: Mapping[str, Any]) -> str:
    """The points and weights that a result is about.

    >>> about({"points": 1000, "split": "test", "weights": "raw", "checkpoint": "00000080"})
    '1,000 test points, step 80'
    >>> about({"points": 10, "weights": "swa"})
    '10 points, swa weights of an unknown step'
    """
    split, weights, where = get(tree, "split"), get(tree, "weights"), step(tree)
    points = f"{count(get(tree, 'points'))} {'' if split is None else plain(split) + ' '}points"
    place = "an unknown step" if where is None else f"step {where}"
    return f"{points}, {place if weights in (None, 'raw') else f'{plain(weights)} weights of {place}'}"


def alarms(runs: Sequence[Reading], about: str) -> list[Block]:
    """What there is to say before the numbers of a tab."""
    return [alarm for run in runs for alarm in run.alarms if alarm.about == about]


def each(runs: Sequence[Reading], blocks: Callable[[Reading], list[Block]]) -> list[Block]:
    """Each run's blocks, under its name if there are several runs."""
    found: list[Block] = []
    for run in runs:
        if here := blocks(run):
            found += [*([Title(run.name, run=run.number)] if len(runs) > 1 else []), *here]
    return found


def lacking(runs: Sequence[Reading], *missing: str) -> list[Block]:
    """What the runs lack of these parts."""
    return [gap for run in runs for gap in run.missing if gap.what in missing]


def suite(kept: Kept) -> str:
    """What an evaluation ran."""
    name = get(kept.tree, "suite")
    attacks = ", ".join(plain(get(attack, "name")) for attack in entries(kept.tree, "attacks"))
    transfer = "" if get(kept.tree, "surrogate") is None else f", crafted on {plain(get(kept.tree, 'surrogate'))}"
    named = isinstance(name, str) and name != attacks.replace(" ", "")  # not if the name is that list
    return (f"{plain(name)} ({attacks})" if named else attacks) + transfer


def is_probable(kept: Kept) -> bool:
    """Whether certificates only hold with a probability."""
    return get(kept.tree, "smoothing") is not None


def loss_at(tree: Mapping[str, Any]) -> str:
    """The loss that a curvature is of, and where; losses without an attack are taken at clean inputs.

    >>> loss_at({"loss": "AT", "threat": {"norm": "linf", "eps": "8/255"}}), loss_at({"loss": "Standard"})
    ('AT at linf 8/255', 'Standard at clean inputs')
    """
    name = plain(get(tree, "loss"))
    member = LOSSES.members().get(name)
    clean = member is not None and getattr(member.cls, "objective", None) is None
    return f"{name} at {'clean inputs' if clean else commands.threat(tree)}"
