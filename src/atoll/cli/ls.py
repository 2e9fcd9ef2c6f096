"""List recipes, components and runs, or the parameters of one component.

KIND is recipes, runs, suites, or a kind of component: data, models, losses, attacks, methods and so on. With NAME, the
command lists the parameters of this component and their defaults. With `runs`, NAME is the folder to search.

Examples:
  atoll ls
  atoll ls models
  atoll ls attack APGD
  atoll ls recipes --rows
  atoll ls runs
  atoll ls runs experiments/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.attacks.suites import SUITES
from atoll.cli.answers import print_json
from atoll.cli.output import print_table
from atoll.config import parameters
from atoll.errors import InputError
from atoll.registry import REGISTRIES, registry, suggest
from atoll.runs.collect import find_runs, overview
from atoll.runs.recipe import recipes, variants


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="list only this kind (default: all but runs)")
    text = "component whose parameters to list; with `runs`, a folder (default: runs)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    parser.add_argument("--rows", action="store_true", help="list all variants of recipe grids")


def run(options: argparse.Namespace) -> None:
    if options.kind == "runs":
        _list_runs(Path(options.name or "runs"), options.json)
        return
    tables = {"recipes": None, "suites": None} | {registry(kind).title: kind for kind in REGISTRIES}
    plural = {registry(kind).kind.split()[0]: registry(kind).title for kind in REGISTRIES}
    title = plural.get(options.kind, options.kind)
    if title is not None and title not in tables:
        raise InputError(f"unknown kind {title!r}{suggest(title, [*tables, 'runs'])}")
    if options.name is not None:
        _show(title, tables[title], options)
        return
    listing = {name: entries(name, tables[name], options.rows) for name in ([title] if title else tables)}
    if options.json:
        print_json("ls", listing)
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
    runs = {str(run.folder): overview(run) for run in find_runs(root)}
    if as_json:
        print_json("ls", {"runs": {name: numbers for name, (_, numbers) in runs.items()}})
        return
    columns = ["run", "training", "clean %", "robust %", "verified %", "WCI"]
    rows = [[name, state, *numbers.values()] for name, (state, numbers) in runs.items()]
    print_table(f"runs in {root}", columns, rows)


def _show(title: str, kind: str | None, options: argparse.Namespace) -> None:
    """Parameters and defaults of one component."""
    if kind is None:
        command = f"atoll train {options.name} --dry-run" if title == "recipes" else "atoll ls suites"
        raise InputError(f"{title} have no parameters; see `{command}`")
    member = registry(kind).resolve(options.name)
    listing = parameters(member.cls, member.arguments)
    if options.json:
        print_json("ls", {"name": member.name, "class_path": member.path, "parameters": listing})
        return
    table = [[name, row["type"], row["default"]] for name, row in listing.items()]
    print_table(f"{member.name}: {member.summary}", ["parameter", "type", "default"], table)
