"""Measurements: a subject and typed settings give a typed result, stored under a digest of everything it depends on.

Commands, training, studies and Python code all use ``measure``.  Results are stored in::

    results/KIND/DIGEST/result.json    and further files of the result

The digest covers the subject (graph, weights, precision), the inputs, the settings and the version of the measurement.
A stored result is therefore reused only for exactly the same question, and results never overwrite each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch

from atoll.config import fields_to_plain, from_plain
from atoll.data.base import Data, Split, SubSplit, to_float
from atoll.display import Displayed, TextTable, cell
from atoll.distributed import default_device, fail_together, gather, is_main, open_shared, world_size
from atoll.errors import LARGEST_SEED, AtollError, DamagedError, InputError, ResultError, check_count, check_range
from atoll.files import LOCK, check_file, discard, json_digest, read_record, sha256, write_record
from atoll.graph import tensors_digest
from atoll.registry import Registry, class_path
from atoll.stats import Accuracy, Estimate
from atoll.subject import Subject, SubjectRecord
from atoll.threads import RECORD, record_threads, recorded_threads, settle_threads, threads_path
from atoll.threat import AttackNorm, ThreatModel

SplitName = Literal["train", "validation", "test"]
Device = torch.device  # `torch` is a field of Environment
Ranges = Mapping[str, int | tuple[int, int] | str]
SEEDS = (-LARGEST_SEED, LARGEST_SEED)
OnProgress = Callable[[str, float, int], None]  # name of the current task, units done, total units

R = TypeVar("R", bound="Result")

STORED = (".npz", ".safetensors")  # files whose digests a result contains; those of progress have -of- in their names

MEASUREMENTS = Registry(
    "measurement",
    "measurements",
    "atoll.measure.Measurement",
    "atoll.measure",
    modules=(
        "atoll.attacks.measure",
        "atoll.certify.measure",
        "atoll.curvature.measure",
        "atoll.explain.measure",
        "atoll.health.measure",
        "atoll.studies.cell",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of the settings of measurements.

    Fields marked with ``execution`` say how to compute, not what.  They do not change the result beyond rounding and
    are not part of its digest.

    Args:
        split: which points to use: train, validation or test.
        points: use the first N points (default: all).
        seed: seed of all random numbers.
    """

    kind: ClassVar[str]
    # The smallest value of each integer (and the largest), and the interval of each number.  Classes add their own.
    ranges: ClassVar[Ranges] = {"points": 1, "seed": SEEDS}
    split: SplitName = "test"
    points: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for cls in reversed(type(self).__mro__):
            for name, allowed in vars(cls).get("ranges", {}).items():
                value = {name: getattr(self, name)}
                if isinstance(allowed, str):
                    check_range(allowed, **value)
                else:
                    check_count(*(allowed if isinstance(allowed, tuple) else (allowed,)), **value)
        for item in dataclasses.fields(self):
            if item.default is None and getattr(self, item.name) == "":
                raise InputError(f"{item.name}: expected a value, got an empty string")

    def resolve(self, subject: Subject) -> Self:
        """Return a copy with the subject's defaults filled in, so that equal questions have equal settings."""
        return self

    def to_json(self) -> dict[str, Any]:
        return fields_to_plain(self)


def execution(default: Any) -> Any:
    """Declare a field of settings that says how to compute, not what."""
    return field(default=default, metadata={"execution": True, "stored": False})


@dataclass(frozen=True)
class Environment:
    """The software and hardware that computed a result, to explain differences between results."""

    atoll: str
    torch: str
    python: str
    machine: str
    device: str
    threads: int
    processes: int
    date: str

    @staticmethod
    def current(device: Device | None = None) -> Environment:
        device = device or default_device()
        return Environment(
            atoll=version("atoll"),
            torch=str(torch.__version__),
            python=platform.python_version(),
            machine=platform.machine(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            threads=torch.get_num_threads(),
            processes=world_size(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True, kw_only=True)
class Result(Displayed):
    """Base class of the results of measurements.  ``print`` and notebooks show its ``table``.

    Args:
        subject: the measured model.
        inputs: digest of the points.
        points: number of points.
        settings: the resolved settings.
        environment: the software and hardware that computed the result.
        seconds: duration of the measurement.
        files: digests of the other files of the result, by name.
        folder: folder of the result's files; not stored.
        stale: why the result no longer describes the current weights of its run; empty if it does or if this is not
            known; not stored.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    subject: SubjectRecord
    inputs: str
    points: int
    settings: Settings
    environment: Environment | None = None
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict, compare=False)
    folder: Path | None = field(default=None, compare=False, metadata={"stored": False})
    stale: str = field(default="", compare=False, metadata={"stored": False})

    @property
    def _title(self) -> str:
        """What was measured: the run, its checkpoint, and the points."""
        origin = self.subject.origin
        step = "" if origin.step is None else f", step {origin.step}"
        weights = "" if origin.weights == "raw" else f", {origin.weights}"
        return f"{origin.run or self.subject.model}{step}{weights}: {self.points:,} {self.settings.split} points"

    def table(self) -> TextTable:
        """The main numbers: all fields of the result that are one number or a short text."""
        common = {item.name for item in dataclasses.fields(Result)}
        values = {name: value for name, value in vars(self).items() if name not in common}
        rows = [[name, cell(v)] for name, v in values.items() if isinstance(v, Accuracy | Estimate | float | int | str)]
        return TextTable(f"{self._title}, {self.kind}", ["", "value"], rows)

    def file(self, name: str) -> Path | None:
        """Return the path of a file of the result, or None if it has no file of this name.

        Raises a ResultError if the file is missing or damaged.
        """
        if self.folder is None or name not in self.files:
            return None
        path = self.folder / name
        try:
            check_file(path, inside=self.folder)
            if sha256(path) != self.files[name]:
                raise ResultError(f"{path} cannot be read: damaged: the checksum does not match")
        except FileNotFoundError:
            raise ResultError(f"{path} cannot be read: the file is missing") from None
        except DamagedError as error:
            raise ResultError(str(error)) from None
        return path

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``from_json`` reads it back."""
        return {"kind": self.kind, "version": self.version, **fields_to_plain(self)}

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Read a stored result; fields that did not exist in an older version get their defaults."""
        if isinstance(tree, dict) and isinstance(tree.get("version"), int) and tree["version"] > cls.version:
            raise ResultError(f"this result was written by a newer version of Atoll ({tree['version']})")
        return from_plain(cls, tree)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The context of a measurement: folder, device and callbacks.

    Args:
        folder: folder for progress and for files of the result; None to store nothing.
        on_progress: called with the name of the current task, the units done, and the total.
        open_subject: opens the subject of another run, for measurements that involve two.
        device: where to compute.
    """

    folder: Path | None = None
    on_progress: OnProgress = lambda what, done, total: None
    open_subject: Callable[[str], Subject] | None = None
    device: torch.device = field(default_factory=default_device)


class Measurement(ABC):
    """Base class of all measurements; subclasses set ``settings`` and ``result`` and implement ``measure``."""

    registry: ClassVar[Registry] = MEASUREMENTS
    settings: ClassVar[type[Settings]]
    result: ClassVar[type[Result]]

    def inputs(self, subject: Subject, settings: Any) -> Split:
        """Return the points that the result depends on."""
        return select(subject.data, settings.split, settings.points)

    def depends_on(self, subject: Subject, settings: Any, context: Context) -> tuple[str, ...]:
        """Return digests of other things the result depends on, such as another subject."""
        return ()

    @abstractmethod
    def measure(self, subject: Subject, settings: Any, context: Context) -> dict[str, Any]:
        """Return the fields of the result that ``Result`` does not already have."""


def measurement(kind: str) -> Measurement:
    """Return a measurement by name.

    >>> measurement("attack").result.kind
    'attack'
    """
    instance: Measurement = MEASUREMENTS.resolve(kind).cls()
    return instance


def measure(
    subject: Subject,
    settings: Settings,
    results: Path | None = None,
    *,
    restart: bool = False,
    on_progress: OnProgress | None = None,
    open_subject: Callable[[str], Subject] | None = None,
    device: torch.device | None = None,
) -> Any:
    """Load the stored result for this subject and these settings, or measure it and store the result.

    An interrupted measurement resumes from its saved progress.

    Args:
        subject: the model to measure, with its data.
        settings: the settings of the measurement.
        results: folder of results; None to store nothing.
        restart: discard saved progress and a finished result.
        on_progress: called with the name of the current task, the units done, and the total.
        open_subject: opens the subject of another run.
        device: where to compute (default: ``default_device``).
    """
    method = measurement(settings.kind)
    settings = settings.resolve(subject)
    on_progress = on_progress or (lambda *_: None)
    context = Context(on_progress=on_progress, open_subject=open_subject, device=device or default_device())
    subject.model.to(context.device)
    split = method.inputs(subject, settings)
    if results is None:
        _settle_threads(subject, settings, context, split)
        return _compute(method, subject, settings, context, "", len(split))
    inputs = split_digest(split)
    others = method.depends_on(subject, settings, context)
    folder = results / settings.kind / result_digest(method.result, subject, inputs, settings, others)
    context = dataclasses.replace(context, folder=folder)
    stored = None if restart else _load_if_finished(folder, method.result)
    if all(gather(stored is not None)):
        return stored
    with open_shared(folder, results.parent):
        with fail_together():
            for path in folder.iterdir() if restart and is_main() else ():
                if path.name != LOCK:
                    discard(path)
        _settle_threads(subject, settings, context, split)
        with record_threads(folder) if is_main() else nullcontext():
            result = _compute(method, subject, settings, context, inputs, len(split))
            with fail_together():
                if is_main():
                    result = save_result(result, folder)
    return result


def _compute(
    method: Measurement, subject: Subject, settings: Settings, context: Context, inputs: str, points: int
) -> Result:
    began = time.monotonic()
    fields = method.measure(subject, settings, context)
    return method.result(
        subject=SubjectRecord("", model=type(subject.model).__name__) if context.folder is None else subject.record,
        inputs=inputs,
        points=points,
        settings=settings,
        environment=Environment.current(context.device),
        seconds=time.monotonic() - began,
        folder=context.folder,
        **fields,
    )


def _settle_threads(subject: Subject, settings: Settings, context: Context, split: Split) -> None:
    """Choose the number of threads if a command asked for it; an interrupted measurement has recorded it."""
    recorded = recorded_threads(threads_path(context.folder), RECORD) if context.folder is not None else None

    def inputs(rows: int) -> torch.Tensor:
        return to_float(split.fetch(torch.arange(rows))).to(context.device, subject.precision)

    rows = min(getattr(settings, "batch_size", None) or 512, len(split))
    settle_threads(recorded, context.device, subject.model, inputs, rows)


def result_digest(
    result: type[Result], subject: Subject, inputs: str, settings: Settings, others: tuple[str, ...] = ()
) -> str:
    """Return the digest under which a result is stored."""
    parts = [result.kind, result.version, subject.digest.value, inputs, settings.to_json(), list(others)]
    return json_digest(parts)[:16]


def save_result(result: R, folder: Path) -> R:
    """Write ``result.json``, and return the result with the digests of its other files."""
    files = [path for path in sorted(folder.glob("*")) if path.suffix in STORED and "-of-" not in path.stem]
    result = dataclasses.replace(result, files={path.name: sha256(path) for path in files}, folder=folder)
    write_record(folder / "result.json", "a measurement", {**result.to_json(), "question": folder.name})
    return result


def load_result(folder: Path) -> Result:
    """Load the result in a folder; raises a ResultError if it is damaged or not readable."""
    path = folder / "result.json"
    try:
        tree = read_record(path, "a measurement")
        if tree.pop("question", None) != folder.absolute().name:
            raise ResultError("the result of another measurement")
        member = MEASUREMENTS.resolve(tree.get("kind"), trust=False)  # a file must not choose what is imported
        result: Result = member.cls().result.from_json(tree)
    except FileNotFoundError:
        raise ResultError(f"{folder} has no result") from None
    except DamagedError as error:
        raise ResultError(str(error)) from None
    except (AtollError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from None
    return dataclasses.replace(result, folder=folder)


def _load_if_finished(folder: Path, kind: type[Result]) -> Result | None:
    """Load a finished result; returns None if there is none, or if it is damaged and must be measured again."""
    try:
        result = load_result(folder)
    except ResultError:
        return None
    return result if isinstance(result, kind) else None


def select(data: Data, split: str, points: int | None) -> Split:
    """Return the first points of a split, or all of them; raises an InputError if there are none."""
    selected = data.split(split)
    if not len(selected):
        raise InputError(f"split: the run has no {split} points")
    return selected if points is None else SubSplit(selected, torch.arange(min(points, len(selected))))


def split_digest(split: Split) -> str:
    """Return a digest of the labels and images of a split, which are read in batches."""
    indices = torch.split(torch.arange(len(split)), 1024)
    parts = [tensors_digest(split.labels), *(tensors_digest(split.fetch(index)) for index in indices)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def foreign_code(classes: Iterable[type]) -> tuple[str, ...]:
    """Return digests of the files that define classes from outside Atoll, whose results change with their code.

    >>> foreign_code([Settings])
    ()
    """
    files = {Path(inspect.getfile(cls)) for cls in classes if not class_path(cls).startswith("atoll.")}
    return tuple(sha256(file) for file in sorted(files))


def resolve_threat(subject: Subject, norm: AttackNorm | None, eps: str | None) -> ThreatModel:
    """Return the threat model of the settings; norm and eps default to those of training."""
    norm = subject.threat.norm if norm is None else norm
    threat = ThreatModel(norm, subject.threat.eps if eps is None else eps, subject.data.bounds)
    threat.check_radius(subject.data.shape)
    return threat
