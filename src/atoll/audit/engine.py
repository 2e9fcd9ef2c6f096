"""Run an audit: plan, measure, and write the page.

The folder ``audit`` of a run contains the plan and what became of it (``plan.json``), the page (``audit.html``) and the
same as plain data (``audit.json``).  The results themselves are in ``results``, like those of all commands.

The plan depends on measured speed, so it is stored before anything is measured.  An audit that was stopped follows its
stored plan, so its results are bit-identical to those of an audit that was not stopped.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from atoll.attacks.measure import AttackResult
from atoll.audit.plan import STEPS, Facts, PlannedStep, format_duration, make_plan, parse_duration, scaled
from atoll.audit.speed import measure_speed
from atoll.certify import certifier_for
from atoll.certify.measure import CertifyResult
from atoll.config import fields_to_plain, from_plain, to_plain
from atoll.display import Displayed, TextTable
from atoll.distributed import default_device
from atoll.errors import AtollError, InputError, UnsoundError
from atoll.files import finite, open_for_writing, read_record, write_json, write_record
from atoll.health import HealthResult
from atoll.measure import Result, resolve_threat, select, split_digest
from atoll.registry import suggest
from atoll.report import write_report
from atoll.report.blocks import Lead
from atoll.report.compare import usual_checkpoint
from atoll.report.evidence import evidence_json
from atoll.report.opening import opening
from atoll.report.run_summary import read_runs
from atoll.runs.run import Run, Which
from atoll.stats import Accuracy, Estimate, SampledAccuracy
from atoll.subject import Subject
from atoll.threat import AttackNorm, ThreatModel

PLAN = "plan.json"
FORMAT = 1  # its version
LATE = 1.25  # steps are planned again if they took this much longer than planned ...
SLACK = 20.0  # ... and at least so many seconds

OnStep = Callable[["Stage", int, int], None]
OnStage = Callable[[str, float, int], None]


@dataclass(frozen=True)
class Record:
    """What became of a step.

    Args:
        state: planned, done, failed or left out.
        seconds: its duration.
        message: why it failed.
        result: folder of the result within the run.
    """

    state: Literal["planned", "done", "failed", "left out"] = "planned"
    seconds: float = 0.0
    message: str = ""
    result: str = ""


@dataclass(frozen=True)
class Stage:
    """A step of an audit and what became of it."""

    step: PlannedStep
    record: Record = Record()

    def to_json(self) -> dict[str, Any]:
        return {**self.step.to_json(), **fields_to_plain(self.record)}


@dataclass(frozen=True)
class Audit(Displayed):
    """The result of ``audit``.

    Args:
        run: the run.
        stages: what was planned, and what became of it.
        results: the results by step.
        page: the HTML page.
        data: the evidence as plain data, also in ``audit.json``.
    """

    run: Run
    stages: tuple[Stage, ...]
    results: Mapping[str, Result] = field(default_factory=dict)
    page: Path = Path()
    data: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> TextTable:
        rows = [
            [
                stage.step.name,
                stage.record.state,
                format_duration(stage.record.seconds) if stage.record.state == "done" else "-",
                stage.record.message or stage.step.note,
            ]
            for stage in self.stages
        ]
        return TextTable(f"Audit of {self.run.folder.name}", ["step", "", "time", "note"], rows, [self.finding])

    @property
    def finding(self) -> str:
        """The main finding in one sentence."""
        return str(self.data.get("finding", ""))

    def number(self, name: str) -> Accuracy | SampledAccuracy | Estimate | None:
        """The number that ``--fail-under`` compares, such as ``robust`` (see ``GATES``); None if not measured."""
        if name not in GATES:
            raise InputError(f"fail_under: got {name!r}{suggest(name, GATES)}")
        kind, read = GATES[name]
        results = [result for result in self.results.values() if isinstance(result, kind)]
        numbers = [number for result in results if (number := read(result)) is not None]
        return numbers[0] if numbers else None

    def failures(self, limits: Mapping[str, float]) -> list[str]:
        """Compare numbers with limits in percent; returns a sentence for each that is not shown to reach its limit.

        A number reaches its limit if the lower end of its 95 % interval does.
        """
        failures = []
        for name, limit in limits.items():
            number = self.number(name)
            if number is None:
                failures.append(f"{name} was not measured, so nothing shows that it is at least {limit:g} %")
            elif not 100 * number.interval[0] >= limit:
                low, high = (100 * end for end in number.interval)
                value = f"{100 * number.value:.2f} % (95 %: {low:.1f}-{high:.1f})"
                failures.append(f"{name} is {value}, which does not show that it is at least {limit:g} %")
        return failures


def _robust(result: AttackResult) -> Accuracy | SampledAccuracy | None:
    return (result.estimate or result.robust) if result.attacks else None


def _corrupted(result: AttackResult) -> Estimate | None:
    return None if result.corruptions is None else result.corruptions.mean


# The numbers that can be compared with a limit: the kind of result, and how to read it.
GATES: Mapping[str, tuple[type[Any], Callable[[Any], Accuracy | SampledAccuracy | Estimate | None]]] = {
    "clean": (HealthResult, lambda result: result.clean),
    "robust": (AttackResult, _robust),
    "corrupted": (AttackResult, _corrupted),
    "verified": (CertifyResult, lambda result: None if result.is_probabilistic else result.verified[0].accuracy),
    "smoothed": (CertifyResult, lambda result: result.verified[0].accuracy if result.is_probabilistic else None),
}


def audit(
    run: Run,
    *,
    budget: str = "30m",
    only: tuple[str, ...] = (),
    norm: AttackNorm | None = None,
    eps: str | None = None,
    checkpoint: Which = "best",
    weights: str = "raw",
    restart: bool = False,
    on_plan: Callable[[Sequence[PlannedStep], bool], None] | None = None,
    on_step: OnStep | None = None,
    on_progress: OnStage | None = None,
) -> Audit:
    """Measure everything that can be said about a model in a given time, and write it to one page.

    Args:
        run: the run, which may be an adopted model.
        budget: the time, such as ``30m`` or ``1h30m``.
        only: names of steps (health, attack, certify, smoothing, corruptions, explain, curvature); all if empty.
        norm: norm of the threat model (default: as trained).
        eps: radius of the threat model (default: as trained).
        checkpoint: best, last, or a step.
        weights: raw, or the name of an average such as swa.
        restart: make a new plan and measure everything again.
        on_plan: called with the plan, and whether it was stored by an earlier audit.
        on_step: called before each step with its number and the number of steps.
        on_progress: called with the name of the current task, the units done, and the total.
    """
    seconds = parse_duration(budget)
    if unknown := [name for name in only if name not in STEPS]:
        raise InputError(f"only: got {unknown[0]!r}{suggest(unknown[0], STEPS)}")
    subject = run.subject(checkpoint, weights)
    threat = resolve_threat(subject, norm, eps)
    threat.require_convex("norm")
    folder = run.folder / "audit"
    key = {
        "format": FORMAT,
        "subject": subject.digest.value,
        "inputs": split_digest(select(subject.data, "test", None)),
        "budget": budget,
        "threat": [threat.norm, str(threat.eps)],
        "only": list(only),
        "version": version("atoll"),
    }
    with open_for_writing(folder, run.folder):
        state = None if restart else _State.load(folder, key, only)
        resumed = state is not None
        if state is None:
            state = _State(folder, key, _facts(subject, threat, only), seconds, only)
            state.save()
        if on_plan is not None:
            on_plan(state.steps, resumed)
        results = _measure(run, state, checkpoint, weights, restart, on_step, on_progress)
        page, data = _write(run, state, folder)
    return Audit(run, tuple(state.stages), results, page, data)


@dataclass
class _State:
    """The contents of ``plan.json``.

    It contains numbers and no settings, from which the plan follows again: a run folder from somebody else must not
    choose what is measured, or with which code.

    Args:
        folder: the folder of the audit.
        key: what the plan is for.
        facts: what the plan depends on.
        budget: the time in seconds.
        only: names of the steps to take; all if empty.
        changes: when the rest was planned again: the number of finished steps, the factor by which the machine was
            slower, and the seconds that were left.
        records: what became of the steps so far.
    """

    folder: Path
    key: Mapping[str, Any]
    facts: Facts
    budget: float
    only: tuple[str, ...]
    changes: list[tuple[int, float, float]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def steps(self) -> list[PlannedStep]:
        """All steps, with the changes of the plan."""
        steps = make_plan(self.facts, self.budget, self.only)
        for done, factor, left in self.changes:
            rest = tuple(step.name for step in steps[done:])
            steps[done:] = make_plan(scaled(self.facts, factor), left, rest)
        return steps

    @property
    def stages(self) -> list[Stage]:
        missing = len(self.steps) - len(self.records)
        return [
            Stage(step, record) for step, record in zip(self.steps, [*self.records, *[Record()] * missing], strict=True)
        ]

    def save(self) -> None:
        names = ("key", "facts", "budget", "changes", "records")
        write_record(self.folder / PLAN, "an audit", to_plain({name: getattr(self, name) for name in names}))

    @staticmethod
    def load(folder: Path, key: Mapping[str, Any], only: tuple[str, ...]) -> _State | None:
        """Load the plan of an earlier audit; None if there is none for the same model, points and budget."""
        try:
            tree = read_record(folder / PLAN, "an audit")
            if tree["key"] != key:
                return None
            changes = [(int(done), float(factor), float(left)) for done, factor, left in tree["changes"]]
            records = [from_plain(Record, record) for record in tree["records"]]
            state = _State(folder, key, from_plain(Facts, tree["facts"]), float(tree["budget"]), only, changes, records)
            return state if len(state.steps) >= len(records) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AtollError):
            return None  # none, or damaged

    def finish(self, number: int, record: Record) -> None:
        """Record what became of a step, and plan the rest again if the steps so far took much longer than planned."""
        self.records[number:] = [record, *self.records[number + 1 :]]
        stages = self.stages
        finished, rest = stages[: number + 1], stages[number + 1 :]
        spent = sum(stage.record.seconds for stage in finished)
        planned = sum(stage.step.seconds for stage in finished if stage.record.state == "done")
        left = max(self.budget - spent, 0.0)
        fits = sum(stage.step.seconds for stage in rest) <= left + SLACK or spent <= LATE * planned
        if rest and not fits and len(self.records) == number + 1:
            self.changes.append((number + 1, spent / planned if planned else 1.0, left))
        self.save()


def _facts(subject: Subject, threat: ThreatModel, only: tuple[str, ...]) -> Facts:
    """Measure what the plan depends on."""
    speed = measure_speed(subject, default_device())
    unprovable, seconds = "", 0.0
    if not only or "certify" in only:
        began = time.perf_counter()
        try:
            certifier_for(copy.deepcopy(subject.model).double(), shape=tuple(subject.data.shape))
        except AtollError as error:
            unprovable = str(error)
        seconds = time.perf_counter() - began
    certified = subject.loss is not None and subject.loss.certifies and not unprovable
    return Facts(speed, threat, unprovable, seconds, certified, len(subject.data.split("train")))


def _measure(
    run: Run,
    state: _State,
    checkpoint: Which,
    weights: str,
    restart: bool,
    on_step: OnStep | None,
    on_progress: OnStage | None,
) -> dict[str, Result]:
    """Take the steps in order.  One that fails is recorded with its reason; the others still run."""
    results: dict[str, Result] = {}
    for number in range(len(state.steps)):
        stage = state.stages[number]
        if on_step is not None:
            on_step(stage, number, len(state.steps))
        record = Record("left out")
        if stage.step.settings is not None:
            began = time.perf_counter()
            try:
                result = run.measure(
                    stage.step.settings,
                    checkpoint=checkpoint,
                    weights=weights,
                    restart=restart,
                    on_progress=on_progress,
                )
            except UnsoundError:
                raise
            except AtollError as error:
                record = Record("failed", message=str(error))
            else:
                results[stage.step.name] = result
                known = stage.record.state == "done"
                seconds = stage.record.seconds if known else time.perf_counter() - began
                folder = "" if result.folder is None else f"results/{result.kind}/{result.folder.name}"
                record = Record("done", seconds, result=folder)
        state.finish(number, record)
    return results


def _write(run: Run, state: _State, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the page and the same as plain data."""
    name = run.folder.resolve().name
    page = write_report([run.folder], folder / "audit.html", title=f"Audit of {name}")
    (summary,) = read_runs([run.folder])
    first = next((block for block in opening([summary], usual_checkpoint([summary])) if isinstance(block, Lead)), None)
    data = evidence_json(summary)
    data |= {
        "finding": "" if first is None else first.text,
        "budget": state.budget,
        "steps": [stage.to_json() for stage in state.stages],
    }
    write_json(folder / "audit.json", finite(data))
    return page, data
