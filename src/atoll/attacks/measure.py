"""The measurement of robust accuracy, used by ``atoll attack`` and by the final test of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from atoll.attacks.base import Attack
from atoll.attacks.corruptions import Corruptions, evaluate_corruptions, save_strip
from atoll.attacks.curve import Curve, measure_curve
from atoll.attacks.diagnostics import EvaluationWarning, is_randomized
from atoll.attacks.evaluate import MISCLASSIFIED, PROBE, ROBUST, AttackSummary, Evaluation, attack_table, evaluate
from atoll.attacks.examples import Example, save_examples
from atoll.attacks.power import POINTS, Power, diagnose_power, measure_power
from atoll.attacks.rays import boundary_distance
from atoll.attacks.suites import SUITES, parse_attacks, sampling_for
from atoll.attacks.transfer import Transfer
from atoll.corruptions.base import check_images
from atoll.data.base import Split, to_float
from atoll.display import TextTable
from atoll.distributed import all_sum, is_main, rank, world_size
from atoll.errors import InputError
from atoll.measure import (
    MEASUREMENTS,
    Context,
    Measurement,
    Ranges,
    Result,
    Settings,
    execution,
    foreign_code,
    resolve_threat,
    select,
)
from atoll.stats import Accuracy, Estimate, SampledAccuracy
from atoll.subject import Subject, SubjectRecord
from atoll.threat import AttackNorm, ThreatModel, number


@dataclass(frozen=True, kw_only=True)
class AttackSettings(Settings):
    """Settings of ``atoll attack``: attacks, points and threat model.

    Args:
        attacks: standard, plus, rand, fast (an estimate), or names such as FGSM,PGD-20,CW-20,APGD-T.
        width: full width of the interval that fast aims for, in percentage points (default: as the budget allows).
        budget: passes of fast, as a share of those of standard.
        escalate: with fast, run standard on all points if the sample shows that the quick attacks miss many.
        individual: run every attack on all points instead of only on those that are still robust.
        surrogate: run whose model the attacks are crafted on (transfer attack).
        adbd: also measure the average decision boundary distance with RayS, which uses only predicted labels (linf).
        corruptions: also measure the accuracy under the fifteen common corruptions of ImageNet-C, at five severities.
        curve: also measure accuracy against eps with attacks that find the smallest perturbation; for l0, which
            AutoAttack does not cover, instead of standard.
        power: number of points at which to measure the power of the attacks (default: 50 for suites, otherwise 0).
        norm: norm of the threat model (default: as trained).
        eps: radius, a number or a fraction like 8/255 (default: as trained).
        batch_size: attack batch size (default: chosen to fit memory).
        compile: compile the passes of attacks with torch.compile, if possible.
    """

    kind: ClassVar[str] = "attack"
    ranges: ClassVar[Ranges] = {"batch_size": 1, "power": 0, "width": "(0, 100]", "budget": "(0, 1]"}
    attacks: str = "standard"
    width: float | None = None
    budget: float = 0.1
    escalate: bool = False
    individual: bool = False
    surrogate: str | None = None
    adbd: bool = False
    corruptions: bool = False
    curve: bool = False
    power: int | None = None
    norm: AttackNorm | None = None
    eps: str | None = None
    batch_size: int | None = execution(None)
    compile: bool = execution(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power and self.surrogate is not None:
            raise InputError("power: cannot be measured for transfer attacks, which do not use the model")
        sampling_for("fast", ThreatModel(), **self.sampling_options)
        if self.attacks == "fast" and self.individual:
            raise InputError("individual: fast is a cascade and cannot run its attacks individually; use standard")
        if self.curve and self.surrogate is not None:
            raise InputError("curve: expected no surrogate, because the closest points of a model do not transfer")

    def resolve(self, subject: Subject) -> Self:
        if self.norm == "l0" and self.curve and self.attacks == "standard":
            return dataclasses.replace(self, attacks="none").resolve(subject)
        if self.norm == "l0" and self.attacks == "none" and self.eps is None:
            return dataclasses.replace(self, eps="0").resolve(subject)  # not used
        threat = resolve_threat(subject, self.norm, self.eps)
        parse_attacks(self.attacks, threat)  # report unknown names before any work is done
        power = None if self.power == self._default_power else self.power
        resolved = dataclasses.replace(self, norm=threat.norm, eps=str(threat.eps), power=power)
        if self.attacks == "fast":
            return resolved
        return dataclasses.replace(resolved, width=None, budget=0.1, escalate=False)  # other attacks do not sample

    @property
    def sampling_options(self) -> dict[str, Any]:
        """How ``fast`` samples."""
        return {"width": self.width, "budget": self.budget, "escalate": self.escalate}

    @property
    def cascade(self) -> bool:
        """Whether each attack runs only on the points that are still robust, as in AutoAttack."""
        return self.attacks in SUITES and not self.individual

    @property
    def _default_power(self) -> int:
        return POINTS if self.attacks in SUITES and self.surrogate is None else 0

    @property
    def power_points(self) -> int:
        """Number of points at which to measure the power of the attacks."""
        return self._default_power if self.power is None else self.power

    @property
    def threat(self) -> str:
        """The threat model as text, such as ``linf 8/255``; only the norm if nothing is attacked at eps."""
        return f"{self.norm}" if self.attacks == "none" else f"{self.norm} {self.eps}"


@dataclass(frozen=True, kw_only=True)
class AttackResult(Result):
    """Accuracy with and without attack.

    Args:
        clean: accuracy without attack.
        robust: the pointwise worst case of all attacks; an upper bound of the accuracy under stronger ones.
        estimate: the accuracy under the attacks of ``fast`` and of ``standard``, from a sample; None for other attacks.
        attacks: one entry per attack, in order.
        warnings: reasons not to trust the numbers.
        batch_size: attack batch size.
        adbd: average decision boundary distance of the correctly classified points.
        corruptions: accuracy under common corruptions.
        curve: accuracy against eps; the distance of every point is in ``distances.safetensors``.
        power: how many planted adversarial inputs the attacks found, at points that they did not break.
        surrogate: the model on which the attacks were crafted.
        examples: what the model answers for a few points; their images are in ``examples.safetensors``.
    """

    kind: ClassVar[str] = "attack"
    settings: AttackSettings
    clean: Accuracy
    robust: Accuracy
    attacks: tuple[AttackSummary, ...]
    warnings: tuple[EvaluationWarning, ...] = ()
    batch_size: int = 0
    estimate: SampledAccuracy | None = None
    adbd: Estimate | None = None
    corruptions: Corruptions | None = None
    curve: Curve | None = None
    power: Power | None = None
    surrogate: SubjectRecord | None = None
    examples: tuple[Example, ...] = ()

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """All accuracies by name."""
        return {"clean": self.clean, **{attack.name: attack.accuracy for attack in self.attacks}}

    @property
    def at_eps(self) -> Accuracy | None:
        """Accuracy on the curve at the eps of the attacks; at most ``robust``.  None without attacks or curve."""
        if self.curve is None or not self.attacks:
            return None
        return self.curve.at(number(self.settings.eps or 0, "eps"))

    def table(self) -> TextTable:
        notes = [] if self.adbd is None else [f"mean distance to the boundary (ADBD): {self.adbd}"]
        notes += [] if self.corruptions is None else [self.corruptions.note]
        if self.curve is not None:
            at_eps = [f"{self.settings.threat} on the curve: at most {self.at_eps}"] if self.at_eps else []
            notes += [*at_eps, *self.curve.table().notes]
        notes += [] if self.power is None else [f"power: {self.power}"]
        return attack_table(f"{self._title}, {self.settings.threat}", self, notes)


@MEASUREMENTS.register("attack", own_name=False)
class MeasureAttack(Measurement):
    """Clean and robust accuracy of a model."""

    settings = AttackSettings
    result = AttackResult

    def depends_on(self, subject: Subject, settings: AttackSettings, context: Context) -> tuple[str, ...]:
        """Return the digests of the surrogate and of the code of attacks from outside Atoll."""
        attacks = parse_attacks(settings.attacks, resolve_threat(subject, settings.norm, settings.eps))
        digests = foreign_code(map(type, attacks.values()))
        if settings.surrogate is None:
            return digests
        return (*digests, _open_surrogate(settings.surrogate, subject, context).digest.value)

    def measure(self, subject: Subject, settings: AttackSettings, context: Context) -> dict[str, Any]:
        threat = resolve_threat(subject, settings.norm, settings.eps)
        attacks = parse_attacks(settings.attacks, threat)
        split = select(subject.data, settings.split, settings.points)
        if settings.corruptions:
            check_images(split.fetch(torch.arange(1)).shape)
        sampling = None
        if settings.attacks == "fast":
            probe = to_float(split.fetch(torch.arange(min(PROBE, len(split)))).to(context.device))
            randomized = is_randomized(subject.model, probe)
            sampling = sampling_for("fast", threat, randomized=randomized, **settings.sampling_options)
        surrogate = None
        if settings.surrogate is not None:
            other = _open_surrogate(settings.surrogate, subject, context)
            attacks = _transfer(attacks, other.model.to(context.device))
            if sampling is not None:
                sampling = dataclasses.replace(sampling, verify=_transfer(sampling.verify, other.model))
            surrogate = other.record
        evaluation = evaluate(
            subject.model,
            split,
            attacks,
            cascade=settings.cascade,
            sampling=sampling,
            batch_size=settings.batch_size,
            seed=settings.seed,
            device=context.device,
            folder=context.folder,
            compile=settings.compile,
            on_progress=context.on_progress,
        )
        adbd = _boundary_distance(subject, split, threat, evaluation, context) if settings.adbd else None
        corruptions = _corruptions(subject, split, settings, evaluation, context) if settings.corruptions else None
        curve, warnings = None, evaluation.warnings
        if settings.curve:
            curve, further = measure_curve(
                subject.model,
                split,
                threat,
                evaluation,
                seed=settings.seed,
                device=context.device,
                folder=context.folder,
                on_progress=context.on_progress,
            )
            warnings += tuple(warning for warning in further if warning not in warnings)
        every = {**attacks, **(sampling.verify if sampling else {})}
        power = _power(subject, split, every, settings, evaluation, context) if settings.power_points else None
        examples: tuple[Example, ...] = ()
        if context.folder is not None and is_main():
            examples = save_examples(
                subject.model,
                split,
                attacks,
                evaluation,
                subject.data.classes,
                context.folder,
                seed=settings.seed,
                device=context.device,
            )
        names = ("clean", "robust", "estimate", "attacks", "batch_size")
        fields = {name: getattr(evaluation, name) for name in names}
        warnings += () if power is None else tuple(diagnose_power(power))
        more = {"warnings": warnings, "adbd": adbd, "power": power, "curve": curve, "corruptions": corruptions}
        return fields | more | {"surrogate": surrogate, "examples": examples}


def _transfer(attacks: Mapping[str, Attack], surrogate: nn.Module) -> dict[str, Attack]:
    return {f"{name} (transfer)": Transfer(attack, surrogate) for name, attack in attacks.items()}


def _open_surrogate(path: str, subject: Subject, context: Context) -> Subject:
    """Open the surrogate, which must have the inputs and the number of classes of the subject."""
    if context.open_subject is None:
        raise InputError("surrogate: expected a run that can be opened; pass open_subject")
    surrogate = context.open_subject(path)
    expected, actual = (
        f"{'x'.join(map(str, data.shape))} in {data.num_classes} classes" for data in (subject.data, surrogate.data)
    )
    if actual != expected:
        raise InputError(f"surrogate: expected inputs of {expected}, got {actual} from {path}")
    return surrogate


def _power(
    subject: Subject,
    split: Split,
    attacks: Mapping[str, Attack],
    settings: AttackSettings,
    evaluation: Evaluation,
    context: Context,
) -> Power | None:
    """Measure the power of the attacks at points that they did not break; None if they broke all."""
    robust = (evaluation.broken_by == ROBUST).nonzero().squeeze(1)
    if not attacks or not len(robust):
        return None
    return measure_power(
        subject.model,
        split,
        attacks,
        robust,
        points=settings.power_points,
        batch_size=evaluation.batch_size,
        seed=settings.seed,
        device=context.device,
        on_progress=context.on_progress,
    )


def _boundary_distance(
    subject: Subject, split: Split, threat: ThreatModel, evaluation: Evaluation, context: Context
) -> Estimate:
    """Return the average decision boundary distance of the correctly classified points."""
    correct = evaluation.broken_by != MISCLASSIFIED
    index = correct.nonzero().squeeze(1)[rank() :: world_size()]
    distance = torch.zeros(len(split), dtype=torch.float64)
    done = 0
    for part in torch.split(index, evaluation.batch_size):
        x, y = to_float(split.fetch(part)).to(context.device), split.labels[part].to(context.device)
        distance[part] = boundary_distance(subject.model, x, y, bounds=threat.bounds).double().cpu()
        done += len(part)
        context.on_progress("RayS", done, len(index))
    return Estimate.mean_of(all_sum(distance)[correct])


def _corruptions(
    subject: Subject, split: Split, settings: AttackSettings, evaluation: Evaluation, context: Context
) -> Corruptions:
    """Return the accuracy under common corruptions."""
    if context.folder is not None:
        save_strip(split, context.folder, seed=settings.seed)
    return evaluate_corruptions(
        subject.model,
        split,
        batch_size=evaluation.batch_size,
        seed=settings.seed,
        device=context.device,
        folder=context.folder,
        on_progress=context.on_progress,
    )
