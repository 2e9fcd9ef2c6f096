"""Robust accuracy of a subject: the measurement behind ``atoll attack`` and the test at the end of training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.evaluate import MISCLASSIFIED, AttackSummary, Evaluation, evaluate
from atoll.attacks.examples import Example, save_examples
from atoll.attacks.rays import boundary_distance
from atoll.attacks.suites import SUITES, parse_attacks
from atoll.attacks.transfer import Transfer
from atoll.data.base import Split, to_float
from atoll.distributed import all_sum, is_main, rank, world_size
from atoll.errors import InputError
from atoll.measure import (
    MEASUREMENTS,
    Context,
    Measurement,
    Result,
    Settings,
    execution,
    foreign_code,
    resolve_threat,
    select,
)
from atoll.stats import Accuracy, Estimate
from atoll.subject import Subject, SubjectRecord
from atoll.threat import Norm, ThreatModel


@dataclass(frozen=True, kw_only=True)
class AttackSettings(Settings):
    """Which attacks, on which points, within which threat.

    Args:
        attacks: standard, plus, rand, fast, or names such as FGSM,PGD-20,CW-20,APGD-T.
        individual: run every attack on all points instead of only on those that are still robust.
        surrogate: craft the attacks on the model of this run.
        adbd: also measure the mean distance to the boundary with RayS, from labels alone (linf).
        norm: norm of the threat (default: as trained).
        eps: radius, a number or a fraction like 8/255 (default: as trained).
        batch_size: attack batch size (default: chosen to fit memory).
    """

    kind: ClassVar[str] = "attack"
    attacks: str = "standard"
    individual: bool = False
    surrogate: str | None = None
    adbd: bool = False
    norm: Norm | None = None
    eps: str | None = None
    batch_size: int | None = execution(None)

    def __post_init__(self) -> None:
        self.at_least(points=1, batch_size=1)

    def resolve(self, subject: Subject) -> Self:
        threat = resolve_threat(subject, self.norm, self.eps)
        parse_attacks(self.attacks, threat)  # a wrong name is an error before any work
        return dataclasses.replace(self, norm=threat.norm, eps=str(threat.eps))

    @property
    def cascade(self) -> bool:
        """Whether each attack runs only on the points that are still robust, as in AutoAttack."""
        return self.attacks in SUITES and not self.individual

    @property
    def threat(self) -> str:
        """As text, ``linf 8/255``."""
        return f"{self.norm} {self.eps}"


@dataclass(frozen=True, kw_only=True)
class AttackResult(Result):
    """Accuracy with and without attack.

    Args:
        clean: accuracy without attack.
        robust: the pointwise worst case of all attacks.
        attacks: one entry per attack, in order.
        warnings: reasons not to trust the numbers.
        batch_size: rows attacked at a time.
        adbd: average decision boundary distance of the points that are classified correctly.
        surrogate: the model that the attacks were crafted on.
        examples: what the model answers for a few points; their images are in ``examples.safetensors``.
    """

    kind: ClassVar[str] = "attack"
    settings: AttackSettings
    clean: Accuracy
    robust: Accuracy
    attacks: tuple[AttackSummary, ...]
    warnings: tuple[EvaluationWarning, ...] = ()
    batch_size: int = 0
    adbd: Estimate | None = None
    surrogate: SubjectRecord | None = None
    examples: tuple[Example, ...] = ()

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """All accuracies by name."""
        return {"clean": self.clean, **{attack.name: attack.accuracy for attack in self.attacks}}


@MEASUREMENTS.register("attack", own_name=False)
class MeasureAttack(Measurement):
    """Accuracy of a model without and under attack."""

    settings = AttackSettings
    result = AttackResult

    def depends_on(self, subject: Subject, settings: AttackSettings, context: Context) -> tuple[str, ...]:
        """The surrogate, and the code of attacks from outside Atoll."""
        attacks = parse_attacks(settings.attacks, resolve_threat(subject, settings.norm, settings.eps))
        digests = foreign_code(map(type, attacks.values()))
        if settings.surrogate is None:
            return digests
        return (*digests, _open_surrogate(settings.surrogate, context).digest.value)

    def measure(self, subject: Subject, settings: AttackSettings, context: Context) -> dict[str, Any]:
        threat = resolve_threat(subject, settings.norm, settings.eps)
        attacks = parse_attacks(settings.attacks, threat)
        surrogate = None
        if settings.surrogate is not None:
            other = _open_surrogate(settings.surrogate, context)
            model = other.model.to(context.device)
            attacks = {f"{name} (transfer)": Transfer(attack, model) for name, attack in attacks.items()}
            surrogate = other.record
        split = select(subject.data, settings.split, settings.points)
        evaluation = evaluate(
            subject.model,
            split,
            attacks,
            cascade=settings.cascade,
            batch_size=settings.batch_size,
            seed=settings.seed,
            device=context.device,
            folder=context.folder,
            on_progress=context.on_progress,
        )
        adbd = _boundary_distance(subject, split, threat, evaluation, context) if settings.adbd else None
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
        names = ("clean", "robust", "attacks", "warnings", "batch_size")
        fields = {name: getattr(evaluation, name) for name in names}
        return fields | {"adbd": adbd, "surrogate": surrogate, "examples": examples}


def _open_surrogate(path: str, context: Context) -> Subject:
    if context.open_subject is None:
        raise InputError("surrogate: expected a run that can be opened; pass open_subject")
    return context.open_subject(path)


def _boundary_distance(
    subject: Subject, split: Split, threat: ThreatModel, evaluation: Evaluation, context: Context
) -> Estimate:
    """Average decision boundary distance of the points that are classified correctly."""
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
