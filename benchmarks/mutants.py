"""`python -m benchmarks.mutants PACKAGE`: change one thing in the code at a time; how often does a test notice?

Cosmic Ray makes the mutants: another operator, comparison, constant or keyword.  A seeded sample of them is tested.
Each mutant gets the tests that run its line, shortest first.  It is killed if one of them fails or takes far too much
processor time.
Survivors are printed as differences.  Equivalent ones, which no test can kill, are listed in
``benchmarks/equivalent_mutants.yaml`` with the reason.

Kills are recorded in ``.mutants/``, so an interrupted command continues, and a repeated one tries only the survivors.
Remove this folder after you change or delete tests.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import coverage
import pytest
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "atoll"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
# These break at import, or change nothing that a test could see.
LEFT_OUT = (
    "ExceptionReplacer", "RemoveDecorator", "VariableInserter", "VariableReplacer", "NoOp",
    "_Is", "_IsNot", "Is_Eq", "IsNot_NotEq",  # comparisons of strings and None stay the same
)  # fmt: skip
# Imported once instead of once per mutant; nothing of Atoll.
PRELOAD = (
    "torch", "torch.export", "torch._dynamo", "scipy.stats", "scipy.optimize", "scipy.sparse.linalg", "hypothesis",
    "matplotlib.pyplot", "PIL.Image", "safetensors.torch", "playwright.sync_api", "_pytest.doctest", "onnx",
)  # fmt: skip
LONGEST = 120.0  # seconds of tests for one mutant
KILLS = ROOT / ".mutants"
# Tests of packages that no folder or file of tests mirrors alone.
TESTS = {
    "attacks": ["attacks", "test_device.py::test_attacks"],
    "training/methods": [
        "training/methods",
        *(f"training/test_{n}.py" for n in ("methods", "wci", "centroids", "trainer")),
    ],
    "files": ["test_files.py", "store"],
    "runs": ["runs", "store"],
}


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    path: Path
    line: int
    source: str
    mutated: str

    @property
    def module(self) -> str:
        parts = self.path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def record(self) -> Path:
        """An empty file that exists if a test killed this mutant."""
        return KILLS / hashlib.sha256(f"{self.module}\n{self.mutated}".encode()).hexdigest()[:32]

    @property
    def place(self) -> str:
        return str(self.path.relative_to(SOURCE))

    @property
    def difference(self) -> str:
        """The changed lines, without their position, so that it also identifies the mutant after other changes."""
        lines = difflib.unified_diff(self.source.splitlines(), self.mutated.splitlines(), lineterm="", n=0)
        return "\n".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[3:])


def positions_of_hints(tree: ast.AST) -> set[tuple[int, int]]:
    """Positions of everything in type hints, which are never evaluated."""
    hints = [
        hint
        for node in ast.walk(tree)
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if hint is not None
    ]
    return {
        (line, column)
        for hint in hints
        for line in range(hint.lineno, hint.end_lineno + 1)
        for column in range(
            hint.col_offset if line == hint.lineno else 0, hint.end_col_offset if line == hint.end_lineno else 200
        )
    }


def line_that_runs(tree: ast.AST, line: int) -> int:
    """Return the first line of a definition for all lines of its signature, and other lines unchanged.

    >>> line_that_runs(ast.parse("def f(a, *,\\n b=1\\n):\\n  return a"), 2)
    1
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    definitions = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return max((node.lineno for node in definitions if node.lineno <= line < node.body[0].lineno), default=line)


def sample(files: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Choose positions uniformly, then one of the mutations at each position."""
    positions: dict[tuple[Path, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    names = [name for name in operator_names() if not name.endswith(LEFT_OUT) and not get_operator(name).arguments()]
    operators = {name: get_operator(name)() for name in names}
    for path in files:
        source = path.read_text()
        hints, nodes = positions_of_hints(ast.parse(source)), list(ast_nodes(get_ast(source)))
        for name, operator in operators.items():
            starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
            for occurrence, start in enumerate(starts):
                if start not in hints:
                    positions[path, start].append((name, occurrence))
    draw = random.Random(seed)
    mutants = []
    for path, start in draw.sample(sorted(positions), min(count, len(positions))):
        name, occurrence = draw.choice(positions[path, start])
        source = path.read_text()
        mutated = mutate_code(source, operators[name], occurrence)
        mutants.append(Mutant(path, line_that_runs(ast.parse(source), start[0]), source, mutated))
    return mutants


class Replaced(importlib.abc.MetaPathFinder):
    """Imports the mutant instead of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.mutant.module:
            return None
        mutated = self.mutant.mutated

        class Loader(importlib.machinery.SourceFileLoader):
            def get_data(self, path: str) -> bytes:
                return mutated.encode() if path.endswith(".py") else b""

            def path_stats(self, path: str) -> Any:
                raise OSError  # never use or write compiled code

        loader = Loader(name, str(self.mutant.path))
        package = self.mutant.path.name == "__init__.py"
        search = [str(self.mutant.path.parent)] if package else None
        return importlib.util.spec_from_file_location(
            name, loader.path, loader=loader, submodule_search_locations=search
        )


class Lines:
    """A pytest plugin that records which tests run which lines, and how long each test takes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.coverage = coverage.Coverage(data_file=None, include=[str(path) for path in files], config_file=False)
        self.seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def tests_of_lines(self) -> dict[str, dict[int, list[str]]]:
        data = self.coverage.get_data()
        return {path: data.contexts_by_lineno(path) for path in data.measured_files()}


def fork(task: Callable[[], int], log: Path) -> BaseProcess:
    """Start a task in a copy of this process with its output in a file; what it returns is its exit code."""

    def run() -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.setpgid(0, 0)
        sys.exit(task())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_tests(arguments: Sequence[str], *plugins: object) -> int:
    arguments = ["-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    return int(pytest.main(arguments, plugins=[*plugins]))


def measure_lines(files: Sequence[Path], tests: Sequence[str], folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Run all tests once on the code as it is; returns the tests of each line, and the seconds of each test."""
    path = folder / "lines.json"

    def record() -> int:
        lines = Lines(files)
        lines.coverage.start()
        code = run_tests(["-q", *tests], lines)
        lines.coverage.stop()
        path.write_text(json.dumps([lines.tests_of_lines(), lines.seconds]))
        return code

    process = fork(record, folder / "baseline.log")
    process.join()
    if process.exitcode:
        sys.exit(f"the tests fail without any mutant:\n{(folder / 'baseline.log').read_text()[-3000:]}")
    lines, seconds = json.loads(path.read_text())
    return lines, seconds


def tests_of(mutant: Mutant, lines: dict[str, Any], seconds: dict[str, float]) -> list[str]:
    """The tests that run a line, shortest first.  Lines that run on import get all tests."""
    covering = set(lines.get(str(mutant.path), {}).get(str(mutant.line), []))
    chosen, total = [], 0.0
    for name in sorted(seconds if "" in covering else covering, key=seconds.__getitem__):
        total += seconds[name]
        if total > LONGEST:
            break
        chosen.append(name)
    return chosen


def known_outcomes(mutants: Sequence[Mutant]) -> list[str]:
    """Return killed or equivalent for mutants that need not be tried, and an empty string for the others."""
    listed = yaml.safe_load(EQUIVALENT.read_text()) or {}
    equivalent = ["equivalent" if mutant.difference in listed.get(mutant.place, {}) else "" for mutant in mutants]
    return [
        "killed" if mutant.record.exists() else outcome for mutant, outcome in zip(mutants, equivalent, strict=True)
    ]


def try_mutants(
    mutants: Sequence[Mutant], outcomes: list[str], tests: Sequence[str], files: Sequence[Path], jobs: int
) -> None:
    """Fill the empty outcomes with killed, survived or not covered, and print what was not killed."""
    running: dict[int, tuple[BaseProcess, float]] = {}
    waiting = [number for number, outcome in enumerate(outcomes) if not outcome]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, seconds = measure_lines(files, tests, folder) if waiting else ({}, {})
        while waiting or running:
            while waiting and len(running) < jobs:
                number = waiting.pop(0)
                mutant = mutants[number]
                if str(mutant.line) not in lines.get(str(mutant.path), {}):
                    outcomes[number] = "not covered"
                    print(f"not covered: {mutant.place}:{mutant.line}\n{mutant.difference}\n", flush=True)
                    continue
                chosen = tests_of(mutant, lines, seconds)
                limit = 60 + 10 * sum(seconds[name] for name in chosen)

                def test(mutant: Mutant = mutant, chosen: Sequence[str] = chosen, limit: float = limit) -> int:
                    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))  # other processes do not count
                    sys.meta_path.insert(0, Replaced(mutant))
                    importlib.import_module(mutant.module)  # before pytest, whose own finder comes first
                    return run_tests(["-x", "-q", "--timeout", "1500", *chosen])

                running[number] = (fork(test, folder / f"{number}.log"), time.monotonic() + 20 * limit)
            time.sleep(0.05)
            for number, (process, deadline) in list(running.items()):
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid or 0, 9)
                process.join()
                del running[number]
                mutant = mutants[number]
                outcomes[number] = "killed" if process.exitcode else "survived"
                if process.exitcode:
                    KILLS.mkdir(exist_ok=True)
                    mutant.record.touch()
                else:
                    print(f"survived: {mutant.place}:{mutant.line}\n{mutant.difference}\n", flush=True)
                print(f"\r{sum(map(bool, outcomes))} of {len(mutants)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("package", help="a package or module of Atoll, such as threat, attacks or attacks/apgd")
    parser.add_argument("--tests", nargs="*", help="files of tests (default: those that mirror the package)")
    parser.add_argument("--count", type=int, default=150, help="number of mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants tested at the same time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and what is known of them; test nothing")
    options = parser.parse_args()
    path = SOURCE / options.package
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    mirrored = ROOT / "tests" / options.package
    mirror = mirrored if mirrored.is_dir() else mirrored.with_name(f"test_{mirrored.name}.py")
    folders = [ROOT / "tests" / name for name in TESTS.get(options.package, [])] or [mirror]
    tests = options.tests or [str(file.relative_to(ROOT)) for file in [*folders, *files]]
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    mutants = sample(files, options.count, options.seed)
    outcomes = known_outcomes(mutants)
    if options.list:
        for mutant, outcome in zip(mutants, outcomes, strict=True):
            print(f"{outcome or 'to try'}: {mutant.place}:{mutant.line}\n{mutant.difference}\n")
        return 0
    for name in PRELOAD:
        importlib.import_module(name)
    try_mutants(mutants, outcomes, tests, files, options.jobs)
    counts = Counter(outcomes)
    killable = len(mutants) - counts["equivalent"]
    share = counts["killed"] / killable if killable else 1.0
    print(f"{options.package}: {counts['killed']} of {killable} killed ({100 * share:.0f} %); {dict(counts)}")
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
