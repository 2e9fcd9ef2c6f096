"""What was measured, in one table; what was not; and what a reader of the numbers must know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.errors import InputError
from atoll.report.blocks import Block, Cell, Table
from atoll.report.read import BROKEN, Kept, Reading
from atoll.report.sections.shared import about, is_probable, loss_at, share, suite
from atoll.report.values import accuracy, count, digits, entries, get, measured, number, plain, step
from atoll.threat import ThreatModel

Threat = tuple[str, str, str, str]  # norm, eps, split, weights (raw or an average)
ABSENT = Cell("not measured", mark="absent")


def blocks(runs: Sequence[Reading]) -> list[Block]:
    rows: list[list[str | Cell]] = [
        ["Training", *(_training(run) for run in runs)],
        ["Clean accuracy", *(_clean(run) for run in runs)],
    ]
    for threat in _threats(runs):
        norm, size, split, weights = threat
        name = f"Robust accuracy, {norm} {size}"
        name += ("" if split == "test" else f", {split} points") + ("" if weights == "raw" else f", {weights} weights")
        rows.append([name, *(_robust(run, threat) for run in runs)])
    radii = sorted({radius for run in runs for radius in _radii(run)})
    for probable, eps in radii:
        kind = "Probably verified accuracy" if probable else "Verified accuracy (VRA)"
        rows.append([f"{kind}, l2 {eps:.4g}", *(_verified(run, eps, probable) for run in runs)])
    if not radii:
        rows.append(["Verified accuracy (VRA)", *(ABSENT for _ in runs)])
    rows.append(["Weight-Curvature Index (WCI)", *(_wci(run) for run in runs)])
    if any(get(run.curvature and run.curvature.tree, "gap") for run in runs):
        rows.append(["Robust gap: test minus train error", *(_gap(run) for run in runs)])
    # The alarms come first: a number that cannot be trusted should not be read before one knows.
    alarms = [alarm for run in runs for alarm in run.alarms]
    missing = [gap for run in runs for gap in run.missing]
    return [*alarms, Table(["", *(run.name for run in runs)], rows, [None, *(run.number for run in runs)]), *missing]


def _training(run: Reading) -> Cell:
    parts = [get(run.recipe, part, "class_path") for part in ("loss", "model", "data")]
    words = ", ".join(plain(part).rpartition(".")[2] for part in parts if part)
    threat = f"{plain(get(run.recipe, 'threat', 'norm'))} {plain(get(run.recipe, 'threat', 'eps'))}"
    done, planned = len(run.epochs), plain(get(run.recipe, "trainer", "epochs"))
    finished = f"{done} of {planned} epochs" + ("" if run.tests else ", not finished")
    return Cell(words, f"threat {threat}; {finished}", "" if run.tests else "alarm")


def _clean(run: Reading) -> Cell:
    kept = strongest(run, lambda one: _threat(one.tree)[2:] == ("test", "raw"))
    return _tested(run, "clean") if kept is None else share(accuracy(get(kept.tree, "clean")), about(kept.tree))


def _tested(run: Reading, name: str) -> Cell:
    """What the training itself measured at its end; ``best`` if there is one."""
    which = "best" if get(run.tests, "best") else "last"
    found = accuracy(get(run.tests, which, name))
    return ABSENT if found is None else share(found, f"{which} weights, by the training's own test")


def _threat(tree: Mapping[str, Any], **known: str) -> Threat:
    norm, eps = (plain(get(tree, "threat", name)) for name in ("norm", "eps"))
    split, weights = (known.get(name) or plain(get(tree, name)) for name in ("split", "weights"))
    return norm, eps, split, weights


def _trained_threat(run: Reading) -> Threat:
    """What the training itself tests with."""
    return _threat(run.recipe, split="test", weights="raw")


def _threats(runs: Sequence[Reading]) -> list[Threat]:
    """All threats that some run was attacked with, and those of runs that were attacked by their own training only."""
    found = []
    for run in runs:
        found += [_threat(kept.tree) for kept in run.evaluations] or [_trained_threat(run)]
    return list(dict.fromkeys(found))


def strongest(run: Reading, same: Callable[[Kept], bool]) -> Kept | None:
    """Of the evaluations that are the same: of the best weights, if there is one, with most points, most broken."""
    counted = []
    for kept in run.evaluations:
        if same(kept) and (found := accuracy(get(kept.tree, "robust"))):
            best = get(run.index, "best", plain(get(kept.tree, "weights")))
            counted.append((step(kept.tree) != best, -found.total, found.correct, kept))
    return min(counted, key=lambda entry: entry[:3])[3] if counted else None


def _robust(run: Reading, threat: Threat) -> Cell:
    kept = strongest(run, lambda one: _threat(one.tree) == threat)
    if kept is not None:
        alarm = "alarm" if entries(kept.tree, "findings") else ""
        note = f"{suite(kept)}, {about(kept.tree)}{'; see the alarm' if alarm else ''}"
        return share(accuracy(get(kept.tree, "robust")), note, alarm)
    tested = _tested(run, "robust")
    if tested is ABSENT or threat != _trained_threat(run):
        return ABSENT
    return Cell(tested.text, f"{tested.note}: {plain(get(run.tests, 'attack'))}, a weak attack")


def _radii(run: Reading) -> list[tuple[bool, float]]:
    """Radii of certificates, and whether these are only probable."""
    found = [
        (is_probable(kept), eps)
        for kept in run.certifications
        for verified in entries(kept.tree, "verified")
        if (eps := number(get(verified, "eps"))) is not None
    ]
    trained = _trained_radius(run)
    return found if trained is None else [*found, (False, trained)]


def _trained_radius(run: Reading) -> float | None:
    """Where the training itself has proven its accuracy, if it has."""
    if _tested(run, "vra") is ABSENT:
        return None
    try:
        return ThreatModel("l2", get(run.recipe, "threat", "eps")).radius
    except (InputError, TypeError):
        return None


def _verified(run: Reading, eps: float, probable: bool) -> Cell:
    for kept in run.certifications:
        for verified in entries(kept.tree, "verified"):
            if is_probable(kept) == probable and number(get(verified, "eps")) == eps:
                sure = f"each with probability {1 - (number(get(kept.tree, 'smoothing', 'alpha')) or 0):g}, not surely"
                broken = "alarm" if any(alarm.what == BROKEN for alarm in run.alarms) else ""
                return share(accuracy(verified), f"{sure if probable else 'proven'}, {about(kept.tree)}", broken)
    return _tested(run, "vra") if not probable and eps == _trained_radius(run) else ABSENT


def _wci(run: Reading) -> Cell:
    if run.curvature is not None and (found := measured(get(run.curvature.tree, "wci"))):
        return Cell(found, f"{loss_at(run.curvature.tree)}; {count(get(run.curvature.tree, 'points'))} points")
    for epoch in reversed(run.epochs):
        if found := measured({"value": epoch.get("wci"), "standard_error": epoch.get("wci_standard_error")}):
            return Cell(found, f"during training, epoch {digits(epoch.get('epoch'))}")
    return ABSENT


def _gap(run: Reading) -> Cell:
    tree = get(run.curvature and run.curvature.tree, "gap", "error")
    value, error = (number(get(tree, name)) for name in ("value", "standard_error"))
    if value is None or error is None:
        return ABSENT
    return Cell(f"{100 * value:.1f} ± {100 * error:.1f} points of %", "same attack on both")
