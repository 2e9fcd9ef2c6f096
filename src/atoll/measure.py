"""A measurement: a subject and typed settings in, a typed result out, stored under the digest of all it depends on.

``measure`` is the one path for commands, training, studies and Python.  Results live in::

    results/KIND/DIGEST/result.json    and the files that belong to it

The digest covers the subject (graph, weights, precision), the inputs, the settings and the version of the measurement.
So a result is loaded only for exactly the question that it answers, and results never overwrite each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from atoll.config import fields_to_plain, from_plain
from atoll.data.base import Data, Split, SubSplit
from atoll.distributed import barrier, default_device, is_main, world_size
from atoll.errors import AtollError, InputError, ResultError, check_range
from atoll.files import check_writable, json_digest, sha256, write_json
from atoll.graph import tensors_digest
from atoll.registry import Registry, class_path
from atoll.subject import Subject, SubjectRecord
from atoll.threat import Norm, ThreatModel

SplitName = Literal["train", "validation", "test"]
Device = torch.device  # `torch` is a field of Environment
OnProgress = Callable[[str, float, int], None]  # what is under way, how much of it is done, of how much

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
        "atoll.studies.cell",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every measurement asks for.

    Fields marked with ``execution`` say how to compute, not what.  They do not change the result beyond rounding and
    are not part of its digest.

    Args:
        split: points to use: train, validation or test.
        points: use the first N points (default: all).
        seed: seed of all random numbers.
    """

    kind: ClassVar[str]
    split: SplitName = "test"
    points: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.at_least(points=1)

    def at_least(self, **least: float) -> None:
        """Refuse values below a limit; None is allowed."""
        for name, limit in least.items():
            check_range(f"[{limit}, inf]", **{name: getattr(self, name)})

    def resolve(self, subject: Subject) -> Self:
        """The same with everything filled in that the subject decides, so that equal questions have equal settings."""
        return self

    def to_json(self) -> dict[str, Any]:
        return fields_to_plain(self)


def execution(default: Any) -> Any:
    """A field of settings that says how to compute, not what."""
    return field(default=default, metadata={"execution": True, "stored": False})


@dataclass(frozen=True)
class Environment:
    """What a result was computed with; enough to explain a difference."""

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
class Result:
    """What every result knows about itself.

    Args:
        subject: what was measured.
        inputs: digest of the points.
        points: how many.
        settings: what was asked, resolved.
        environment: what it was computed with.
        seconds: how long it took.
        folder: where its files are; not stored.
        stale: why the result no longer describes its run's current weights; empty if it does, or not known; not stored.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    subject: SubjectRecord
    inputs: str
    points: int
    settings: Settings
    environment: Environment | None = None
    seconds: float = 0.0
    folder: Path | None = field(default=None, compare=False, metadata={"stored": False})
    stale: str = field(default="", compare=False, metadata={"stored": False})

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        return {"kind": self.kind, "version": self.version, **fields_to_plain(self)}

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Read a stored result; fields that an older version did not have get their defaults."""
        if isinstance(tree, dict) and isinstance(tree.get("version"), int) and tree["version"] > cls.version:
            raise ResultError(f"this result was written by a newer version of Atoll ({tree['version']})")
        return from_plain(cls, tree)


@dataclass(frozen=True, kw_only=True)
class Context:
    """How a measurement computes and where it puts its files.

    Args:
        folder: for files that belong to the result and for progress; None to store nothing.
        on_progress: called with what is under way, how much is done, and of how much.
        open_subject: opens the subject of another run, for measurements that involve two.
        device: where to compute.
    """

    folder: Path | None = None
    on_progress: OnProgress = lambda what, done, total: None
    open_subject: Callable[[str], Subject] | None = None
    device: torch.device = field(default_factory=default_device)


class Measurement(ABC):
    """Base of all measurements; a subclass names its settings and result and implements ``measure``."""

    registry: ClassVar[Registry] = MEASUREMENTS
    settings: ClassVar[type[Settings]]
    result: ClassVar[type[Result]]

    def inputs(self, subject: Subject, settings: Any) -> Split:
        """The points that the result depends on."""
        return select(subject.data, settings.split, settings.points)

    def depends_on(self, subject: Subject, settings: Any, context: Context) -> tuple[str, ...]:
        """Digests of whatever else the result depends on, such as another subject."""
        return ()

    @abstractmethod
    def measure(self, subject: Subject, settings: Any, context: Context) -> dict[str, Any]:
        """The fields of the result beyond those that every result has."""


def measurement(kind: str) -> Measurement:
    """A measurement by name.

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
    """Load the result that answers this question, or measure it (resuming what was interrupted) and store it.

    Args:
        subject: what to measure.
        settings: what to ask.
        results: folder of results; None to store nothing.
        restart: discard saved progress and a finished result.
        on_progress: called with what is under way, how much is done, and of how much.
        open_subject: opens the subject of another run.
        device: where to compute (default: ``default_device``).
    """
    method = measurement(settings.kind)
    settings = settings.resolve(subject)
    on_progress = on_progress or (lambda *_: None)
    context = Context(on_progress=on_progress, open_subject=open_subject, device=device or default_device())
    subject.model.to(context.device)
    split = method.inputs(subject, settings)
    inputs, folder = "", None
    if results is not None:
        inputs = split_digest(split)
        others = method.depends_on(subject, settings, context)
        folder = results / settings.kind / result_digest(method.result, subject, inputs, settings, others)
        if restart and is_main():
            shutil.rmtree(folder, ignore_errors=True)
        barrier()
        stored = None if restart else _load_if_finished(folder, method.result)
        barrier()
        if stored is not None:
            return stored
        check_writable(folder)
    began = time.monotonic()
    fields = method.measure(subject, settings, dataclasses.replace(context, folder=folder))
    result = method.result(
        subject=subject.record if results is not None else SubjectRecord("", model=type(subject.model).__name__),
        inputs=inputs,
        points=len(split),
        settings=settings,
        environment=Environment.current(context.device),
        seconds=time.monotonic() - began,
        folder=folder,
        **fields,
    )
    if folder is not None and is_main():
        save_result(result, folder)
    barrier()
    return result


def result_digest(
    result: type[Result], subject: Subject, inputs: str, settings: Settings, others: tuple[str, ...] = ()
) -> str:
    """What a result is stored under."""
    parts = [result.kind, result.version, subject.digest.value, inputs, settings.to_json(), list(others)]
    return json_digest(parts)[:16]


def save_result(result: Result, folder: Path) -> None:
    """Write ``result.json``, with a checksum."""
    tree = result.to_json()
    write_json(folder / "result.json", {**tree, "checksum": json_digest(tree)})


def load_result(folder: Path) -> Result:
    """The result in a folder; a ResultError if it is damaged or not readable."""
    path = folder / "result.json"
    try:
        if not path.is_file() or path.stat().st_size > 64 * 2**20:  # reading a pipe would never end
            raise ResultError("not a file that Atoll writes")
        tree = json.loads(path.read_text())
        if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
            raise ResultError("expected the result of a measurement")
        if tree.pop("checksum", None) != json_digest(tree):
            raise ResultError("damaged: its checksum does not match")
        member = MEASUREMENTS.resolve(tree["kind"], trust=False)  # a file must not choose what is imported
        result: Result = member.cls().result.from_json(tree)
    except (AtollError, OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from None
    return dataclasses.replace(result, folder=folder)


def _load_if_finished(folder: Path, kind: type[Result]) -> Result | None:
    """A finished result; None if there is none, or if it is damaged and has to be measured again."""
    try:
        result = load_result(folder)
    except ResultError:
        return None
    return result if isinstance(result, kind) else None


def select(data: Data, split: str, points: int | None) -> Split:
    """The first points of a split, or all; an error if there are none."""
    whole = data.split(split)
    if not len(whole):
        raise InputError(f"split: the run holds out no {split} points")
    return whole if points is None else SubSplit(whole, torch.arange(min(points, len(whole))))


def split_digest(split: Split) -> str:
    """A digest of the labels and images of a split, read in batches."""
    indices = torch.split(torch.arange(len(split)), 1024)
    parts = [tensors_digest(split.labels), *(tensors_digest(split.fetch(index)) for index in indices)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def foreign_code(classes: Iterable[type]) -> tuple[str, ...]:
    """Digests of the files that define classes from outside Atoll: their numbers change with their code.

    >>> foreign_code([Settings])
    ()
    """
    files = {Path(inspect.getfile(cls)) for cls in classes if not class_path(cls).startswith("atoll.")}
    return tuple(sha256(file) for file in sorted(files))


def resolve_threat(subject: Subject, norm: Norm | None, eps: str | None) -> ThreatModel:
    """The threat that settings name, with what they leave open as trained."""
    return ThreatModel(norm or subject.threat.norm, eps or subject.threat.eps, subject.data.bounds)
