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
import re
from pathlib import Path
from typing import Any

from atoll.cli.answers import print_json
from atoll.cli.index import look_up, remember
from atoll.cli.output import print_table
from atoll.errors import InputError
from atoll.registry import suggest, unknown_member
from atoll.runs.folders import folder_state, run_folders


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="list only this kind (default: all but runs)")
    text = "component whose parameters to list; with `runs`, a folder (default: runs)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    parser.add_argument("--rows", action="store_true", help="list all variants of recipe grids")


def run(options: argparse.Namespace) -> None:
    if options.kind == "runs":
        _list_runs(Path(options.name or "runs"), options.json)
        return
    titles = {kind: names["title"] for kind, names in look_up("tables", "kinds").items()}
    tables = {"recipes": None, "suites": None} | {title: kind for kind, title in titles.items()}
    title = titles.get(options.kind, options.kind)
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
        return {name: member["summary"] for name, member in look_up("members", kind).items()}
    if title == "suites":
        suites: dict[str, str] = look_up("tables", "suites")
        return suites
    lines: dict[str, str] = {}
    for name, recipe in look_up("tables", "recipes").items():
        text, names = recipe["summary"], recipe["variants"]
        lines |= dict.fromkeys(names, text) if every_row else {name: text}
        if not every_row and names != [name]:
            lines[name] = f"{text} ({len(names)} variants, such as {names[0]})"
    return lines


def _list_runs(root: Path, as_json: bool) -> None:
    """All runs below a folder with their main numbers."""

    def compute(folder: str) -> Any:
        from atoll.runs.collect import list_run

        return list_run(Path(folder))

    states = {str(folder): folder_state(folder) for folder in run_folders(root)}
    overviews = remember(f"runs {root.resolve()}", states, compute)
    runs = {folder: overview for folder, overview in overviews.items() if overview is not None}
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
    member = find_member(kind, options.name)
    if options.json:
        answer = {"name": member["name"], "class_path": member["path"], "parameters": member["parameters"]}
        print_json("ls", answer)
        return
    table = [[name, row["type"], row["default"]] for name, row in member["parameters"].items()]
    print_table(f"{member['name']}: {member['summary']}", ["parameter", "type", "default"], table)


def find_member(kind: str, name: str) -> dict[str, Any]:
    """What the index says about a component; paths, files and names with another number are imported."""
    members = look_up("members", kind)
    exact = name if name in members else next((known for known in members if known.lower() == name.lower()), None)
    if exact is not None:
        return {"name": exact, **members[exact]}
    if "." not in name and not re.search(r"-\d+$", name):
        raise unknown_member(look_up("tables", "kinds")[kind]["kind"], name, members)
    from atoll.config import parameters
    from atoll.registry import registry

    member = registry(kind).resolve(name)
    return {
        "name": member.name,
        "path": member.path,
        "summary": member.summary,
        "parameters": parameters(member.cls, member.arguments),
    }
