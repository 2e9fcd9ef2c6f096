"""The plan of an audit: which measurements fit into a budget, with how many points.

The cost of every measurement is known in passes, from counting them, and a pass is timed.  A measurement gets a share
of the budget; what it cannot use goes to the others.  A measurement that would cover too few points to say anything is
left out, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.attacks.measure import AttackSettings
from atoll.audit.speed import Speed
from atoll.certify.measure import CertifySettings
from atoll.curvature.measure import CurvatureSettings
from atoll.errors import InputError
from atoll.explain.measure import ExplainSettings
from atoll.health import HealthSettings
from atoll.measure import Settings
from atoll.threat import ThreatModel, number

# Passes per point that is robust against everything: APGD-CE 100 steps, APGD-T and FAB-T 9 x 101, Square 5,000 queries.
STANDARD_FORWARD, STANDARD_GRADIENT = 6918, 1918
SMALL_BATCHES = 1.3  # passes over the few points that remain are slower per point
QUICK = 0.03  # of these, what the quick attacks of ``fast`` need
POWER = 0.2  # of these, what planting and finding one adversarial input takes
SUITE_SECONDS = 10.0  # what a suite takes besides its passes, at any size: 7,000 iterations of small operations
CORRUPTED = 75  # fifteen corruptions at five severities
PROOF = 500  # gradients per point: attacks on certified points
CURVATURE, PROBES = 1500, 200  # gradients per point, with at most so many probes
EXPLAIN, CHECK = 600, 6000  # gradients per point, and per point of the sanity check and the local sensitivity
HEALTH = 30  # gradients per point, at most: alternatives, and differences of gradients
HEALTH_SHARE = 0.1  # of the budget
LONGEST = 365 * 24 * 3600.0  # seconds
FEWEST = 10  # points below which a measurement says too little


@dataclass(frozen=True)
class Facts:
    """What the plan depends on.

    Args:
        speed: measured durations.
        threat: the threat model.
        unprovable: why nothing can be proven about the model; empty if it can.
        proof_seconds: duration of the proof of its Lipschitz constants.
        certified: whether the model was trained for certificates, so that smoothing adds nothing.
        training_points: number of training points.
    """

    speed: Speed
    threat: ThreatModel
    unprovable: str = ""
    proof_seconds: float = 0.0
    certified: bool = False
    training_points: int = 0

    @property
    def standard(self) -> float:
        """Seconds of AutoAttack at one robust point."""
        backward = max(self.speed.gradient - self.speed.forward, 0.0)
        return SMALL_BATCHES * (STANDARD_FORWARD * self.speed.forward + STANDARD_GRADIENT * backward)

    @property
    def radius(self) -> str:
        """The l2 radius of certificates."""
        return str(self.threat.eps) if self.threat.norm == "l2" else "0.25"


@dataclass(frozen=True)
class PlannedStep:
    """One measurement of an audit.

    Args:
        name: name of the step.
        settings: what to measure; None if the step is left out.
        seconds: the planned duration.
        note: what the budget changed, or why the step is left out.
    """

    name: str
    settings: Settings | None = None
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        kind = None if self.settings is None else self.settings.kind
        settings = None if self.settings is None else self.settings.to_json()
        return {"name": self.name, "kind": kind, "settings": settings, "seconds": self.seconds, "note": self.note}


Fit = Callable[[Facts, float], PlannedStep]


def make_plan(facts: Facts, seconds: float, only: tuple[str, ...] = ()) -> list[PlannedStep]:
    """Plan the measurements that fit into a number of seconds.

    Args:
        facts: what the plan depends on.
        seconds: the time.
        only: names of the steps to plan; all if empty.
    """
    names = [name for name in STEPS if not only or name in only]
    first = [STEPS[name].fit(facts, HEALTH_SHARE * seconds) for name in names[:1] if name == "health"]
    rest = names[len(first) :]
    left = max(seconds - sum(step.seconds for step in first), 0.0)
    wants = {name: STEPS[name].most(facts) for name in rest}
    shares = divide(left, wants, {name: STEPS[name].weight for name in rest})
    return [*first, *(STEPS[name].fit(facts, shares[name]) for name in rest)]


def divide(budget: float, wants: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide a budget by weights; nobody gets more than it wants, and the others share the rest.

    >>> divide(60, {"a": 100, "b": 5, "c": 100}, {"a": 2, "b": 2, "c": 1})
    {'b': 5, 'a': 36.666666666666664, 'c': 18.333333333333332}
    """
    shares: dict[str, float] = {}
    names = list(wants)
    while names:
        total = sum(weights[name] for name in names)
        rest = max(budget - sum(shares.values()), 0.0)
        modest = [name for name in names if wants[name] <= rest * weights[name] / total]
        for name in modest:
            shares[name] = wants[name]
        names = [name for name in names if name not in modest]
        if not modest:
            return shares | {name: rest * weights[name] / total for name in names}
    return shares


def _points(facts: Facts, seconds: float, each: float, most: int | None = None) -> int:
    """Points that fit into a time."""
    limit = facts.speed.points if most is None else most
    return min(limit, int(max(seconds, 0.0) / each)) if each > 0 else limit


def _skip(name: str, facts: Facts, each: float, fixed: float = 0.0) -> PlannedStep:
    needed = fixed + FEWEST * each
    return PlannedStep(name, note=f"left out: {FEWEST} points would take {format_duration(needed)}")


def _enough(facts: Facts, points: int, most: int | None = None) -> bool:
    return points >= min(FEWEST, facts.speed.points if most is None else most) > 0


def _fraction(points: int, total: int) -> str:
    return "" if points >= total else f"{points:,} of {total:,} points"


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


# --- health -------------------------------------------------------------------------------------------------------


def _health(facts: Facts, seconds: float) -> PlannedStep:
    """Never left out, because all other numbers depend on it."""
    each, most = HEALTH * facts.speed.gradient, min(500, facts.speed.points)
    points = max(_points(facts, seconds - 5, each, most), min(FEWEST, most))
    note = _fraction(points, facts.speed.points)
    return PlannedStep("health", HealthSettings(points=points), 5 + points * each, note)


def _health_seconds(facts: Facts) -> float:
    return 5 + min(500, facts.speed.points) * HEALTH * facts.speed.gradient


# --- attack -------------------------------------------------------------------------------------------------------


def _attack_seconds(facts: Facts) -> float:
    return SUITE_SECONDS + (1.1 * facts.speed.points + 50 * POWER) * facts.standard


def _attack(facts: Facts, seconds: float) -> PlannedStep:
    """AutoAttack on all points if there is time, then ``fast``, then one attack; never a stronger claim than that."""
    norm, eps = facts.threat.require_convex("norm"), str(facts.threat.eps)
    if (planned := _attack_seconds(facts)) <= seconds:
        return PlannedStep("attack", AttackSettings(attacks="standard", norm=norm, eps=eps), planned)
    return (
        _fast(facts, seconds, norm, eps)
        or _single(facts, seconds, norm, eps)
        or _skip("attack", facts, _single_cost(facts, 10))
    )


def _fast(facts: Facts, seconds: float, norm: Any, eps: str) -> PlannedStep | None:
    """Quick attacks on as many points as possible, and AutoAttack on a sample."""
    each, time = facts.standard, seconds - SUITE_SECONDS
    power = min(50, int(0.15 * time / (POWER * each)))
    time -= power * POWER * each
    sample = min(100, int(0.6 * time / each))
    points = _points(facts, time - sample * each, QUICK * each)
    if sample < FEWEST or power < FEWEST or points < min(10 * FEWEST, facts.speed.points):
        return None
    budget = sample / 1000
    if points == facts.speed.points:  # what is left goes to the sample
        budget = min(1.0, max(budget, QUICK + (time - points * QUICK * each) / (points * each)))
    settings = AttackSettings(
        attacks="fast", norm=norm, eps=eps, points=points, budget=math.floor(1000 * budget) / 1000, power=power
    )
    size = max(sample, (settings.budget - QUICK) * points)
    planned = SUITE_SECONDS + (power * POWER + QUICK * points + size) * each
    note = f"an estimate, because AutoAttack on all points would take {format_duration(_attack_seconds(facts))}"
    note = _joined(note, _fraction(points, facts.speed.points))
    return PlannedStep("attack", settings, planned, note)


def _single_cost(facts: Facts, steps: int) -> float:
    return 1.3 * steps * facts.speed.gradient


def _single(facts: Facts, seconds: float, norm: Any, eps: str) -> PlannedStep | None:
    """One attack, the longest that covers enough points."""
    for name, steps, fewest in (("APGD-CE", 100, 5 * FEWEST), ("PGD-10", 10, FEWEST)):
        each = _single_cost(facts, steps)
        points = _points(facts, seconds, each)
        if points >= min(fewest, facts.speed.points):
            settings = AttackSettings(attacks=name, norm=norm, eps=eps, points=points)
            note = f"only one attack, because AutoAttack takes {format_duration(facts.standard)} per point"
            note = _joined(note, _fraction(points, facts.speed.points))
            return PlannedStep("attack", settings, points * each, note)
    return None


# --- certificates -------------------------------------------------------------------------------------------------


def _proof_seconds(facts: Facts) -> float:
    return 0.0 if facts.unprovable else 5 + facts.proof_seconds + PROOF * facts.speed.gradient * facts.speed.points


def _proof(facts: Facts, seconds: float) -> PlannedStep:
    if facts.unprovable:
        return PlannedStep("certify", note=f"left out: {facts.unprovable}")
    each, fixed = PROOF * facts.speed.gradient, 5 + facts.proof_seconds
    points = _points(facts, seconds - fixed, each)
    if not _enough(facts, points):
        return _skip("certify", facts, each, fixed)
    settings = CertifySettings(eps=facts.radius, points=points)
    return PlannedStep("certify", settings, fixed + points * each, _fraction(points, facts.speed.points))


def _smoothing_seconds(facts: Facts) -> float:
    return 0.0 if facts.certified else 1.1e5 * facts.speed.noisy * min(500, facts.speed.points)


def _smoothing(facts: Facts, seconds: float) -> PlannedStep:
    """As many samples as still allow 50 points, which decide how large a radius can be certified."""
    if facts.certified:
        return PlannedStep("smoothing", note="left out: the model has certificates that are proven")
    sigma = max(0.25, number(facts.radius, "eps") / 2)
    for samples, fewest in ((100_000, 50), (10_000, 50), (1000, FEWEST)):
        each = 1.1 * samples * facts.speed.noisy
        points = _points(facts, seconds, each, min(500, facts.speed.points))
        if points >= min(fewest, facts.speed.points):
            settings = CertifySettings(smooth=sigma, samples=samples, eps=facts.radius, points=points)
            note = _joined(f"{samples:,} samples per point", _fraction(points, facts.speed.points))
            return PlannedStep("smoothing", settings, points * each, note)
    return _skip("smoothing", facts, each)


# --- corruptions, explanation, curvature --------------------------------------------------------------------------


def _corruption_cost(facts: Facts) -> float:
    return CORRUPTED * facts.speed.forward + (facts.speed.corruptions or 0.0)


def _corruptions(facts: Facts, seconds: float) -> PlannedStep:
    if facts.speed.corruptions is None:
        return PlannedStep("corruptions", note="left out: the inputs are not images of at least 8 x 8 pixels")
    points = _points(facts, seconds, _corruption_cost(facts))
    if not _enough(facts, points):
        return _skip("corruptions", facts, _corruption_cost(facts))
    settings = AttackSettings(attacks="none", corruptions=True, points=points)
    return PlannedStep("corruptions", settings, points * _corruption_cost(facts), _fraction(points, facts.speed.points))


def _explain_cost(facts: Facts) -> float:
    return (EXPLAIN + CHECK / 6) * facts.speed.gradient  # a sixth of the points are checked


def _explain(facts: Facts, seconds: float) -> PlannedStep:
    most = min(100, facts.speed.points)
    points = _points(facts, seconds - 5, _explain_cost(facts), most)
    if not _enough(facts, points, most):
        return _skip("explain", facts, _explain_cost(facts), 5)
    settings = ExplainSettings(points=points, checks=min(16, math.ceil(points / 6)))
    return PlannedStep("explain", settings, 5 + points * _explain_cost(facts), _fraction(points, most))


def _curvature(facts: Facts, seconds: float) -> PlannedStep:
    each, most = CURVATURE * facts.speed.gradient, min(512, facts.training_points)
    points = _points(facts, seconds - 5, each, most)
    if not _enough(facts, points, most):
        return _skip("curvature", facts, each, 5)
    norm, eps = facts.threat.require_convex("norm"), str(facts.threat.eps)
    settings = CurvatureSettings(points=points, max_probes=PROBES, norm=norm, eps=eps)
    return PlannedStep("curvature", settings, 5 + points * each, _fraction(points, most))


@dataclass(frozen=True)
class _Kind:
    """How a step is planned: its weight, the time beyond which nothing is gained, and what fits into a time."""

    weight: float
    most: Callable[[Facts], float]
    fit: Fit


STEPS: Mapping[str, _Kind] = {
    "health": _Kind(0.0, _health_seconds, _health),
    "attack": _Kind(5.0, _attack_seconds, _attack),
    "certify": _Kind(1.0, _proof_seconds, _proof),
    "smoothing": _Kind(1.0, _smoothing_seconds, _smoothing),
    "corruptions": _Kind(1.0, lambda facts: _corruption_cost(facts) * facts.speed.points, _corruptions),
    "explain": _Kind(1.0, lambda facts: 5 + 100 * _explain_cost(facts), _explain),
    "curvature": _Kind(1.0, lambda facts: 5 + 512 * CURVATURE * facts.speed.gradient, _curvature),
}
"""The steps of an audit, in the order in which they run."""


def scaled(facts: Facts, factor: float) -> Facts:
    """The same facts on a machine that is slower by a factor."""
    speed = facts.speed
    corruptions = None if speed.corruptions is None else factor * speed.corruptions
    times = {name: factor * getattr(speed, name) for name in ("forward", "gradient", "noisy")}
    changed = dataclasses.replace(speed, corruptions=corruptions, **times)
    return dataclasses.replace(facts, speed=changed, proof_seconds=factor * facts.proof_seconds)


_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Parse a duration such as ``90s``, ``30m`` or ``1h30m`` into seconds; a number alone is in minutes.

    >>> [parse_duration(text) for text in ("90s", "30m", "1h30m", "2")]
    [90.0, 1800.0, 5400.0, 120.0]
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text) or [(text, "m")]
    try:
        seconds = sum(float(value) * _UNITS[unit] for value, unit in parts)
    except ValueError:
        seconds = math.nan
    complete = "".join(value + unit for value, unit in parts) in (text, f"{text}m")
    if not complete or not 0 < seconds < math.inf:
        raise InputError(f"budget: expected a duration such as 30m or 1h30m, got {text!r}")
    if seconds > LONGEST:
        raise InputError(f"budget: expected at most {LONGEST / 3600:,.0f} hours, got {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Seconds as text.

    >>> [format_duration(seconds) for seconds in (0.4, 75, 5400, 90_000)]
    ['under 1 s', '75 s', '1 h 30 min', '25 h']
    """
    if seconds < 1:
        return "under 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest and hours < 10 else f"{round(minutes / 60)} h"
