"""Recipes: YAML to typed objects, checked as a whole before any work starts.

A recipe has one section per part of a run.  A section names a class and its arguments::

    loss:
      class_path: TRADES
      init_args: {lambda_t: 6.0}

Arguments are checked against the constructor's signature and type hints (by jsonargparse), and all faults of a
recipe are reported at once.

A table of a paper is a grid of recipes: a ``base``, and axes to ``vary``, each with named choices of overrides.  Its
variants are named after their choices, ``GRID/CHOICE-CHOICE-...``; ``rows`` adds overrides to single variants (by a
pattern with wildcards).

Overrides are written ``key.sub=value``.  Short forms work as well: ``epochs=5`` means ``trainer.epochs=5``, and
``lr=0.1`` means ``optimizer.lr=0.1`` (see ``full_key``).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from atoll.attacks.base import AttackFactory, training_attack
from atoll.config import Builder, argument_keys, parse_yaml
from atoll.data.base import Data
from atoll.errors import LARGEST_SEED, AtollError, DamagedError, InputError, RecipeError, check_count
from atoll.files import check_nesting, read_file, write_atomic
from atoll.losses import Loss
from atoll.models.base import Classifier
from atoll.registry import closest, installed_entry_points, suggest
from atoll.threat import ThreatModel
from atoll.training.methods import Method
from atoll.training.methods.base import check_methods
from atoll.training.optimizers import check_factory
from atoll.training.schedules import Schedule
from atoll.training.trainer import OptimizerFactory, TrainerSettings

MOST_ERRORS = 20  # in one message
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
    trainer: TrainerSettings
    seed: int
    tree: Mapping[str, Any]


CHECKSUM = "# sha256: "  # how the recipe of a run begins
MOST_VALUES = 100_000  # in a recipe

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


@functools.cache
def _recipe_files() -> dict[str, Traversable]:
    """Recipes of Atoll and of installed packages (entry points ``atoll.recipes``), by name."""
    packages = ["atoll.runs.recipes", *(entry.value for entry in installed_entry_points("atoll.recipes"))]
    available = [file for package in packages for file in files(package).iterdir() if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file for file in sorted(available, key=lambda file: file.name)}


def recipes() -> dict[str, str]:
    """Available recipes and grids by name, each with its first comment line.

    >>> "digits-at" in recipes()
    True
    """
    return {name: file.read_text().splitlines()[0].lstrip("# ") for name, file in _recipe_files().items()}


def variants(grid: str) -> list[str]:
    """The names of a grid's variants; the name alone if it is a plain recipe.

    >>> variants("digits-at")
    ['digits-at']
    >>> "digits-flat/trades-trh" in variants("digits-flat")
    True
    """
    tree = _read(grid)
    if not _is_grid(tree):
        return [grid]
    return [f"{grid}/{'-'.join(choices)}" for choices in itertools.product(*tree["vary"])]


def _is_grid(tree: Any) -> bool:
    return isinstance(tree, dict) and "base" in tree and "vary" in tree


def _variant(tree: dict[str, Any], grid: str, variant: str) -> dict[str, Any]:
    """One variant of a grid as a recipe."""
    for choices in itertools.product(*tree["vary"]):
        if "-".join(choices) == variant:
            overrides = [axis[choice] or {} for axis, choice in zip(tree["vary"], choices, strict=True)]
            special = tree.get("rows") or {}
            overrides += [more for pattern, more in special.items() if fnmatch.fnmatchcase(variant, pattern)]
            recipe: dict[str, Any] = _copy(tree["base"])
            for key, value in (item for override in overrides for item in override.items()):
                _override(recipe, key, _copy(value))
            return recipe
    raise RecipeError(
        f"{grid} has no variant {variant!r}{suggest(variant, (r.partition('/')[2] for r in variants(grid)))}"
    )


def read_recipe(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, trust: bool = True
) -> dict[str, Any]:
    """The plain data of a recipe (a shipped name, a file, or a mapping) with ``key.sub=value`` overrides applied."""
    if isinstance(source, Mapping):
        tree = _copy(source)
    else:
        grid, _, variant = str(source).partition("/")
        in_grid = grid in recipes() and variant
        tree = _read(grid if in_grid else source)
        if in_grid and _is_grid(tree):
            tree = _variant(tree, grid, variant)
        elif _is_grid(tree):
            raise RecipeError(
                f"{source} is a grid of recipes; name one of its variants, such as {variants(str(source))[0]}"
            )
    if not isinstance(tree, dict):
        raise RecipeError(f"{source}: expected a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override, trust)
    return tree


def expand_overrides(
    source: str | Path | Mapping[str, Any], earlier: Sequence[str], overrides: Sequence[str]
) -> list[str]:
    """Overrides with full keys, as they apply to a recipe after ``earlier`` ones.

    >>> expand_overrides("digits-at", ["loss=TRADES"], ["epochs=5", "lambda_t=3", "loss.lambda_t=2"])
    ['trainer.epochs=5', 'loss.lambda_t=3', 'loss.lambda_t=2']
    """
    tree = read_recipe(source, earlier)
    return [_apply(tree, override, trust=True) for override in overrides]


def _apply(tree: dict[str, Any], override: str, trust: bool) -> str:
    """Apply ``key=value`` to a recipe; the override with its full key."""
    short, equals, value = override.partition("=")
    if not equals or not short:
        raise RecipeError(f"overrides: expected key.sub=value, got {override!r}")
    parsed = parse_yaml(value, override)
    if parsed == "" or not value.strip():
        raise RecipeError(f"{short}: expected a value, got none (write {short}=null if you mean null)")
    key = full_key(tree, short, trust=trust)
    _override(tree, key, parsed)
    return f"{key}={value}"


def full_key(tree: Mapping[str, Any], key: str, *, trust: bool = True) -> str:
    """The key that a short form stands for: ``epochs`` is ``trainer.epochs``, and ``lr`` is ``optimizer.lr``.

    A short form is the last part of a key.  It stands for the key of ``trainer`` or ``threat`` with this name, because
    every recipe has those.  Otherwise, exactly one class of the recipe may have an argument with this name.

    >>> tree = read_recipe("digits-at")
    >>> [full_key(tree, key) for key in ("eps", "steps", "seed", "loss.lambda_t")]
    ['threat.eps', 'attack.steps', 'seed', 'loss.lambda_t']
    """
    sections = [field.name for field in dataclasses.fields(Recipe) if field.name != "tree"]
    if "." in key or key in sections:
        return key
    keys = recipe_keys(tree, trust=trust)
    matches = [full for full in keys if full.rpartition(".")[2] == key]
    matches = [full for full in matches if full.startswith(("trainer.", "threat."))] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecipeError(f"{key}: ambiguous; write {' or '.join(matches)}")
    names = {full: full.rpartition(".")[2] for full in [*keys, *sections]}
    similar = [full for close in closest(key, names.values()) for full in names if names[full] == close]
    if similar:
        raise RecipeError(f"{key}: unknown key; did you mean {' or '.join(similar)}?")
    raise RecipeError(
        f"{key}: unknown key; expected the key of a section ({', '.join(sections)}), as in trainer.epochs"
    )


def recipe_keys(tree: Mapping[str, Any], *, trust: bool = True) -> list[str]:
    """The full keys of all arguments that the classes of a recipe take.

    >>> "loss.lambda_t" in recipe_keys(read_recipe("digits-trades"))
    True
    """
    hints = typing.get_type_hints(Recipe)
    values = {field.name: tree.get(field.name, DEFAULTS.get(field.name)) for field in dataclasses.fields(Recipe)}
    sections = [name for name in values if name != "tree"]
    return [key for name in sections for key in argument_keys(hints[name], values[name], name, trust=trust)]


def build_recipe(source: str | Path | Mapping[str, Any], *overrides: str, trust: bool = True) -> Recipe:
    """Read, check and build a recipe; a RecipeError lists everything that is wrong with it.

    >>> build_recipe("digits-at", "trainer.epochs=2").trainer.epochs
    2
    """
    tree = read_recipe(source, overrides, trust=trust)
    builder = Builder(trust)
    hints = typing.get_type_hints(Recipe)
    sections = [f.name for f in dataclasses.fields(Recipe) if f.name != "tree"]
    for name in sorted(map(str, tree.keys() - sections)):
        builder.error(name, f"unknown section{suggest(name, sections)}")
    for name in ("threat", "model"):
        section: dict[str, Any] = tree[name] if isinstance(tree.get(name), dict) else {}
        if "bounds" in section or "bounds" in (section.get("init_args") or {}):
            builder.error(f"{name}.bounds", "the data set determines the bounds of inputs; remove this option")
    parts, resolved = {}, {}
    for name in sections:
        if name in tree or name in DEFAULTS:
            parts[name], resolved[name] = builder.build(hints[name], tree.get(name, DEFAULTS.get(name)), name)
        else:
            builder.error(name, "this section is required")
    _check_attack(builder, parts)
    _check_training(builder, parts)
    if builder.errors:
        title = source if isinstance(source, str | Path) else "recipe"
        errors, more = builder.errors[:MOST_ERRORS], len(builder.errors) - MOST_ERRORS
        rest = [f"and {more} more"] if more > 0 else []
        raise RecipeError("\n  ".join([f"{title} has {len(builder.errors)} error(s):", *errors, *rest]))
    resolved["threat"].pop("bounds", None)
    resolved["model"]["init_args"].pop("bounds", None)
    return Recipe(**parts, tree=resolved)


def _check_attack(builder: Builder, parts: Mapping[str, Any]) -> None:
    """Build the training attack once, so that a threat or objective that does not suit it is an error of the recipe."""
    loss, threat, attack = parts.get("loss"), parts.get("threat"), parts.get("attack")
    if threat is not None and threat.norm == "l0":
        builder.error("threat.norm", "expected linf, l2 or l1 for training, got l0")
        return
    if loss is None or threat is None or attack is None or loss.objective is None:
        return
    try:
        training_attack(attack, threat, loss.objective)
    except (AtollError, ValueError, TypeError) as error:
        reason = f" (what {type(loss).__name__} maximizes)" if "objective" in str(error) else ""
        builder.error("attack", f"{error}{reason}")


def _check_training(builder: Builder, parts: Mapping[str, Any]) -> None:
    """Check what the trainer would refuse: methods listed twice, a long warm-up, an optimizer that does not work."""
    checks: list[tuple[str, Callable[[], None]]] = []
    if parts.get("threat") is not None:
        checks.append(("threat", parts["threat"].check_radius))
    if parts.get("methods") is not None:
        checks.append(("methods", lambda: check_methods([m for m in parts["methods"] if m is not None])))
    if parts.get("schedule") is not None and parts.get("trainer") is not None:
        checks.append(("schedule", lambda: parts["schedule"].check(parts["trainer"].epochs)))
    if parts.get("optimizer") is not None:
        checks.append(("optimizer", lambda: check_factory(parts["optimizer"])))
    checks.append(("seed", lambda: check_count(-LARGEST_SEED, LARGEST_SEED, seed=parts.get("seed"))))
    for name, check in checks:
        try:
            check()
        except InputError as error:
            builder.error(name, str(error).removeprefix(f"{name}: "))


def write_recipe(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the recipe of a run.  Its first line, a comment, is the checksum of the rest."""
    text = yaml.safe_dump(dict(tree), sort_keys=False)
    write_atomic(path, f"{CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())


def read_recipe_file(path: Path, *, inside: Path | None = None) -> Any:
    """Read a recipe as plain data; raises a RecipeError if it is not YAML or its checksum does not match.

    A file without a checksum was written by a user or by version 0.1.

    Args:
        path: the file.
        inside: a folder that the file must be in if it is a link.
    """
    try:
        text = read_file(path, inside=inside).decode()
        first, _, rest = text.partition("\n")
        if re.search("[0-9a-f]{32}", first) and first != CHECKSUM + hashlib.sha256(rest.encode()).hexdigest():
            raise RecipeError(
                f"{path} was damaged or edited: its checksum does not match; restore the file, or delete its first line"
                " to accept the changes"
            )
        tree = parse_yaml(text, str(path))
        check_nesting(tree)
        _check_size(tree)
        return tree
    except FileNotFoundError:
        raise RecipeError(f"cannot read the recipe {path}: No such file or directory") from None
    except DamagedError as error:
        raise RecipeError(str(error)) from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} cannot be read: not a text file in UTF-8") from None
    except ValueError as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None


def _check_size(tree: Any) -> None:
    """Raise a ValueError for plain data that a few anchors make huge."""
    rest = [tree]
    for _ in range(MOST_VALUES):
        part = rest.pop()
        rest += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if not rest:
            return
    raise ValueError(f"expected at most {MOST_VALUES:,} values")


def _read(source: str | Path) -> Any:
    """Read a shipped recipe or a file."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_recipe_file(path)
    if file := _recipe_files().get(str(source)):
        return parse_yaml(file.read_text(), str(source))
    raise RecipeError(f"no recipe {str(source)!r}{suggest(str(source), recipes())}")


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def _override(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``a.b.c`` in a tree; ``init_args`` may be left out, and numbers index lists."""
    *path, last = dotted.split(".")
    node: Any = tree
    for depth, name in enumerate(path):
        if depth == 0:
            tree.setdefault(name, _copy(DEFAULTS.get(name, {})))
        node, key = _place(node, name, dotted, f" at {'.'.join(path[: depth + 1])}")
        inner = node[key] if isinstance(node, list) else node.get(key)
        node[key] = {"class_path": inner} if isinstance(inner, str) else {} if inner is None else inner
        node = node[key]
    node, key = _place(node, last, dotted)
    if key == "class_path":
        node.clear()  # the arguments of another class would not fit
    node[key] = value


def _place(node: Any, name: str, dotted: str, where: str = "") -> tuple[Any, Any]:
    """The mapping or list that a name is in, and its key there; ``init_args`` is stepped over unless it is named."""
    if isinstance(node, dict) and "class_path" in node and name not in ("class_path", "init_args"):
        node = node.setdefault("init_args", {})
    if isinstance(node, dict):
        return node, name
    if not isinstance(node, list):
        raise RecipeError(f"{dotted}: {node!r} has no part {name!r}")
    if not name.isdecimal() or int(name) >= len(node):
        raise RecipeError(f"{dotted}: expected an index below {len(node)}{where}, got {name!r}")
    return node, int(name)
