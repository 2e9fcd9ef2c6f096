"""Plain data to typed objects along type hints, and back; all errors at once.

Recipes, settings and results are plain data (YAML or JSON) on disk and typed objects in memory.  Type hints are the
schema, so there is no second place to keep up to date.  jsonargparse checks single values.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader

from atoll.errors import LARGEST_SEED, AtollError, InputError, RecipeError, ResultError, shorten
from atoll.files import DEEPEST
from atoll.registry import Registry, registry_of, suggest

T = TypeVar("T")


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; error messages name ``source``."""
    try:
        _check_depth(text)
        return get_loader("yaml")(text)  # like PyYAML's safe loader, but 1e-3 is a number
    except Exception as error:  # the loader's own errors have no common type
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _check_depth(text: str) -> None:
    """Raise a ValueError for YAML that is nested too deeply; building it recursively would crash the process."""
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError("nested too deeply")


def build_part(hint: Any, tree: Any, name: str, *, trust: bool) -> Any:
    """Build one component from plain data: a name, or ``class_path`` and ``init_args``."""
    builder = Builder(trust)
    part, _ = builder.build(hint, tree, name)
    if builder.errors:
        raise RecipeError("; ".join(builder.errors))
    return part


class Builder:
    """Walks plain data along type hints, building objects and collecting errors."""

    def __init__(self, trust: bool) -> None:
        self.trust = trust
        self.errors: list[str] = []

    def error(self, path: str, message: str) -> None:
        self.errors.append(f"{path}: {message}")

    def build(self, hint: Any, value: Any, path: str) -> tuple[Any, Any]:
        """The object ``value`` describes and the same description with all defaults; (None, None) after an error."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType and typing.get_origin(args[0]) is collections.abc.Callable:  # or None
            return (None, None) if value is None else self.build(args[0], value, path)
        if registry := registry_of(hint):
            return self._component(registry, value, path)
        if origin is collections.abc.Callable and (registry := registry_of(args[1])):
            return self._component(registry, value, path, supplied=len(args[0]))
        if origin is collections.abc.Sequence and registry_of(args[0]):
            if not isinstance(value, list):
                self.error(path, f"expected a list, got {shorten(value)}")
                return None, None
            built = [self.build(args[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
            return [b[0] for b in built], [b[1] for b in built]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._call(hint, value, path)
        return self._leaf(hint, value, path)

    def _component(self, registry: Registry, value: Any, path: str, supplied: int | None = None) -> tuple[Any, Any]:
        """A class with arguments: an instance, or a factory that still needs ``supplied`` arguments."""
        value = {"class_path": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or "class_path" not in value:
            self.error(path, f"expected class_path (and init_args), got {shorten(value)}")
            return None, None
        for extra in sorted(map(str, set(value) - {"class_path", "init_args"})):
            self.error(f"{path}.{extra}", "unknown key; arguments of the class belong under init_args")
        try:
            member = registry.resolve(value["class_path"], trust=self.trust)
        except InputError as error:
            self.error(f"{path}.class_path", str(error))
            return None, None
        arguments = value.get("init_args") or {}
        if isinstance(arguments, dict):
            arguments = {**member.arguments, **arguments}
        instance, arguments = self._call(member.cls, arguments, path, supplied)
        return instance, {"class_path": member.path, "init_args": arguments}

    def _call(self, cls: type, value: Any, path: str, supplied: int | None = None) -> tuple[Any, Any]:
        """``cls(**value)``, with every argument checked first."""
        if not isinstance(value, dict):
            self.error(path, f"expected a mapping of arguments, got {shorten(value)}")
            return None, None
        before = len(self.errors)
        known, hints = _signature(cls, supplied or 0)
        arguments, resolved = {}, {}
        for name, given in value.items():
            if name not in known:
                self.error(f"{path}.{name}", f"{cls.__name__} has no such argument{suggest(str(name), known)}")
                continue
            arguments[name], resolved[name] = self.build(hints.get(name, Any), given, f"{path}.{name}")
        for name, parameter in known.items():
            if name not in value:
                if parameter.default is parameter.empty:
                    self.error(f"{path}.{name}", f"{cls.__name__} needs this argument")
                elif (plain := _plain(parameter.default)) is not _NOT_PLAIN:
                    resolved[name] = plain
        if len(self.errors) > before:
            return None, None
        if supplied is not None:
            return functools.partial(cls, **arguments), resolved
        try:
            return cls(**arguments), resolved
        except (AtollError, ValueError, TypeError) as error:
            self.error(path, str(error))
            return None, None

    def _leaf(self, hint: Any, value: Any, path: str) -> tuple[Any, Any]:
        if hint is Any or isinstance(hint, typing.TypeVar):
            return value, value
        plain = hint if self.trust else _without_classes(hint)
        if not self.trust and isinstance(value, dict) and plain is dict:
            return value, value
        if (expected := _unusable(value)) is not None:
            self.error(path, f"expected {expected}, got {shorten(value)}")
            return None, None
        if value is None and type(None) not in (hint, *typing.get_args(hint)):
            self.error(path, f"expected {_spell(hint)}, got null")
            return None, None
        try:
            if plain is dict and value is None and type(None) in typing.get_args(hint):
                return None, None
            if not self.trust and (plain is None or plain is dict or _holds_mapping(value)):
                raise TypeError
            parsed = _parser(plain).parse_object({"value": value})["value"]
            if isinstance(parsed, Namespace):  # a mapping that describes no class
                raise TypeError
            return parsed, value
        except (ArgumentError, TypeError, ValueError):
            self.error(path, f"expected {_spell(hint)}, got {shorten(value)}")
            return None, None


def _unusable(value: Any) -> str | None:
    """What is expected instead of infinity, NaN, more than 64 bits, or a null character; None if there is none.

    >>> _unusable([1, 2.5]), _unusable([1, float("nan")])
    (None, 'a finite number')
    """
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return next((expected for part in parts if (expected := _unusable(part)) is not None), None)
    if isinstance(value, str) and "\0" in value:
        return "text without null characters"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    return f"at most {LARGEST_SEED:,}" if isinstance(value, int) and abs(value) > LARGEST_SEED else None


def _without_classes(hint: Any) -> Any:
    """A type hint without classes, because jsonargparse imports the classes that values name; None if nothing is left.

    >>> from torch import Tensor
    >>> _without_classes(float | Tensor), _without_classes(Tensor), _without_classes(tuple[float | Tensor, int])
    (<class 'float'>, None, tuple[float, int])
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, str, bool, type(None), Path, Any, ...) or origin is typing.Literal:
        return hint
    if dict in (hint, origin) or origin is collections.abc.Mapping:
        return dict
    if origin in (typing.Union, types.UnionType):
        options = [option for option in map(_without_classes, args) if option is not None]
        if dict in options:  # a mapping or nothing; other values of such an argument are rare
            return dict
        return functools.reduce(operator.or_, options) if options else None
    if origin in (tuple, list, collections.abc.Sequence):
        parts = [_without_classes(part) for part in args]
        return None if None in parts else origin[tuple(parts)] if origin is tuple else origin[parts[0]]
    return None


def _holds_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_holds_mapping, value)))


@functools.lru_cache(maxsize=256)
def _parser(hint: Any) -> ArgumentParser:
    """Checks a value of one type; making a parser takes longer than using it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


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
        with contextlib.suppress(NameError):  # hints only for type checkers; the constructor itself has to check
            hints = typing.get_type_hints(vars(parent)["__init__"]) | hints
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            break
    return dict(list(parameters.items())[supplied:]), hints


def argument_keys(hint: Any, value: Any, path: str, *, trust: bool) -> list[str]:
    """The keys of all arguments that the classes in plain data take, such as ``optimizer.lr`` or ``methods.0.gamma``.

    A name that stands for no class has none; building the object reports it.

    >>> from atoll.losses import Loss
    >>> argument_keys(Loss, "TRADES", "loss", trust=True)
    ['loss.lambda_t', 'loss.stop_clean_gradient']
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # a factory, or None
        return argument_keys(args[0], value, path, trust=trust)
    if origin is collections.abc.Sequence:
        parts = enumerate(value if isinstance(value, list) else [])
        return [key for i, part in parts for key in argument_keys(args[0], part, f"{path}.{i}", trust=trust)]
    cls, supplied = (args[1], len(args[0])) if origin is collections.abc.Callable else (hint, 0)
    if registry := registry_of(cls):
        try:
            cls = registry.resolve(value.get("class_path") if isinstance(value, dict) else value, trust=trust).cls
        except InputError:
            return []
    elif not dataclasses.is_dataclass(cls):
        return []
    return [f"{path}.{name}" for name in _signature(cls, supplied)[0]]


def parameters(cls: type, presets: Mapping[str, Any] | None = None) -> dict[str, dict[str, str]]:
    """Type and default of every constructor parameter of a class, as text.

    >>> from atoll.losses import TRADES
    >>> parameters(TRADES)["lambda_t"]
    {'type': 'a number', 'default': '6.0'}
    """
    known, hints = _signature(cls, 0)
    defaults = {name: repr(p.default) for name, p in known.items() if p.default is not p.empty}
    defaults |= {name: repr(value) for name, value in (presets or {}).items()}
    return {name: {"type": _spell(hints.get(name, Any)), "default": defaults.get(name, "required")} for name in known}


def _spell(hint: Any) -> str:
    """A type hint as text; a factory is written as what it makes."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is collections.abc.Callable:
        return _spell(args[-1])
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(a) for a in args)
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    if origin is not None and args:
        return f"a list ({', '.join(_spell(a) for a in args if a is not ...)})"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples, paths and the like as plain JSON data; NaN and infinity become null.

    >>> from atoll.stats import Accuracy
    >>> to_plain({"a": (1, float("nan"))}), to_plain(Accuracy(1, 2))["correct"]
    ({'a': [1, None]}, 1)
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_to_plain(value)
    if isinstance(value, Mapping):
        return {str(name): to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, Path | str):
        return str(value)  # torch.__version__ is a subclass of str
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fields_to_plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain data, without those marked as not stored."""
    fields = (f for f in dataclasses.fields(value) if f.metadata.get("stored", True))
    return {f.name: to_plain(getattr(value, f.name)) for f in fields}


def from_plain(hint: type[T], tree: Any, source: str = "") -> T:
    """The object that plain data describe; the inverse of ``to_plain``.

    Fields that are missing get their defaults, fields that are unknown are ignored.  Values of the wrong type raise a
    ResultError that lists all of them.
    """
    errors: list[str] = []
    value = _read(hint, tree, source, errors)
    if errors:
        raise ResultError("; ".join(errors[:5]))
    return typing.cast(T, value)


def _read(hint: Any, tree: Any, path: str, errors: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return tree
    if origin in (typing.Union, types.UnionType):
        if tree is None and type(None) in args:
            return None
        for option in (arg for arg in args if arg is not type(None)):
            attempt: list[str] = []
            value = _read(option, tree, path, attempt)
            if not attempt:
                return value
        errors.append(f"{path}: expected {_spell(hint)}, got {tree!r:.100}")
        return None
    if origin is typing.Literal and tree in args:
        return tree
    if origin in (tuple, list, collections.abc.Sequence) and isinstance(tree, list):
        hints = args if origin is tuple and args[-1] is not ... else [args[0]] * len(tree)
        if len(hints) == len(tree):
            items = [
                _read(h, item, f"{path}[{i}]", errors) for i, (h, item) in enumerate(zip(hints, tree, strict=True))
            ]
            return tuple(items) if origin is tuple else items
    if origin in (dict, collections.abc.Mapping) and isinstance(tree, dict):
        return {name: _read(args[1], item, f"{path}.{name}", errors) for name, item in tree.items()}
    if dataclasses.is_dataclass(hint) and isinstance(tree, dict):
        return _read_dataclass(hint, tree, path, errors)
    if hint is float and tree is None:
        return math.nan
    if hint is float and isinstance(tree, int | float) and not isinstance(tree, bool):
        with contextlib.suppress(OverflowError):
            return float(tree)
    if hint in (int, str, bool) and type(tree) is hint and (hint is not int or abs(tree) < 2**63):
        return tree
    if hint is Path and isinstance(tree, str):
        return Path(tree)
    errors.append(f"{path}: expected {_spell(hint)}, got {tree!r:.100}")
    return None


def _read_dataclass(hint: Any, tree: dict[str, Any], path: str, errors: list[str]) -> Any:
    hints, values, before = typing.get_type_hints(hint), {}, len(errors)
    for item in dataclasses.fields(hint):
        name = f"{path}.{item.name}" if path else item.name
        if not item.init or not item.metadata.get("stored", True):
            continue
        if item.name in tree:
            values[item.name] = _read(hints[item.name], tree[item.name], name, errors)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            errors.append(f"{name}: missing")
    if len(errors) > before:
        return None
    try:
        return hint(**values)
    except (AtollError, ValueError, TypeError) as error:
        errors.append(f"{path}: {error}")
        return None
