"""What was measured of a run, property by property: how, with what uncertainty, how to repeat it, and what is missing.

The properties are those that people ask for when they have to say how far a classifier can be trusted.  Nothing here
judges: a property is a list of numbers, and a list of what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifyResult
from atoll.curvature.measure import CurvatureResult
from atoll.explain.measure import ExplainResult, short_names
from atoll.health import HealthResult
from atoll.measure import Result
from atoll.report.blocks import TableCell
from atoll.report.commands import command, repeat
from atoll.report.compare import usual_checkpoint
from atoll.report.run_summary import RunSummary
from atoll.report.text import accuracy, digits, estimate, plain
from atoll.stats import Accuracy, Estimate, SampledAccuracy

SCHEMA = 1
"""Version of ``evidence_json``.  It increases when a key is renamed or removed or changes its meaning."""

Number = Accuracy | SampledAccuracy | Estimate | float


@dataclass(frozen=True)
class Evidence:
    """One measured number.

    Args:
        what: the quantity.
        number: the number.
        unit: "share" for numbers between 0 and 1 that are shares of the points; otherwise empty.
        how: the measurement in a few words.
        uncertainty: what the number does and does not show.
        points: number of points.
        split: split that they are from.
        command: the command that measures it again.
        subject: digest of the model.
        inputs: digest of the points.
        result: folder of the result within the run.
    """

    what: str
    number: Number
    unit: str
    how: str
    uncertainty: str
    points: int
    split: str
    command: str = ""
    subject: str = ""
    inputs: str = ""
    result: str = ""

    @property
    def cell(self) -> TableCell:
        """The number with its 95 % interval, for a table."""
        match self.number:
            case Accuracy() | SampledAccuracy():
                return accuracy(self.number)
            case Estimate() if self.unit == "share":
                return estimate(self.number, scale=100, form=".2f", unit=" %")
            case Estimate():
                return estimate(self.number)
        return TableCell(digits(self.number))

    def to_json(self) -> dict[str, Any]:
        number: dict[str, Any] = {"value": self.number, "interval": None}
        if not isinstance(self.number, float):
            number = {"value": self.number.value, "interval": list(self.number.interval)}
        names = ("what", "unit", "how", "uncertainty", "points", "split", "command", "subject", "inputs", "result")
        return {**{name: getattr(self, name) for name in names}, **number}


@dataclass(frozen=True)
class NotMeasured:
    """Something that was not measured, and the command that measures it, if there is one."""

    what: str
    command: str = ""


@dataclass(frozen=True)
class Property:
    """A property of a classifier: what was measured of it, and what was not."""

    name: str
    question: str
    evidence: Sequence[Evidence] = field(default_factory=tuple)
    not_measured: Sequence[NotMeasured] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "evidence": [each.to_json() for each in self.evidence],
            "not_measured": [vars(each) for each in self.not_measured],
        }


def properties(run: RunSummary) -> list[Property]:
    """All properties of a run, from results at the kind of checkpoint that most results are about."""
    return [_accuracy(run), _evasion(run), _corruption(run), _certified(run), _sensitivity(run), _relevance(run)]


def _results(run: RunSummary, kind: type[Any]) -> list[Any]:
    """Current results of a kind at the usual checkpoint, the newest first."""
    checkpoint = usual_checkpoint([run])
    return [result for result in reversed(run.current(kind)) if checkpoint in run.checkpoints(result)]


def _evidence(
    run: RunSummary, result: Result, what: str, number: Number, how: str, uncertainty: str, unit: str = ""
) -> Evidence:
    folder = "" if result.folder is None else f"results/{result.kind}/{result.folder.name}"
    return Evidence(
        what=what,
        number=number,
        unit="share" if isinstance(number, Accuracy | SampledAccuracy) else unit,
        how=how,
        uncertainty=uncertainty,
        points=result.points,
        split=plain(result.settings.split),
        command=repeat(run.folder, result) or "",
        subject=plain(result.subject.digest),
        inputs=plain(result.inputs),
        result=plain(folder),
    )


def _ways(run: RunSummary, measured: Sequence[Any], what: str, verb: str, *flags: str) -> list[NotMeasured]:
    return [] if measured else [NotMeasured(what, command(verb, run.folder, *flags))]


def _accuracy(run: RunSummary) -> Property:
    health, attacks = _results(run, HealthResult), _results(run, AttackResult)
    clean = max([*health, *attacks], key=lambda result: result.points, default=None)
    evidence = []
    if clean is not None:
        uncertainty = "The interval covers the choice of the points from the distribution of the test data."
        evidence.append(_evidence(run, clean, "clean accuracy", clean.clean, "one pass without attack", uncertainty))
    return Property(
        "Accuracy",
        "How often is the model right on images like those of the test set?",
        evidence,
        [
            *_ways(run, health, "checks of data and model", "health"),
            NotMeasured("accuracy on images from other sources, cameras or times than the test set"),
        ],
    )


def _evasion(run: RunSummary) -> Property:
    attacked = [result for result in _results(run, AttackResult) if result.attacks]
    norms = {result.settings.norm for result in attacked}
    others = [norm for norm in ("linf", "l2", "l1") if norm not in norms]
    missing = _ways(run, attacked, "accuracy under attack", "attack")
    if attacked and not any(result.settings.cascade for result in attacked):
        missing.append(NotMeasured("accuracy under AutoAttack", command("attack", run.folder)))
    if attacked and not any(result.curve for result in attacked):
        flags = ("--attacks", "none", "--curve")
        missing.append(NotMeasured("accuracy against eps", command("attack", run.folder, *flags)))
    for norm in others if attacked else ():
        line = command("attack", run.folder, "--attacks", "none", "--curve", "--norm", norm)
        missing.append(NotMeasured(f"accuracy against eps in {norm}", line))
    missing.append(NotMeasured("patches, rotations, physical attacks, poisoned training data and backdoors"))
    return Property(
        "Robustness to evasion",
        "How often is the model right if somebody changes every image a little to mislead it?",
        [each for result in attacked for each in _attacked(run, result)],
        missing,
    )


def _attacked(run: RunSummary, result: AttackResult) -> Iterator[Evidence]:
    where = plain(result.settings.threat)
    names = ", ".join(plain(attack.name) for attack in result.attacks)
    how = f"{plain(result.settings.attacks)}: {names}"
    warned = " Read the warnings about this number." if result.warnings else ""
    bound = "An upper bound: attacks that were not tried may break more points."
    if result.estimate is None:
        yield _evidence(run, result, f"accuracy under attack, {where}", result.robust, how, bound + warned)
    else:
        sample = result.estimate
        how += f"; AutoAttack on a random sample of {sample.sampled:,} of the {sample.remaining:,} points that remained"
        text = "An unbiased estimate of the accuracy of these points under AutoAttack, which is itself an upper bound."
        yield _evidence(run, result, f"accuracy under attack, {where}", sample, how, text + warned)
    if result.power is not None and result.power.share.total:
        text = "Low power shows that the attacks miss adversarial inputs. High power does not show that they miss none."
        how = "adversarial inputs are planted near points that the attacks did not break"
        what = f"planted adversarial inputs that the attacks find, {where}"
        yield _evidence(run, result, what, result.power.share, how, text)


def _corruption(run: RunSummary) -> Property:
    measured = [result for result in _results(run, AttackResult) if result.corruptions is not None]
    text = "The interval covers the choice of the points, not that of the corruptions."
    how = "the fifteen common corruptions of ImageNet-C at five severities (frost is a generated texture)"
    return Property(
        "Stability under corruption",
        "How often is the model right on noisy, blurred or badly compressed images?",
        [
            _evidence(run, result, "mean accuracy under corruptions", result.corruptions.mean, how, text, "share")
            for result in measured
        ],
        [
            *_ways(run, measured, "accuracy under common corruptions", "attack", "--attacks", "none", "--corruptions"),
            NotMeasured("other changes of the images, such as other cameras, viewpoints or lighting"),
        ],
    )


def _certified(run: RunSummary) -> Property:
    measured = _results(run, CertifyResult)
    missing = _ways(run, measured, "certified radii", "certify", "--smooth", "0.25", "--eps", "0.25")
    missing.append(NotMeasured("certificates for other norms than l2"))
    return Property(
        "Certified radius",
        "For how many images is it proven that no small change misleads the model?",
        [each for result in measured for each in _proven(run, result)],
        missing,
    )


def _proven(run: RunSummary, result: CertifyResult) -> Iterator[Evidence]:
    settings = result.settings
    if result.is_probabilistic:
        how = f"randomized smoothing, sigma {digits(settings.smooth)}, {settings.samples:,} samples"
        text = (
            f"Each certificate is false with probability at most {digits(settings.alpha)}, and is about the smoothed"
            " model, not about the model itself."
        )
    else:
        how = f"a proof about the captured graph in {plain(settings.precision)}, with rounding"
        text = "A lower bound of the robust accuracy that no attack can break. A small number does not show weakness."
        if result.check is not None:
            text += f" {result.check.attacked:,} certified points were attacked at their radius, and none changed."
    for row in result.verified:
        yield _evidence(run, result, f"verified accuracy at l2 {digits(row.eps)}", row.accuracy, how, text)
    median = float(result.median_radius)
    if math.isfinite(median):
        yield _evidence(run, result, "median certified radius, l2", median, how, text)


def _sensitivity(run: RunSummary) -> Property:
    explained, curved = _results(run, ExplainResult), _results(run, CurvatureResult)
    evidence = []
    for result in explained:
        how = f"search for the closest boundary point in {plain(result.settings.norm)}"
        text = "An upper bound: closer boundary points may exist."
        if math.isfinite(result.distance.value):
            name = "mean distance to the decision boundary"
            evidence.append(_evidence(run, result, name, result.distance, how, text))
    for result in curved:
        how = f"{plain(result.loss)} at {result.settings.threat if result.attacked else 'clean inputs'}"
        text = (
            "The interval covers random probes, not the choice of the points. Compare models only with the same loss."
        )
        evidence.append(_evidence(run, result, "Weight-Curvature Index (WCI)", result.wci, how, text))
        if result.trace is not None:
            evidence.append(_evidence(run, result, "trace of the Hessian of the loss", result.trace, how, text))
    for result in _results(run, CertifyResult):
        if result.lipschitz is not None:
            how, text = "product of proven norms", "An upper bound; the true constant is often much smaller."
            evidence.append(_evidence(run, result, "Lipschitz constant (l2)", float(result.lipschitz), how, text))
    return Property(
        "Sensitivity",
        "How much do the outputs and the loss change when the input or the weights change?",
        evidence,
        [
            *_ways(run, explained, "distance to the decision boundary", "explain"),
            *_ways(run, curved, "curvature of the loss", "curvature"),
            NotMeasured("sensitivity at inputs that are unlike these points"),
        ],
    )


def _relevance(run: RunSummary) -> Property:
    explained = _results(run, ExplainResult)
    evidence = []
    for result in explained:
        names = short_names(result.methods)
        for name, method in result.methods.items():
            how = f"attribution {plain(names[name])}"
            text = "Lower is better: the attribution predicts how the output changes under noise."
            what = f"infidelity at the best scale, {plain(names[name])}"
            evidence.append(_evidence(run, result, what, method.scaled_infidelity, how, text))
            if method.f1 is not None:
                text = "Higher is better: positive attributions lie in the bounding box."
                evidence.append(_evidence(run, result, f"locality F1, {plain(names[name])}", method.f1, how, text))
    return Property(
        "Relevance",
        "Which pixels does the model use, and do the maps that show them describe the model?",
        evidence,
        [
            *_ways(run, explained, "attributions and their faithfulness", "explain"),
            NotMeasured("whether the pixels that matter are those that a human would use, unless there are boxes"),
        ],
    )


def evidence_json(run: RunSummary) -> dict[str, Any]:
    """The evidence about a run as plain data, with a versioned schema."""
    return {
        "schema": SCHEMA,
        "run": plain(run.name),
        "checkpoint": usual_checkpoint([run]),
        "properties": [each.to_json() for each in properties(run)],
        "warnings": [{"what": each.what, "message": each.message} for each in run.warnings],
    }
