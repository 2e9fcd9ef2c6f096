"""Runs that somebody made to do harm: links out, foreign classes, paths in names, any values, all with checksums."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from atoll.files import json_digest, record_line
from atoll.runs.recipe import read_recipe_file, write_recipe
from store_cases import USES, outside_files
from support import rewrite

SECRET = "hunter2"
BODY = "from pathlib import Path\nPath(__file__).parents[1].joinpath('outside', 'ran').touch()\nclass Evil: pass\n"
CLASSES = ("evil.py:Evil", "evil.Evil", "./evil.py:Evil", "os.system", "atoll.evil.Evil", "subprocess.Popen")
FOLDERS = (
    "evaluations", "explain", "curvature", "certificates", "results", "checkpoints", "tensorboard", "audit",
    "results/*", "results/*/*", "checkpoints/*", "results/*/*/points",
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1.5, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "x" * 5000, "\0", "\ud800",
    "../..", "../../outside/secret", "/dev/zero", [], {}, [[]], {"a": 1}, [None], {"class_path": "evil.Evil"},
    *CLASSES[:2],
)  # fmt: skip


NAMES = (
    "checkpoints/99999999999999999999999/checkpoint.json", "checkpoints/00000099/checkpoint.json",
    "checkpoints/٣/checkpoint.json", "results/x/y/result.json", "results/evil.Evil/y/result.json",
    "results/attack/x\ny/result.json", "results/attack/y/result.json", "results/certify/x/broken.safetensors",
    "evaluations/x/evaluation.json", "curvature/curvature.json", "explain/explain.json", "result.json",
    "certificates/certification.json", "adopted.json",
)  # fmt: skip


# --- signed files -----------------------------------------------------------------------------------------------------


def read_signed(path: Path) -> Any:
    if path.suffix == ".yaml":
        return read_recipe_file(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else load(path)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def write_signed(path: Path, tree: Any) -> None:
    """Write a file with a checksum that matches."""
    if path.suffix == ".yaml":
        write_recipe(path, tree)
    elif path.suffix == ".jsonl":
        rows = [{name: value for name, value in row.items() if name != "checksum"} for row in tree]
        path.write_bytes(b"".join(map(record_line, rows)))
    elif path.name == "checkpoint.json":
        record = {name: value for name, value in tree.items() if name != "digest"}
        path.write_text(json.dumps({**record, "digest": json_digest(record)}))
    else:
        rewrite(path, tree)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in plain data."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def put(tree: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        tree = tree[key]
    tree[place[-1]] = value


def signed_files(run: Path) -> list[Path]:
    names = ("index.json", "data.json", "environment.json", "result.json", "checkpoint.json", "plan.json")
    files = [path for path in sorted(run.rglob("*")) if path.name in names or path.parent.name == "cells"]
    return [path for path in files if path.is_file() and path.suffix == ".json"]


# --- what a run may contain -------------------------------------------------------------------------------------------


def link_folder(run: Path, draw: random.Random) -> str:
    """Replace a folder by a link to one outside, with the same files or without any."""
    pattern = draw.choice(FOLDERS)
    path = draw.choice([*run.glob(pattern), run / pattern.replace("*", "x")])
    target = run.parent / "outside" / "target"
    if path.is_dir() and draw.random() < 0.5:
        shutil.move(path, target)
    else:
        shutil.rmtree(path, ignore_errors=True)
        target.mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return str(path.relative_to(run))


def link_file(run: Path, draw: random.Random) -> str:
    """Replace a file by a link to a secret one, or add a link where Atoll writes."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    new = [run / "report.html", run / "metrics.jsonl", run / "results/attack/x/result.json", run / "index.json"]
    path = draw.choice([*files, *new])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(run.parent / "outside" / "secret")
    return str(path.relative_to(run))


def name_class(run: Path, draw: random.Random) -> str:
    """Name a foreign class in the recipe or a checkpoint."""
    name, section = draw.choice(CLASSES), draw.choice(["data", "model", "loss", "attack", "optimizer", "schedule"])
    part: Any = draw.choice([name, {"class_path": name, "init_args": {}}])
    for path in [run / "recipe.yaml", *run.glob("checkpoints/*/checkpoint.json")]:
        tree = read_signed(path)
        recipe = tree if path.suffix == ".yaml" else tree["about"]["recipe"]
        if draw.random() < 0.5:
            recipe[section] = part
        else:
            arguments = recipe[section]["init_args"]
            arguments[draw.choice(sorted(arguments) or ["x"])] = part
        write_signed(path, tree)
    return f"{section} {name}"


def name_path(run: Path, draw: random.Random) -> str:
    """Use a path out of the run as a name."""
    path = draw.choice([path for path in signed_files(run) if path.name != "data.json"])
    tree, name = read_signed(path), draw.choice(["../../outside/secret", "/etc/passwd", "..", "a/b", "x\ny", ""])
    where = [place for place in [(), *places(tree)] if isinstance(get(tree, place), dict)]
    inner = get(tree, draw.choice(where))
    inner[name] = draw.choice(list(inner.values()) or [1])
    write_signed(path, tree)
    return f"{path.relative_to(run)} {name!r}"


def get(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def put_value(run: Path, draw: random.Random) -> str:
    """Replace a value of a signed file by one of another kind or size."""
    path = draw.choice(signed_files(run))
    tree = read_signed(path)
    fixed = ("record", "checksum", "digest", "question")
    place = draw.choice([place for place in places(tree) if place[0] not in fixed and "graph" not in place])
    value = draw.choice(VALUES)
    put(tree, place, value)
    write_signed(path, tree)
    return f"{path.relative_to(run)} {place} {str(value)[:30]!r}"


def put_metric(run: Path, draw: random.Random) -> str:
    """Replace a value of the metrics."""
    tree = read_signed(run / "metrics.jsonl")
    place = draw.choice([place for place in places(tree) if len(place) > 1])
    put(tree, place, value := draw.choice(VALUES))
    write_signed(run / "metrics.jsonl", tree)
    return f"{place} {str(value)[:30]!r}"


def add_files(run: Path, draw: random.Random) -> str:
    """Add files and folders with names that nobody expects."""
    name = draw.choice(NAMES)
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = draw.choice(["text", "list", "pipe", "folder", "link", "empty"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(run.parent / "outside" / "secret")
    else:
        path.write_text({"text": '{"kind": "evil.Evil", "points": 1}', "list": "[1]", "empty": ""}[kind])
    return f"{name} {kind}"


ATTACKS: tuple[Callable[[Path, random.Random], str], ...] = (
    link_folder, link_file, name_class, name_path, put_value, put_value, put_value, put_metric, add_files,
)  # fmt: skip


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after a while."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_hostile(seed: int, runs: dict[str, Path], place: Path) -> str:
    """Use a hostile copy of a run; returns ``used`` or ``refused``.

    Everything else is an AssertionError: another exception than a sentence, a hang, foreign code, a change outside the
    run, or content of a file outside the run.
    """
    draw = random.Random(seed)
    kind = draw.choice(["finished", "finished", "stopped", "audited", "unmeasured"])
    use, attack = draw.choice(USES[kind]), draw.choice(ATTACKS)
    root = place / str(seed)
    shutil.copytree(runs[kind].parent, root)
    (root / "outside").mkdir()
    (root / "outside" / "secret").write_text(f"password: [{SECRET}\n")
    (root / "run" / "evil.py").write_text(BODY)
    case = f"seed {seed}: {use.__name__} of {kind}, {attack.__name__} {attack(root / 'run', draw)}"
    before, here = outside_files(root), Path.cwd()
    os.chdir(root / "run")
    try:
        with limited(60):
            outcome, _ = use(root / "run")
        result, text = "used", str(outcome)
    except AtollError as error:
        result, text = "refused", str(error)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        os.chdir(here)
    assert SECRET not in text, case
    assert outside_files(root) == before, case
    shutil.rmtree(root)
    return result
