"""docs/papers.md names every item of the papers, and its commands and names work."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from atoll.attacks.suites import parse_attacks
from atoll.cli import main, parse
from atoll.cli.measure import settings_from
from atoll.measure import MEASUREMENTS
from atoll.registry import REGISTRIES, registry
from atoll.runs.recipe import recipes, variants
from atoll.threat import ThreatModel
from study_cases import STUDIES

PAGE = (Path(__file__).parents[2] / "docs/papers.md").read_text()
REASONS = ("illustration", "methods of other papers", "missing", "proof only", "wrong")
START = re.compile(rf"`atoll |`atoll(_papers)?\.|proof; used by `atoll|not implemented: ({'|'.join(REASONS)})\b")
NUMBER = r"(?:[A-Z]\.)?\d+(?:\.\d+)?"
NUMBERS = rf"{NUMBER}(?:-{NUMBER})?(?:(?:, | and ){NUMBER}(?:-{NUMBER})?)*"
ITEM = re.compile(
    r"(Algorithm|Corollary|Definition|Eq|Example|Figure|Lemma|Proposition|Remark|Table|Theorem)"
    rf"(?:s|ies)?\.? ({NUMBERS})"
)
# All numbers that the papers use, read off their captions and headings.
ITEMS = {
    "TrH": {
        "Algorithm": "1",
        "Definition": "1, 2",
        "Eq": "1-29",
        "Example": "1",
        "Figure": "1-5",
        "Lemma": "1, 2",
        "Proposition": "1, 2",
        "Table": "1-8",
        "Theorem": "1-4",
    },
    "RAT": {
        "Algorithm": "1",
        "Eq": "1-19",
        "Figure": "1-3",
        "Lemma": "C.2, C.3",
        "Proposition": "C.1",
        "Table": "1-8",
    },
    "WCI": {
        "Algorithm": "1",
        "Definition": "2.1, 2.6",
        "Eq": "1-9",
        "Figure": "1-9",
        "Lemma": "2.2-2.4, A.1",
        "Remark": "2.7",
        "Table": "1, 2",
        "Theorem": "2.5",
    },
    "Thesis": {
        "Algorithm": "1, 2",
        "Corollary": "1",
        "Definition": "1-23",
        "Eq": "2.1-2.3, 3.1, 3.2, 4.1-4.8, 5.1-5.4, 6.1-6.4, D.1-D.23",
        "Example": "1, 2",
        "Figure": "1.1-1.5, 2.1-2.6, 3.1-3.5, 4.1-4.3, 5.1-5.4, 6.1-6.4, B.1, B.2",
        "Lemma": "1, 2",
        "Proposition": "1-3",
        "Remark": "1, 2",
        "Table": "2.1, 2.2, 3.1, 4.1-4.3, 5.1-5.3, B.1, B.2, C.1-C.3, D.1-D.6",
        "Theorem": "1-9",
    },
}


def tables() -> dict[str, list[list[str]]]:
    """The cells of all rows, by paper."""
    sections = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    return {
        paper: [
            line.removeprefix("| ").removesuffix(" |").split(" | ")
            for line in text.splitlines()
            if line.startswith("| ") and not line.startswith(("| item |", "| --- |"))
        ]
        for paper, text in sections.items()
    }


ROWS = [row for rows in tables().values() for row in rows]


def code(cell: str) -> list[str]:
    """Commands and names in a cell; parentheses have arguments and attributes instead."""
    return re.findall(r"`([^`]*)`", re.sub(r"\([^()`]*`[^()]*\)", "", cell))


CODE = sorted({text for row in ROWS for text in code(row[-1])})
COMMANDS = [text for text in CODE if " " in text]
NAMES = [text for text in CODE if " " not in text]


def expand(numbers: str) -> Iterator[str]:
    """All numbers of a list with ranges.

    >>> list(expand("2.1-2.3, D.9-D.10 and 4"))
    ['2.1', '2.2', '2.3', 'D.9', 'D.10', '4']
    """
    for part in re.split(", | and ", numbers):
        first, _, last = part.partition("-")
        stem, dot, start = first.rpartition(".")
        for number in range(int(start), int((last or first).rpartition(".")[2]) + 1):
            yield f"{stem}{dot}{number}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_says_what_computes_it_or_why_nothing_does(row: list[str]) -> None:
    assert len(row) == 3
    assert all(row)
    here = row[-1]
    assert START.match(here)
    assert set(re.findall(r"\[.*?\]\(.*?\)", here)) <= {"[errata](errata.md)"}
    assert all(re.match(r"atoll( |\.|_papers\.)", text) for text in code(here))


@pytest.mark.parametrize("name", NAMES)
def test_names_can_be_imported(name: str) -> None:
    member = pkgutil.resolve_name(name)
    assert callable(member)
    assert not isinstance(member, ModuleType)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    options = parse(words)
    importlib.import_module(f"atoll.cli.{options.verb}")
    if options.verb == "train":
        assert main([*words, *([] if options.dry_run else ["--dry-run"])]) == 0
        assert capsys.readouterr().out
    elif options.verb == "study":
        assert "--scale" in words
        names = {cell.recipe for cell in STUDIES[options.name].cells(options.scale)}
        known = {row for name in recipes() for row in variants(name)}
        assert names - {None} <= known
    elif options.verb == "ls":
        assert options.kind in {"recipes", *(registry(kind).title for kind in REGISTRIES)}
    else:
        measurement = MEASUREMENTS.resolve(options.verb).cls
        settings = settings_from(options, measurement.settings)  # checks the values
        assert [str(folder) for folder in options.runs] == ["RUN"]
        if hasattr(settings, "attacks"):
            assert parse_attacks(settings.attacks, ThreatModel("l2", 0.1))


@pytest.mark.parametrize("paper", ITEMS)
def test_the_page_has_the_items_of_each_paper_and_no_others(paper: str) -> None:
    listed: dict[str, set[str]] = {}
    for item, *_ in tables()[paper]:
        for kind, numbers in ITEM.findall(item):
            listed.setdefault(kind, set()).update(expand(numbers))
    assert listed == {kind: set(expand(numbers)) for kind, numbers in ITEMS[paper].items()}


def test_every_study_is_on_the_page() -> None:
    named = {shlex.split(command)[2] for command in COMMANDS if command.startswith("atoll study ")}
    assert named == STUDIES.keys()
