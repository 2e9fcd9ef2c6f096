"""What is known about a run.  Every part may be missing or broken; then a note says why, and which command makes it.

Nothing of the run is executed: no class that it names is imported, no model or data set is built, nothing is unpickled.
Files that are not regular, too large, or links out of the run's folder are not read.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifyResult
from atoll.curvature.measure import CurvatureResult
from atoll.errors import AtollError, CheckpointError, DataError, InputError
from atoll.explain.measure import ExplainResult
from atoll.files import is_inside, read_record
from atoll.health import HealthResult
from atoll.measure import Result
from atoll.report.blocks import Callout, Missing
from atoll.report.commands import VERBS, command, resume
from atoll.report.text import plain
from atoll.runs.run import Run, open_run
from atoll.training.observers import read_metrics

LARGEST = 64 * 2**20  # bytes of one file; Atoll writes far smaller ones
R = TypeVar("R", bound=Result)
T = TypeVar("T")


@dataclass
class RunSummary:
    """A run and everything that was measured of it.

    Args:
        number: its place among the runs of the page, which decides its color.
        name: its name on the page.
        run: the run.
        environment: what it was trained with.
        epochs: the records of the epochs.
        results: everything that was measured, oldest first.
        warnings: what a reader of the numbers must know.
        missing: what was not measured or cannot be read.
    """

    number: int
    name: str
    run: Run
    environment: Mapping[str, Any] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, Any]] = ()
    results: list[Result] = field(default_factory=list)
    warnings: list[Callout] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.run.folder

    def current(self, kind: type[R]) -> list[R]:
        """Results of a kind that describe weights which the run still has."""
        return [result for result in self.results if isinstance(result, kind) and not result.stale]

    def checkpoints(self, result: Result) -> list[str]:
        """What kind of checkpoint a result describes: best, last, both, or a step."""
        origin = result.subject.origin
        if origin.step is None:
            return ["unknown"]
        try:
            return self.run.checkpoint_name(origin).split(" and ")
        except CheckpointError:
            return [f"step {origin.step}"]

    def recipe_value(self, *path: str) -> Any:
        """A part of the recipe, None if it has none; it is plain data that anybody may have written."""
        tree: Any = self.run.recipe
        for name in path:
            tree = tree.get(name) if isinstance(tree, Mapping) else None
        return tree

    @property
    def method(self) -> str:
        """The loss and every method that was added to it, such as ``TRADES + TrH``."""
        methods = self.recipe_value("methods")
        parts = [self.recipe_value("loss"), *(methods if isinstance(methods, list) else [])]
        paths = [part.get("class_path") if isinstance(part, Mapping) else part for part in parts]
        names = [plain(path).rpartition(":")[2].rpartition(".")[2] for path in paths if isinstance(path, str)]
        return " + ".join(name for name in names if not name.startswith("Measure"))  # which does not change training

    def add_missing(self, about: str, what: str, reason: str, command: str = "", is_problem: bool = True) -> None:
        gap = Missing(about, what, reason, command, self.number, is_problem)
        if gap not in self.missing:  # two sections may read one file
            self.missing.append(gap)

    def add_warning(self, about: str, what: str, message: str) -> None:
        self.warnings.append(Callout(about, what, message, self.number))

    def load(self, about: str, path: Path, read: Callable[[Path], T]) -> T | None:
        """A file of the run; None if it is not there, and a note as well if it cannot be read."""
        try:
            return read(path) if os.path.lexists(path) else None
        except (OSError, ValueError, RecursionError, AtollError, zipfile.BadZipFile) as error:
            reason = str(error).removeprefix(f"{path} cannot be read: ")
            self.add_missing(about, path.name, f"cannot be read: {reason}")
            return None

    def load_file(
        self, about: str, result: Result, name: str, read: Callable[[Path], T], *, whole: bool = True
    ) -> T | None:
        """A file of a result, verified; None if it has none, and a note as well if it cannot be read.

        A file that ``read`` does not read as a ``whole`` may have any size.
        """
        try:
            path = result.file(name)
            if path is None:
                return None
            if whole and _size(path) > LARGEST:
                raise DataError(f"larger than {LARGEST // 2**20} MB")
            return read(path)
        except (OSError, ValueError, RecursionError, AtollError, zipfile.BadZipFile) as error:
            reason = str(error).removeprefix(f"{result.folder}/{name} cannot be read: ")
            self.add_missing(about, name, f"cannot be read: {reason}")
            return None


def read_runs(folders: Sequence[Path | str]) -> list[RunSummary]:
    """Everything that the folders of some runs hold; a folder without a run is an error."""
    runs = [_open(Path(folder)) for folder in folders]
    summaries = [RunSummary(i, name, run) for i, (name, run) in enumerate(zip(short_names(runs), runs, strict=True))]
    for summary in summaries:
        _read_training(summary)
        _read_results(summary)
        _find_gaps(summary)
    return summaries


def _open(folder: Path) -> Run:
    """A run whose own files are regular; reading a pipe would never end."""
    for pattern in ("recipe.yaml", "index.json", "checkpoints/*/checkpoint.json"):
        for path in folder.glob(pattern):
            if not path.is_file() or path.stat().st_size > LARGEST:
                raise InputError(f"{folder} does not hold a run: {path.name} is not a file that Atoll writes")
    return open_run(folder)


def short_names(runs: Sequence[Run]) -> list[str]:
    """Short names that tell the runs apart.

    >>> names = lambda *paths: short_names([Run(Path(path)) for path in paths])
    >>> names("runs/a", "runs/b"), names("one/a", "two/a"), names("a", "a")
    (['a', 'b'], ['one/a', 'two/a'], ['a', 'a (2)'])
    """
    paths = [run.folder.resolve().parts for run in runs]
    names: list[str] = []
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [name if not (before := names[:i].count(name)) else f"{name} ({before + 1})" for i, name in enumerate(names)]


def _size(path: Path) -> int:
    """Bytes of a file; of an ``.npz``, of what it unpacks to."""
    if path.suffix != ".npz":
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


def _read_training(summary: RunSummary) -> None:
    summary.environment = summary.load("training", summary.folder / "environment.json", _environment) or {}
    least = summary.run.index.get("epoch", 0)
    read = partial(read_metrics, epochs=least)
    records, faults = summary.load("training", summary.folder / "metrics.jsonl", read) or ([], [])
    summary.epochs = [record for record in records if record.get("kind") == "epoch"]
    for fault in faults:
        summary.add_missing("training", "metrics.jsonl", fault)
    if not summary.run.is_finished:
        planned = plain(summary.recipe_value("trainer", "epochs"))
        reason = f"not finished: {len(summary.epochs)} of {planned} epochs are recorded"
        summary.add_missing("training", "Training", reason, resume(summary.folder))
    if not summary.run.index:
        reason = "none is saved yet, so nothing can be measured"
        summary.add_missing("training", "Checkpoint", reason, resume(summary.folder))
    if summary.run.index.get("selected_on") == "test":
        message = (
            "The best checkpoint was selected by its test accuracy, so its test accuracy is too high. The last"
            " checkpoint is not affected."
        )
        summary.add_warning("training", "Selected on the test set", message)


def _environment(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = read_record(path, "an environment", old=True)
    return tree


def _read_results(summary: RunSummary) -> None:
    results, errors = summary.run.read_results()
    for error in errors:
        summary.add_missing("results", "A result", error.replace(f"{summary.folder}/", ""))
    for result in results:
        if result.folder is not None and not is_inside(result.folder / "result.json", summary.folder):
            summary.add_missing(
                "results", f"A result of {plain(result.kind)}", "a link to a file outside the run folder"
            )
            continue
        summary.results.append(result)
        if result.stale:
            summary.add_warning("stale", f"Stale {plain(result.kind)} result", plain(result.stale))
        elif isinstance(result, AttackResult):
            for warning in result.warnings:
                message = f"{plain(warning.message)} ({plain(result.settings.threat)})"
                summary.add_warning("attacks", plain(warning.kind), message)
        elif isinstance(result, HealthResult):
            for finding in result.findings:
                summary.add_warning("health", plain(finding.kind), plain(str(finding).partition(": ")[2]))
    _read_interrupted(summary)


def _read_interrupted(summary: RunSummary) -> None:
    """Measurements that were begun and not finished; one that broke a certificate never is."""
    for folder in sorted(summary.folder.glob("results/*/*/")):
        kind = folder.parent.name
        if not os.path.lexists(folder / "result.json"):
            again = command(kind, summary.folder) if kind in VERBS else ""
            reason = f"{folder.name} was started but not finished"
            summary.add_missing("results", f"A measurement ({plain(kind)})", reason, again)
    for pattern in ("results/*/*/broken.safetensors", "certificates/broken.safetensors"):
        for path in sorted(summary.folder.glob(pattern)):
            file = plain(str(path.relative_to(summary.folder)))
            message = f"An attack changed a certified prediction ({file}). Do not rely on this model's certificates."
            summary.add_warning("certificates", "A certificate was broken", message)


def _find_gaps(summary: RunSummary) -> None:
    """What could be measured and was not."""

    def add(about: str, what: str, verb: str, *flags: str, note: str = "") -> None:
        reason, line = f"not measured{note}", command(verb, summary.folder, *flags)
        summary.add_missing(about, what, reason, line, is_problem=False)

    attacks = summary.current(AttackResult)
    if not any(result.attacks for result in attacks):
        add("attacks", "Robust accuracy", "attack")
    elif not any(result.settings.cascade for result in attacks):
        add("attacks", "AutoAttack", "attack", note="; robust accuracy is only known under weaker attacks")
    if not summary.current(CertifyResult):
        # Networks that were trained for proofs record their estimated accuracy; any model can be smoothed.
        proven = any(name.endswith(("vra", "vra_estimate")) for epoch in summary.epochs for name in epoch)
        flags = () if proven else ("--smooth", "0.25", "--eps", "0.25")
        add("certificates", "Certificates", "certify", *flags)
    curvatures = summary.current(CurvatureResult)
    if not curvatures:
        add("curvature", "Curvature", "curvature")
    elif not any(result.settings.landscape for result in curvatures):
        add("curvature", "Loss landscape", "curvature", "--landscape", "weights")
    if not summary.current(ExplainResult):
        add("explanation", "Explanation", "explain")
