"""Small runs of every kind, seeded damage to their files, and what users do with a run."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.audit import audit
from atoll.errors import AtollError
from atoll.graph import tensors_digest
from atoll.report import read_runs, render
from atoll.runs.run import Run, open_run
from atoll.runs.train import train
from atoll.studies import run_study
from atoll.training.observers import Observer
from studies.toy import Toy

TINY = [
    "digits-at", "data.limit=64", "model.widths=[2,2]", "attack.steps=1", "trainer.epochs=3", "trainer.batch_size=16",
    "trainer.validation_steps=1", "trainer.test_steps=1", "trainer.log_every=1",
    "methods=[{class_path: SWA, init_args: {alpha: 0.5}}]",
]  # fmt: skip
VOLATILE = ("seconds", "date", "environment", "files", "threads")  # parts of results that differ between equal ones


class Stop(Observer):
    """Interrupts a training in the middle of its second epoch."""

    def record(self, record: Any) -> None:
        if record["epoch"] > 1.3:
            raise InterruptedError


def measure_all(run: Run) -> list[Any]:
    """Measure everything that a run can be asked for, or load it."""
    return [
        run.attack("FGSM,PGD-2", points=12, corruptions=True),
        run.certify(smooth=0.25, samples=20, points=4, eps="0.1"),
        run.curvature(points=8, top=1, steps=1, relative_error=0.5, density=True, landscape="weights"),
        run.explain(points=3, methods=("SM", "BIG"), checks=0, pool=10, budget=20),
        run.health(),
    ]


def plain(tree: Any) -> Any:
    """A result without what differs between equal ones."""
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items() if name not in VOLATILE}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def content(results: list[Any]) -> list[Any]:
    """Everything that results hold, including their files."""
    rows = []
    for result in results:
        files = {name: result.file(name).read_bytes() for name in sorted(result.files)}  # verified
        rows.append([plain(result.to_json()), {name: len(value) for name, value in files.items()}])
        rows[-1].append({name: tensors_digest(read) for name, read in tensors_of(result, files).items()})
    return rows


def tensors_of(result: Any, files: dict[str, bytes]) -> dict[str, Any]:
    from safetensors.torch import load

    return {name: load(value) for name, value in files.items() if name.endswith(".safetensors")}


def look(folder: Path) -> tuple[Any, bool]:
    """Load everything; returns it, and whether something was named as damaged."""
    run = open_run(folder)
    results, errors = run.read_results()
    weights = {name: tensors_digest(run.model("best", name).state_dict()) for name in run.weight_sets}
    found = [run.recipe, run.index, run.metrics, weights, content(results), str(run.data.classes)]
    stale = any(result.stale for result in results)
    return found, bool(errors) or stale


def report(folder: Path) -> tuple[Any, bool]:
    """Write a report; returns it, and whether it names something as missing or damaged."""
    summaries = read_runs([folder])
    page = render(summaries, "a title")
    (run,) = summaries
    named = any(gap.is_problem for gap in run.missing) or any(result.stale for result in run.results)
    return page.replace(str(folder), "RUN"), named


def resume(folder: Path) -> tuple[Any, bool]:
    """Resume the training; returns the weights, the records and the final test."""
    run = train(None, out=folder, resume=True)
    steps = {which: tensors_digest(run.checkpoint(which).model) for which in ("best", "last")}
    tests = [[row.checkpoint, row.weights, row.to_json()] for row in run.tests()]
    return [run.recipe, run.index, run.metrics, steps, tests], False


def measure(folder: Path) -> tuple[Any, bool]:
    """Measure everything again."""
    return content(measure_all(open_run(folder))), False


def run_audit(folder: Path) -> tuple[Any, bool]:
    """Repeat an audit."""
    result = audit(open_run(folder), budget="45m", only=("health",))
    failed = any(stage.record.state == "failed" for stage in result.stages)
    return [[stage.step.name for stage in result.stages], content(list(result.results.values()))], failed


def study(folder: Path) -> tuple[Any, bool]:
    """Repeat a study."""
    results, _ = run_study(Toy(folder / "log.txt"), "smoke", folder)
    return [[cell.name, numbers] for cell, numbers in results.numbers.items()], bool(results.failed)


Use = Callable[[Path], tuple[Any, bool]]
USES: dict[str, tuple[Use, ...]] = {
    "finished": (look, report, resume, measure),
    "stopped": (resume, resume, report),
    "unmeasured": (measure,),
    "audited": (run_audit,),
    "study": (study,),
}


KINDS = (*USES, "finished", "finished", "unmeasured", "unmeasured")  # some more often


def make_runs(root: Path) -> dict[str, Path]:
    """Small runs of every kind: finished, interrupted in training and in measurements, audited, and a study."""
    runs = {name: root / name / "run" for name in USES}
    finished = train(TINY[0], *TINY[1:], out=runs["finished"])
    with pytest.raises(InterruptedError):
        train(TINY[0], *TINY[1:], out=runs["stopped"], observers=[Stop()])
    shutil.copytree(runs["finished"], runs["audited"])
    run_audit(runs["audited"])
    measure_all(finished)
    shutil.copytree(runs["finished"], runs["unmeasured"])
    for kind in ("attack", "certify"):
        for path in runs["unmeasured"].glob(f"results/{kind}/*/result.json"):
            path.unlink()
    runs["study"].mkdir(parents=True)
    study(runs["study"])
    return runs


# --- damage -----------------------------------------------------------------------------------------------------------


def run_of(path: Path) -> Path:
    """The folder of the run that a file is in."""
    return next(parent for parent in path.parents if parent.name == "run")


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_near_end(path: Path, draw: random.Random) -> None:
    """Flip a bit of the values of a tensor, or of the last entries of a text."""
    data = bytearray(path.read_bytes())
    data[-draw.randrange(1, min(len(data), 300) + 1)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def digit(path: Path, draw: random.Random) -> None:
    """Change a digit of a number, which leaves valid JSON or YAML."""
    data = bytearray(path.read_bytes())
    digits = [match.start(1) for match in re.finditer(rb"[ \[:.]([1-9])", data)]  # not those of a checksum
    if digits:
        place = draw.choice(digits)
        data[place] = draw.choice([byte for byte in range(49, 58) if byte != data[place]])
    path.write_bytes(data)


def overwrite(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + 16] = draw.randbytes(len(data[start : start + 16]))
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def zeros(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def no_text(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"\xff\xfe" + draw.randbytes(40))


def huge(path: Path, draw: random.Random) -> None:
    os.truncate(path, 65 * 2**20)


def pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


def link(path: Path, draw: random.Random) -> None:
    target = run_of(path).parent / "outside" / "target"
    shutil.move(path, target)
    path.symlink_to(target)


def loop(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def device(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def other_json(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(["[]", "{}", "3", '"x"', "null", "[1, 2]", '{"a": {"b": []}}', "[" * 100_000, "1e999"]))


def swap(path: Path, draw: random.Random) -> None:
    other = draw.choice([file for file in files_of(run_of(path)) if file != path])
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def swap_same_name(path: Path, draw: random.Random) -> None:
    others = [file for file in files_of(run_of(path)) if file != path and file.name == path.name]
    if others:
        other = draw.choice(others)
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)


DAMAGES = (
    flip, flip, flip_near_end, flip_near_end, flip_near_end, digit, digit, digit, digit, overwrite, truncate, empty,
    zeros, no_text, huge, pipe, folder, link, loop, device, other_json, swap, swap_same_name,
)  # fmt: skip


def files_of(root: Path) -> list[Path]:
    """The files that Atoll reads again; pictures, pages and event files are written for people."""
    skipped = (".png", ".html", ".md", ".csv", ".txt")
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix not in skipped]
    return [path for path in files if "tensorboard" not in path.parts and path.name not in ("audit.json", "raw.json")]


@dataclass(frozen=True)
class Damage:
    """One damaged file and what is done with the run."""

    seed: int
    kind: str
    use: Use
    file: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind}, {self.file}, {self.use.__name__}"


def outside_files(root: Path) -> dict[str, bytes]:
    """The content of all files beside a run."""
    beside = (path for path in sorted(root.rglob("*")) if path.relative_to(root).parts[0] != "run")
    return {str(path.relative_to(root)): path.read_bytes() for path in beside if path.is_file()}


def check_damage(seed: int, runs: dict[str, Path], expected: dict[tuple[str, str], Any], place: Path) -> str:
    """Damage a file of a copy of a run and use the run.

    Returns what happened: ``intact`` (the result of an undamaged run), ``named`` or ``refused``.  Everything else is an
    AssertionError: another result, another exception than a sentence, or a change outside the run.
    """
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    use = draw.choice(USES[kind])
    root = place / str(seed)
    shutil.copytree(runs[kind].parent, root)
    (root / "outside").mkdir()
    files = files_of(root / "run")
    if kind == "unmeasured":  # other files have the same part in finished runs
        files = [file for file in files if "attack" in file.parts or "certify" in file.parts]
    name = draw.choice(sorted({file.name for file in files}))
    path = draw.choice([file for file in files if file.name == name])
    damage = draw.choice(DAMAGES)
    case = f"{damage.__name__}: {Damage(seed, kind, use, str(path.relative_to(root)))}"
    damage(path, draw)
    before = outside_files(root)
    try:
        outcome, is_named = use(root / "run")
    except AtollError as error:
        message, result = str(error), "refused"
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    else:
        same = outcome == expected[kind, use.__name__]
        assert same or is_named, f"{case}: {difference(outcome, expected[kind, use.__name__])}"
        message, result = "", "intact" if same else "named"
    assert "\n" not in message.replace("\n  ", " "), case  # faults of a recipe are listed line by line
    assert outside_files(root) == before, case
    shutil.rmtree(root)
    return result


def difference(mine: Any, other: Any) -> str:
    """The first difference between two values."""
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple) and len(mine) == len(other):
        return next(f"[{i}]{difference(a, b)}" for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        return next(f".{name}{difference(mine[name], other[name])}" for name in mine if mine[name] != other[name])
    if isinstance(mine, str) and isinstance(other, str):
        start = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), 0)
        return f": {mine[max(0, start - 40) : start + 60]!r} instead of {other[max(0, start - 40) : start + 60]!r}"
    return f": {str(mine)[:200]} instead of {str(other)[:200]}"


def make_expected(runs: dict[str, Path], place: Path) -> dict[tuple[str, str], Any]:
    """What every use gives for an undamaged copy."""
    expected = {}
    for kind, uses in USES.items():
        for use in dict.fromkeys(uses):
            shutil.copytree(runs[kind].parent, place / f"{kind}-{use.__name__}")
            expected[kind, use.__name__], _ = use(place / f"{kind}-{use.__name__}" / "run")
    return expected
