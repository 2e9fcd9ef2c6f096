"""Recipes: YAML to typed objects, checked as a whole before any work starts.

A recipe has one section per part of a run.  A section names a class and its arguments::

    loss:
      class_path: TRADES
      init_args: {lambda_t: 6.0}

Arguments are checked against the constructor's signature and type hints (by jsonargparse), and all faults of a
recipe are reported at once.

A table of a paper is a book of recipes: a ``base``, and axes to ``vary``, each with named choices of overrides.  Its
rows are named after their choices, ``BOOK/CHOICE-CHOICE-...``; ``rows`` adds overrides to single rows (by a pattern
with wildcards).
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, get_loader

from atoll.data.base import Data
from atoll.errors import AtollError, InputError, RecipeError
from atoll.models.base import Classifier
from atoll.registry import kind_of, resolve
from atoll.threat import ThreatModel
from atoll.training.losses import Loss
from atoll.training.methods import Method
from atoll.training.schedules import Schedule
from atoll.training.trainer import AttackFactory, OptimizerFactory, Settings

ModelFactory = Callable[[tuple[int, ...], int], Classifier]


@dataclass(kw_only=True)
class Recipe:
    """Everything that defines a run; ``tree`` is the same as plain data, with all defaults filled in."""

    data: Data
    model: ModelFactory
    pretrained: str | None  # file of weights to start from (.npz or .safetensors)
    loss: Loss
    threat: ThreatModel
    attack: AttackFactory
    methods: Sequence[Method]
    optimizer: OptimizerFactory
    schedule: Schedule
    trainer: Settings
    seed: int
    tree: Mapping[str, Any]


# What a section is where a recipe leaves it out.
DEFAULTS: dict[str, Any] = {
    "pretrained": None,
    "loss": "Standard",
    "threat": {},
    "attack": {"class_path": "PGD", "init_args": {"steps": 10}},
    "methods": [],
    "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}},
    "schedule": "Piecewise",
    "trainer": {},
    "seed": 0,
}


def recipes() -> dict[str, str]:
    """Shipped recipes and books by name, each with its first comment line.

    >>> "digits-at" in recipes()
    True
    """
    found = {}
    for file in sorted(files("atoll.recipes").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = file.read_text().splitlines()[0].lstrip("# ")
    return found


def rows(book: str) -> list[str]:
    """The names of a book's recipes; the book's own name alone if it is a plain recipe.

    >>> rows("digits-at")
    ['digits-at']
    >>> "rat/cifar10-preact18-linf-trades-1st" in rows("rat")
    True
    """
    tree = parse_yaml(_recipe_text(book), book)
    if not _is_book(tree):
        return [book]
    return [f"{book}/{'-'.join(choices)}" for choices in itertools.product(*tree["vary"])]


def _is_book(tree: Any) -> bool:
    return isinstance(tree, dict) and "base" in tree and "vary" in tree


def _row(tree: dict[str, Any], book: str, row: str) -> dict[str, Any]:
    """One row of a book as a recipe of its own."""
    for choices in itertools.product(*tree["vary"]):
        if "-".join(choices) == row:
            overrides = [axis[choice] or {} for axis, choice in zip(tree["vary"], choices, strict=True)]
            special = tree.get("rows") or {}
            overrides += [more for pattern, more in special.items() if fnmatch.fnmatchcase(row, pattern)]
            recipe: dict[str, Any] = _copy(tree["base"])
            for key, value in (item for override in overrides for item in override.items()):
                _override(recipe, key, _copy(value))
            return recipe
    raise RecipeError(f"{book} has no row {row!r}{_suggest(row, (r.partition('/')[2] for r in rows(book)))}")


def read_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain data of a recipe (a shipped name, a file, or a mapping) with ``key.sub=value`` overrides applied."""
    if isinstance(source, Mapping):
        tree = _copy(source)
    else:
        book, _, row = str(source).partition("/")
        in_book = book in recipes() and row
        tree = parse_yaml(_recipe_text(book if in_book else source), str(source))
        if in_book and _is_book(tree):
            tree = _row(tree, book, row)
        elif _is_book(tree):
            raise RecipeError(f"{source} is a book of recipes; name one of its rows, such as {rows(str(source))[0]}")
    if not isinstance(tree, dict):
        raise RecipeError(f"{source}: expected a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"overrides: expected key.sub=value, got {override!r}")
        _override(tree, key, parse_yaml(value, override))
    return tree


def build_recipe(source: str | Path | Mapping[str, Any], *overrides: str, trust: bool = True) -> Recipe:
    """Read, check and build a recipe; a RecipeError lists everything that is wrong with it.

    >>> build_recipe("digits-at", "trainer.epochs=2").trainer.epochs
    2
    """
    tree = read_recipe(source, overrides)
    builder = _Builder(trust)
    hints = typing.get_type_hints(Recipe)
    sections = {f.name for f in dataclasses.fields(Recipe)} - {"tree"}
    for name in sorted(set(tree) - sections):
        builder.fault(name, f"unknown section{_suggest(name, sections)}")
    for name in ("threat", "model"):
        section: dict[str, Any] = tree[name] if isinstance(tree.get(name), dict) else {}
        if "bounds" in section or "bounds" in (section.get("init_args") or {}):
            builder.fault(f"{name}.bounds", "the bounds of inputs are those of the data set; leave them out")
    parts, resolved = {}, {}
    for name in (f.name for f in dataclasses.fields(Recipe) if f.name in sections):
        if name in tree or name in DEFAULTS:
            parts[name], resolved[name] = builder.build(hints[name], tree.get(name, DEFAULTS.get(name)), name)
        else:
            builder.fault(name, "this section is required")
    if builder.faults:
        title = source if isinstance(source, str | Path) else "recipe"
        raise RecipeError("\n  ".join([f"{title} has {len(builder.faults)} fault(s):", *builder.faults]))
    resolved["threat"].pop("bounds", None)
    resolved["model"]["init_args"].pop("bounds", None)
    return Recipe(**parts, tree=resolved)


def build_part(kind_hint: Any, tree: Any, name: str, *, trust: bool) -> Any:
    """One section on its own: how a checkpoint's model and data are rebuilt."""
    builder = _Builder(trust)
    part, _ = builder.build(kind_hint, tree, name)
    if builder.faults:
        raise RecipeError("; ".join(builder.faults))
    return part


class _Builder:
    """Walks plain data along type hints, building objects and collecting faults."""

    def __init__(self, trust: bool) -> None:
        self.trust = trust
        self.faults: list[str] = []

    def fault(self, path: str, message: str) -> None:
        self.faults.append(f"{path}: {message}")

    def build(self, hint: Any, value: Any, path: str) -> tuple[Any, Any]:
        """The object ``value`` describes and the same description with all defaults; (None, None) after a fault."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType and typing.get_origin(args[0]) is collections.abc.Callable:  # or nothing
            return (None, None) if value is None else self.build(args[0], value, path)
        if kind := kind_of(hint):
            return self._component(kind, value, path)
        if origin is collections.abc.Callable and (kind := kind_of(args[1])):
            return self._component(kind, value, path, supplied=len(args[0]))
        if origin is collections.abc.Sequence and kind_of(args[0]):
            if not isinstance(value, list):
                self.fault(path, f"expected a list, got {value!r}")
                return None, None
            built = [self.build(args[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
            return [b[0] for b in built], [b[1] for b in built]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._call(hint, value, path)
        return self._leaf(hint, value, path)

    def _component(self, kind: str, value: Any, path: str, supplied: int | None = None) -> tuple[Any, Any]:
        """A class with arguments: an instance, or a factory that still waits for ``supplied`` arguments."""
        value = {"class_path": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or "class_path" not in value:
            self.fault(path, f"expected class_path (and init_args), got {value!r}")
            return None, None
        for extra in sorted(set(value) - {"class_path", "init_args"}):
            self.fault(f"{path}.{extra}", "unknown key; arguments of the class belong under init_args")
        try:
            cls = resolve(value["class_path"], kind, trust=self.trust)
        except InputError as error:
            self.fault(f"{path}.class_path", str(error))
            return None, None
        built, arguments = self._call(cls, value.get("init_args") or {}, path, supplied)
        return built, {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}

    def _call(self, cls: type, value: Any, path: str, supplied: int | None = None) -> tuple[Any, Any]:
        """``cls(**value)``, with every argument checked first."""
        if not isinstance(value, dict):
            self.fault(path, f"expected a mapping of arguments, got {value!r}")
            return None, None
        before = len(self.faults)
        known, hints = _signature(cls, supplied or 0)
        arguments, resolved = {}, {}
        for name, given in value.items():
            if name not in known:
                self.fault(f"{path}.{name}", f"{cls.__name__} has no such argument{_suggest(name, known)}")
                continue
            arguments[name], resolved[name] = self.build(hints.get(name, Any), given, f"{path}.{name}")
        for name, parameter in known.items():
            if name not in value:
                if parameter.default is parameter.empty:
                    self.fault(f"{path}.{name}", f"{cls.__name__} needs this argument")
                elif (plain := _plain(parameter.default)) is not _NOT_PLAIN:
                    resolved[name] = plain
        if len(self.faults) > before:
            return None, None
        if supplied is not None:
            return functools.partial(cls, **arguments), resolved
        try:
            return cls(**arguments), resolved
        except (AtollError, ValueError, TypeError) as error:
            self.fault(path, str(error))
            return None, None

    def _leaf(self, hint: Any, value: Any, path: str) -> tuple[Any, Any]:
        if hint is Any or isinstance(hint, typing.TypeVar):
            return value, value
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=hint)
        try:
            return parser.parse_object({"value": value})["value"], value
        except (ArgumentError, TypeError, ValueError):
            self.fault(path, f"expected {_spell(hint)}, got {value!r}")
            return None, None


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """A default as YAML would write it; defaults that cannot be written (objects) are left out."""
    if isinstance(value, tuple | list):
        items = [_plain(v) for v in value]
        return _NOT_PLAIN if any(i is _NOT_PLAIN for i in items) else items
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def _signature(cls: type, supplied: int) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """Parameters and type hints of a constructor; ``**options`` stands for those of the class above."""
    if dataclasses.is_dataclass(cls):
        return dict(inspect.signature(cls).parameters), typing.get_type_hints(cls)
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for parent in (c for c in cls.__mro__ if "__init__" in vars(c)):
        own = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
        for parameter in own:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                parameters.setdefault(parameter.name, parameter)
        with contextlib.suppress(NameError):  # hints only for type checkers; the constructor itself has to complain
            hints = typing.get_type_hints(vars(parent)["__init__"]) | hints
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            break
    return dict(list(parameters.items())[supplied:]), hints


def _spell(hint: Any) -> str:
    """A type hint in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(a) for a in args)
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    if origin is not None and args:
        return f"a list ({', '.join(_spell(a) for a in args if a is not ...)})"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _suggest(name: str, known: typing.Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(known)}"


def _recipe_text(source: str | Path) -> str:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            return path.read_text()
        except OSError as error:
            raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from None
    if str(source) in recipes():
        return files("atoll.recipes").joinpath(f"{source}.yaml").read_text()
    raise RecipeError(f"no recipe {str(source)!r}{_suggest(str(source), recipes())}")


def parse_yaml(text: str, source: str) -> Any:
    """Plain data of a text; ``source`` is what a fault is blamed on."""
    try:
        return get_loader("yaml")(text)  # like PyYAML's safe loader, but 1e-3 is a number
    except Exception as error:  # the loader's own errors have no common type
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def _override(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``a.b.c`` in a tree; ``init_args`` may be left out, and numbers index lists."""
    *path, last = dotted.split(".")
    node: Any = tree
    for depth, name in enumerate(path):
        node = _inside(node, name)
        if isinstance(node, list):
            if not name.isdecimal() or int(name) >= len(node):
                where = ".".join(path[: depth + 1])
                raise RecipeError(f"{dotted}: expected an index below {len(node)} at {where}, got {name!r}")
            if isinstance(node[int(name)], str):
                node[int(name)] = {"class_path": node[int(name)]}
            node = node[int(name)]
            continue
        if not isinstance(node.get(name), dict | list):
            default = _copy(DEFAULTS.get(name, {})) if depth == 0 and name not in node else node.get(name)
            node[name] = {"class_path": default} if isinstance(default, str) else {} if default is None else default
        node = node[name]
    node = _inside(node, last)
    if isinstance(node, list):
        if not last.isdecimal() or int(last) >= len(node):
            raise RecipeError(f"{dotted}: expected an index below {len(node)}, got {last!r}")
        node[int(last)] = value
    elif last == "class_path":
        node.clear()  # the arguments of another class would not fit
        node[last] = value
    else:
        node[last] = value


def _inside(node: Any, name: str) -> Any:
    """Step over the ``init_args`` level unless it is named."""
    if isinstance(node, dict) and "class_path" in node and name not in ("class_path", "init_args"):
        return node.setdefault("init_args", {})
    return node
