"""A run's folder as plain data.  Every part may be missing or broken; then its reason and command stand in its place.

Nothing of the run is executed: no class that it names is imported, no model built, nothing unpickled.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atoll.curvature.landscape import Landscape
from atoll.curvature.spectrum import Density
from atoll.errors import AtollError, DataError
from atoll.report import commands
from atoll.report.blocks import Alarm, Missing
from atoll.report.values import entries, get, plain, step, whole
from atoll.runs.run import open_run
from atoll.training.observers import read_records

LARGEST = 64 * 2**20  # bytes of one file; what Atoll keeps is far smaller
MOST = 50_000  # numbers of one array that is drawn
BROKEN = "a certificate was broken"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Kept:
    """A result that a command has kept: its JSON, and the folder with what belongs to it."""

    folder: Path
    tree: Mapping[str, Any]


@dataclass
class Reading:
    """All that is known about one run.

    Args:
        number: its place among the runs of the page, which decides about its colour.
        name: what it is called on the page.
        epochs: the records of the epochs.
        index: the checkpoints, last and best.
        tests: of the training's last step: ``result.json``.
        evaluations: by ``atoll attack``.
        certifications: by ``atoll certify``; those with ``smoothing`` in them are only probable.
        curvature: by ``atoll curvature``, with ``landscapes`` by what they are over, and ``density``.
        explanations: by ``atoll explain``.
        alarms: what a reader of the numbers must know.
        missing: what was not measured or cannot be read.
    """

    number: int
    name: str
    folder: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, Any]] = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[str, Any] = field(default_factory=dict)
    evaluations: list[Kept] = field(default_factory=list)
    certifications: list[Kept] = field(default_factory=list)
    curvature: Kept | None = None
    landscapes: dict[str, Landscape] = field(default_factory=dict)
    density: Density | None = None
    explanations: list[Kept] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def lacks(self, what: str, reason: str, command: str = "") -> None:
        self.missing.append(Missing(what, reason, command, self.number))

    def warns(self, about: str, what: str, message: str) -> None:
        self.alarms.append(Alarm(about, what, message, self.number))


def read_runs(folders: Sequence[Path | str]) -> list[Reading]:
    """What the folders of some runs hold; one that is no run at all is an error."""
    recipes = [open_run(folder).recipe for folder in folders]
    paths = [Path(folder) for folder in folders]
    return [
        _read(Reading(number, name, path, recipe))
        for number, (name, path, recipe) in enumerate(zip(names(paths), paths, recipes, strict=True))
    ]


def names(folders: Sequence[Path]) -> list[str]:
    """Short names that tell the folders apart.

    >>> names([Path("runs/a"), Path("runs/b")]), names([Path("one/a"), Path("two/a")]), names([Path("a"), Path("a")])
    (['a', 'b'], ['one/a', 'two/a'], ['a', 'a (2)'])
    """
    whole_names = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, whole_names)) + 1):
        found = ["/".join(parts[-length:]) for parts in whole_names]
        if len(set(found)) == len(set(whole_names)):
            break
    return [
        name if (before := found[:i].count(name)) == 0 else f"{name} ({before + 1})" for i, name in enumerate(found)
    ]


def _read(run: Reading) -> Reading:
    for part in (_training, _attacks, _certificates, _curvature, _explanations):
        part(run)
    return run


def _training(run: Reading) -> None:
    run.environment = _json(run, "environment", run.folder / "environment.json") or {}
    path = run.folder / "metrics.jsonl"
    records, broken = _try(run, "learning curves", path, _records) or ([], 0)
    run.epochs = [record for record in records if record.get("kind") == "epoch"]
    if broken:
        run.lacks("some metrics", f"{broken} of the lines of metrics.jsonl cannot be read and are left out")
    run.tests = _json(run, "test results", run.folder / "result.json") or {}
    if not run.tests:
        planned = plain(get(run.recipe, "trainer", "epochs"))
        reason = f"the training is not finished: {len(run.epochs)} of {planned} epochs are recorded"
        run.lacks("test results", reason, commands.resume(run.folder))
    index = _json(run, "list of checkpoints", run.folder / "index.json")
    run.index = index or {}
    if index is None:
        run.lacks("checkpoints", "there is none yet, so nothing can be measured", commands.resume(run.folder))
    if get(run.tests, "selected_on") == "test":
        words = (
            "the best checkpoint was chosen by its test accuracy, which is therefore too high; not so the last one's"
        )
        run.warns("training", "chosen on the test set", words)


def _attacks(run: Reading) -> None:
    for path in sorted((run.folder / "evaluations").glob("*/")):
        tree = _json(run, "an evaluation", path / "evaluation.json")
        if tree is None:
            if not (path / "evaluation.json").exists():
                run.lacks("an evaluation", f"{path.name} was begun and is not finished", commands.attack(run.folder))
            continue
        run.evaluations.append(Kept(path, tree))
        for finding in entries(tree, "findings"):
            what, message = plain(get(finding, "kind")), plain(get(finding, "message"))
            run.warns("attacks", what, f"{message} ({commands.threat(tree)})")
        _same_weights(run, "attacks", tree)
    if not run.evaluations:
        run.lacks("robust accuracy", "there is no evaluation under attack to show", commands.attack(run.folder))


def _certificates(run: Reading) -> None:
    for name in ("certificates", "smoothing"):
        path = run.folder / name
        if tree := _json(run, name, path / "certification.json"):
            run.certifications.append(Kept(path, tree))
            _same_weights(run, "certificates", tree)
        if (path / "broken.safetensors").exists():
            words = f"an attack changed a certified prediction ({name}/broken.safetensors): do not believe the others"
            run.warns("certificates", BROKEN, words)
    if not run.certifications:
        proven = any(name.endswith(("vra", "vra_estimate")) for epoch in run.epochs for name in epoch)
        run.lacks("certificates", "there are none to show", commands.certify(run.folder, proven=proven))


def _curvature(run: Reading) -> None:
    folder = run.folder / "curvature"
    tree = _json(run, "curvature", folder / "curvature.json")
    if tree is None:
        if not (folder / "curvature.json").exists():
            run.lacks("curvature", "it was not measured", commands.curvature(run.folder))
        return
    run.curvature = Kept(folder, tree)
    _same_weights(run, "curvature", tree)
    for over in ("weights", "input"):
        if found := _try(run, "a landscape", folder / f"landscape-{over}.npz", _landscape):
            run.landscapes[over] = found
    run.density = _try(run, "the density of eigenvalues", folder / "density.npz", _density)
    if not run.landscapes:
        run.lacks("loss landscape", "it was not measured", f"{commands.curvature(run.folder)} --landscape weights")


def _explanations(run: Reading) -> None:
    for path in (run.folder / "explain", run.folder / "explain" / "images"):
        if tree := _json(run, "explanations", path / "explain.json"):
            run.explanations.append(Kept(path, tree))
            _same_weights(run, "explanation", tree)
    if not run.explanations:
        run.lacks("explanations", "there are none to show", commands.explain(run.folder))


def _same_weights(run: Reading, about: str, tree: Mapping[str, Any]) -> None:
    """Say so if a result is about weights that the run has left behind since."""
    weights, at = get(tree, "weights"), step(tree)
    best = whole(get(run.index, "best", weights)) if isinstance(weights, str) else None
    if None not in (best, at) and at not in (best, whole(get(run.index, "last"))):
        words = f"measured at step {at}; the best weights are those of {best}"
        run.warns(about, f"{about} of other weights", words)


def _json(run: Reading, what: str, path: Path) -> dict[str, Any] | None:
    """A file's mapping; None, with a word, if it cannot be read, and without one if it is not there."""
    found = _try(run, what, path, lambda file: json.loads(file.read_text()))
    if found is None or isinstance(found, dict):
        return found
    run.lacks(what, f"{path.name} cannot be read: expected a mapping")
    return None


def _try(run: Reading, what: str, path: Path, read: Callable[[Path], Found]) -> Found | None:
    if not path.is_file():  # reading a pipe would never end
        return None
    try:
        if _size(path) > LARGEST:
            raise DataError(f"larger than {LARGEST // 2**20} MB")
        return read(path)
    except (OSError, ValueError, RecursionError, AtollError, zipfile.BadZipFile) as error:
        run.lacks(what, f"{path.name} cannot be read: {error}")
        return None


def _size(path: Path) -> int:
    """Bytes of a file; of an ``.npz``, of what it unpacks to."""
    if path.suffix != ".npz":
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a metrics file, and how many of its lines are none."""
    records = [record for record in read_records(path) if isinstance(record, dict)]
    lines = sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    return records, lines - len(records)


def _landscape(path: Path) -> Landscape:
    """A landscape that can be drawn."""
    found = Landscape.load(path)
    if not (found.a.isfinite().all() and found.b.isfinite().all() and found.loss.isfinite().any()):
        raise DataError("there are no finite numbers to draw")
    if found.loss.numel() > MOST:
        raise DataError(f"{found.loss.numel():,} numbers are too many to draw")
    return found


def _density(path: Path) -> Density:
    """A density that can be drawn."""
    found = Density.load(path)
    if not (np.isfinite(found.eigenvalues).all() and np.isfinite(found.weights).all()):
        raise DataError("there are no finite numbers to draw")
    if found.weights.size > MOST:
        raise DataError(f"{found.weights.size:,} numbers are too many to draw")
    return found
