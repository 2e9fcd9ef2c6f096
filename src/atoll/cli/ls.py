"""List what a recipe can name.

atoll ls
atoll ls models
"""

from __future__ import annotations

import argparse

from atoll.cli.output import print_json, print_table
from atoll.recipe import recipes, rows
from atoll.registry import KINDS, members, summary

HELP = "list recipes, models, data sets, attacks, methods"

# `atoll ls data` reads better than `atoll ls "data sets"`.
NAMES = {"recipes": None} | {kind.title.split()[0]: kind.name for kind in KINDS.values()}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=list(NAMES), help="only one kind")
    parser.add_argument("--rows", action="store_true", help="each row of a book of recipes, not only the book")


def run(options: argparse.Namespace) -> int:
    chosen = [options.what] if options.what else list(NAMES)
    listing = {name: entries(name, options.rows) for name in chosen}
    if options.json:
        print_json(listing)
        return 0
    for name, found in listing.items():
        print_table(name, ["name", "what it is"], [[key, text] for key, text in found.items()])
    return 0


def entries(what: str, every_row: bool = False) -> dict[str, str]:
    """One line per member of a kind, by name."""
    kind = NAMES[what]
    if kind is None:
        found: dict[str, str] = {}
        for name, text in recipes().items():
            names = rows(name)
            found |= dict.fromkeys(names, text) if every_row else {name: text}
            if not every_row and names != [name]:
                found[name] = f"{text} ({len(names)} rows, such as {names[0]})"
        return found
    return {name: summary(cls) for name, cls in sorted(members(kind).items(), key=lambda item: item[0].lower())}
