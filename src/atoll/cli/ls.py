"""List what commands and recipes accept, and the parameters of one component.

atoll ls
atoll ls models
atoll ls attack APGD
atoll ls runs
atoll ls runs DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.attacks.suites import SUITES
from atoll.cli.output import print_json, print_table
from atoll.config import parameters
from atoll.errors import InputError
from atoll.registry import REGISTRIES, registry, suggest
from atoll.runs.collect import find_runs, main_numbers
from atoll.runs.recipe import recipes, variants


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="list one kind only")
    text = "show the parameters and defaults of this component; with `runs`, a folder"
    parser.add_argument("name", nargs="?", help=text)
    parser.add_argument("--rows", action="store_true", help="list every variant of a recipe grid")


def run(options: argparse.Namespace) -> None:
    if options.kind == "runs":
        _list_runs(Path(options.name or "runs"), options.json)
        return
    tables = {"recipes": None, "suites": None} | {registry(kind).title: kind for kind in REGISTRIES}
    plural = {registry(kind).kind.split()[0]: registry(kind).title for kind in REGISTRIES}
    title = plural.get(options.kind, options.kind)
    if title is not None and title not in tables:
        raise InputError(f"ls: got {title!r}{suggest(title, [*tables, *plural])}")
    if options.name is not None:
        _show(title, tables[title], options)
        return
    listing = {name: entries(name, tables[name], options.rows) for name in ([title] if title else tables)}
    if options.json:
        print_json(listing)
        return
    for name, lines in listing.items():
        print_table(name, ["name", "description"], [[key, text] for key, text in lines.items()])


def entries(title: str, kind: str | None, every_row: bool = False) -> dict[str, str]:
    """One line per member of a kind, by name."""
    if kind is not None:
        return {name: member.summary for name, member in registry(kind).members().items()}
    if title == "suites":
        return {name: (make.__doc__ or "").splitlines()[0] for name, make in SUITES.items()}
    lines: dict[str, str] = {}
    for name, text in recipes().items():
        names = variants(name)
        lines |= dict.fromkeys(names, text) if every_row else {name: text}
        if not every_row and names != [name]:
            lines[name] = f"{text} ({len(names)} variants, such as {names[0]})"
    return lines


def _list_runs(root: Path, as_json: bool) -> None:
    """All runs below a folder with their main numbers."""
    runs = {str(run.folder): run for run in find_runs(root)}
    numbers = {name: main_numbers(run) for name, run in runs.items()}
    if as_json:
        print_json(numbers)
        return
    columns = ["run", "training", "clean %", "robust %", "verified %", "WCI"]
    states = ["finished" if run.is_finished else "not finished" for run in runs.values()]
    rows = [[name, state, *numbers[name].values()] for name, state in zip(runs, states, strict=True)]
    print_table(f"runs in {root}", columns, rows)


def _show(title: str, kind: str | None, options: argparse.Namespace) -> None:
    """Parameters and defaults of one component."""
    if kind is None:
        raise InputError(f"ls: {title} have no parameters; read a recipe with `atoll train {options.name} --dry-run`")
    member = registry(kind).resolve(options.name)
    listing = parameters(member.cls, member.arguments)
    if options.json:
        print_json({"name": member.name, "class_path": member.path, "parameters": listing})
        return
    table = [[name, row["type"], row["default"]] for name, row in listing.items()]
    print_table(f"{member.name}: {member.summary}", ["parameter", "type", "default"], table)
