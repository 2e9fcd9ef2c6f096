"""Print a script that lets a shell complete commands, options, recipes, components and runs when you press Tab.

Add one line to the file that your shell reads at its start:
  ~/.bashrc                     source <(atoll completion bash)
  ~/.zshrc, after compinit      source <(atoll completion zsh)
  ~/.config/fish/config.fish    atoll completion fish | source
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from atoll.cli.answers import print_json
from atoll.cli.index import look_up

# The scripts pass the command line up to the cursor.  Without an answer, the shell completes file names.  In bash, "="
# and ":" begin a new word, so what comes before them must not be repeated.
SCRIPTS = {
    "bash": r"""_atoll() {
    local candidate line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    local before="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        candidate="${candidate#"$before"}"
        [[ $candidate == *[^[:alnum:]_./,:=+@%-]* ]] && printf -v candidate %q "$candidate"
        COMPREPLY+=("$candidate")
    done < <(atoll completion bash "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]] && compopt -o nospace
    return 0
}
complete -o default -F _atoll atoll
""",
    "zsh": r"""#compdef atoll
_atoll() {
    local -a candidates whole begun
    candidates=("${(@f)$(atoll completion zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    whole=("${(@)candidates:#*[=\/.]}")
    begun=("${(@M)candidates:#*[=\/.]}")
    [[ -z ${candidates[*]} ]] && { _files; return }
    compadd -a whole
    compadd -S '' -a begun
}
[[ $funcstack[1] == _atoll ]] && _atoll "$@" || compdef _atoll atoll
""",
    "fish": r"""function __atoll_complete
    set -l candidates (atoll completion fish (commandline -cp | string collect) 2>/dev/null)
    if test (count $candidates) -gt 0
        printf '%s\n' $candidates
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c atoll -f -k -a '(__atoll_complete)'
""",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=list(SCRIPTS), help="bash, zsh or fish")
    text = "complete this command line instead; the script uses it"
    parser.add_argument("line", nargs="?", metavar="LINE", help=text)


def run(options: argparse.Namespace) -> None:
    if options.line is not None:
        lines = candidates(options.line)
        if options.json:
            print_json("completion", {"candidates": lines})
        else:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
    elif options.json:
        print_json("completion", {"script": SCRIPTS[options.shell]})
    else:
        sys.stdout.write(SCRIPTS[options.shell])


def candidates(line: str) -> list[str]:
    """What the last word of a command line can become; empty if it is the name of a file, or anything.

    >>> candidates("atoll cert"), candidates("atoll train digits-at loss=TRA")
    (['certify'], ['loss=TRADES'])
    """
    words = _split(line)
    place = next((i for i, word in enumerate(words) if os.path.basename(word) == "atoll"), None)
    if place is None or place + 1 >= len(words):
        return []
    *words, prefix = words[place + 1 :]
    if "\n" in prefix:
        return []
    return [word for word in _options(words, prefix) if word.startswith(prefix) and "\n" not in word]


def _split(line: str) -> list[str]:
    """The words of a command line whose last word may be empty or have an open quote.

    >>> _split("atoll ls "), _split("atoll ls 'ru")
    (['atoll', 'ls', ''], ['atoll', 'ls', 'ru'])
    """
    for end in ("", "'", '"', "\\"):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and line[-1:].isspace() else words
    return []


def _options(words: list[str], prefix: str) -> list[str]:
    """All words that may stand after some words, of which ``prefix`` decides what kind they are."""
    from atoll.cli import VERBS, parser

    if not words or words == ["help"]:
        return [*VERBS, *([] if words else ["help", "--help", "--version"])]
    if words[0] not in VERBS:
        return []
    actions = parser(words[0])._actions
    flags = {option: action for action in actions for option in action.option_strings}
    name, equals, _ = prefix.partition("=")
    if equals and name in flags:
        return [f"{name}={value}" for value in _values(flags[name], prefix[len(name) + 1 :])]
    if words[-1] in flags and flags[words[-1]].nargs != 0:
        return _values(flags[words[-1]], prefix)
    if prefix.startswith("-"):
        return [option for option in flags if option.startswith("--")]
    positional = [action for action in actions if not action.option_strings]
    given = _positional(words[1:], flags)
    action = positional[min(len(given), len(positional) - 1)] if positional else None
    if action is None or (len(given) >= len(positional) and action.nargs not in ("*", "+")):
        return []
    return _arguments(words[0], action, given, prefix)


def _positional(words: list[str], flags: dict[str, argparse.Action]) -> list[str]:
    """The words that are neither options nor their values."""
    result, rest = [], iter(words)
    for word in rest:
        if not word.startswith("-"):
            result.append(word)
        elif word in flags and flags[word].nargs != 0:
            next(rest, None)
    return result


def _arguments(verb: str, action: argparse.Action, given: list[str], prefix: str) -> list[str]:
    """What a positional argument can be."""
    if action.choices is not None:
        return list(action.choices)
    if action.metavar == "RUN":
        return _runs(prefix, files=verb == "explain")
    if action.metavar == "RECIPE":
        return _recipe_names()
    if verb == "train":
        return _keys(given, prefix)
    if verb == "ls" and action.metavar == "KIND":
        return ["recipes", "suites", "runs", *(names["title"] for names in look_up("tables", "kinds").values())]
    if verb == "ls" and given:
        kinds = {name: kind for kind, names in look_up("tables", "kinds").items() for name in (kind, names["title"])}
        return list(look_up("members", kinds[given[0]])) if given[0] in kinds else _folders(prefix)
    if verb == "study" and not given:
        return list(look_up("tables", "studies"))
    return []


def _members(kind: str) -> Callable[[], Iterable[str]]:
    return lambda: look_up("members", kind)


# What the values of options can be, by the name of the option.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "attacks": lambda: ["none", *look_up("tables", "suites"), *look_up("members", "attack")],
    "checkpoint": lambda: ["best", "last"],
    "data": _members("data"),
    "device": lambda: ["auto", "cpu", "cuda", "mps"],
    "fail_under": lambda: [f"{name}=" for name in look_up("constants", "atoll.audit.engine.GATES")],
    "loss": _members("loss"),
    "methods": _members("attribution"),
    "only": lambda: look_up("constants", "atoll.audit.plan.STEPS"),
    "reject": lambda: ["noise", *look_up("members", "data")],
    "weights": lambda: ["raw"],
}


def _values(action: argparse.Action, prefix: str) -> list[str]:
    """What the value of an option can be; in a list, the last part of it."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    before = prefix[: prefix.rfind(",") + 1]
    known = VALUES.get(action.dest)
    if action.dest == "surrogate":
        return _runs(prefix)
    return [f"{before}{name}" for name in known()] if known is not None else []


def _recipe_names() -> list[str]:
    """Recipes, and the variants of grids."""
    return [name for recipe in look_up("tables", "recipes").values() for name in recipe["variants"]]


# Sections of a recipe that are a component of the kind with this name.
PARTS = ("data", "model", "loss", "attack", "optimizer", "schedule")


def _keys(given: list[str], prefix: str) -> list[str]:
    """``KEY=`` for all keys of a recipe, in short form unless the prefix has a dot, and the values of sections."""
    section, equals, _ = prefix.partition("=")
    if equals:
        return [f"{section}={name}" for name in look_up("members", section)] if section in PARTS else []
    recipes: dict[str, list[str]] = look_up("tables", "keys")
    name = given[0].partition("/")[0]
    keys = recipes[name] if name in recipes else sorted(set.intersection(*map(set, recipes.values())))
    for word in given[1:]:  # loss=TRADES changes the keys of the loss
        section, _, value = word.partition("=")
        members: dict[str, Any] = look_up("members", section) if section in PARTS else {}
        if value in members:
            keys = [key for key in keys if not key.startswith(f"{section}.")]
            keys += [f"{section}.{parameter}" for parameter in members[value]["parameters"]]
    if "." in prefix:
        return [f"{key}=" for key in keys]
    short = [key.rpartition(".")[2] for key in keys]
    common = {key.rpartition(".")[2] for key in keys if key.startswith(("trainer.", "threat."))}
    unique = [key for key in dict.fromkeys(short) if short.count(key) == 1 or key in common]
    sections = dict.fromkeys(key.partition(".")[0] for key in keys)
    return [*(f"{name}=" for name in (*PARTS, "methods", *unique)), *(f"{name}." for name in sections)]


def _runs(prefix: str, *, files: bool = False) -> list[str]:
    """Folders of runs, and folders that may contain some; before anything is typed, the runs in ``runs``."""
    if not prefix:
        inside = sorted({path.parent for depth in ("*", "*/*") for path in Path("runs").glob(f"{depth}/recipe.yaml")})
        if inside:
            return [str(path) for path in inside]
    return _folders(prefix, files=files)


def _folders(prefix: str, *, files: bool = False) -> list[str]:
    """Folders that begin with a prefix; a slash follows unless they are runs."""
    place, begun = os.path.split(prefix)
    try:
        entries = sorted(os.scandir(os.path.expanduser(place) or "."), key=lambda entry: entry.name)
    except (OSError, ValueError):  # no such folder, or a null character
        return []
    result = []
    for entry in entries:
        if not entry.name.startswith(begun) or (entry.name.startswith(".") and not begun):
            continue
        path = os.path.join(place, entry.name)
        if entry.is_dir():
            is_run = os.path.lexists(os.path.join(entry.path, "recipe.yaml"))
            result.append(path if is_run else f"{path}/")
        elif files:
            result.append(path)
    return [path for path in result if not re.search(r"[\0\n]", path)]
