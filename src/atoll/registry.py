"""One table of names per kind of component: the same names in recipes, on the command line and in Python.

A name is one of these:

- a registered name or alias, such as ``TRADES`` or ``PGD-20``, from Atoll or from an installed package (entry points);
- a dotted path, such as ``my.package.MyLoss``;
- a class in a file, such as ``my_loss.py:MyLoss``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import InputError, shorten
from atoll.import_path import may_hold_foreign_code

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Member:
    """A class and the arguments that a name stands for.

    Args:
        name: as listed.
        cls: the class.
        arguments: preset arguments, which can be overridden.
        summary: one line for ``atoll ls``.
    """

    name: str
    cls: type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""

    @property
    def path(self) -> str:
        """The name under which the class can be imported again."""
        return class_path(self.cls)


@dataclass
class Registry:
    """The members of one kind.

    Args:
        kind: singular, as in error messages: ``attack``.
        title: plural, as in ``atoll ls``.
        base: dotted path of the class that all members derive from.
        package: every module in it is imported to fill the table, so a new member is one new file.
        trusted: dotted paths that start with one of these may be imported without trust.
        modules: further modules to import.
        exported: list every class of the kind that the package exports, for packages that are not ours.

    Other distributions add members through the entry point group ``atoll.TITLE``.

    >>> from atoll.losses import LOSSES
    >>> LOSSES.resolve("TRADES").cls.__name__, LOSSES.resolve("trades").cls.__name__
    ('TRADES', 'TRADES')
    """

    kind: str
    title: str
    base: str
    package: str
    trusted: tuple[str, ...] = ("atoll.",)
    modules: tuple[str, ...] = ()
    exported: bool = False
    _members: dict[str, Member] = field(default_factory=dict, repr=False)
    _patterns: dict[str, Callable[[int], Member]] = field(default_factory=dict, repr=False)

    def register(self, *aliases: str, own_name: bool = True) -> Callable[[T], T]:
        """Class decorator: list the class under its own name, and under aliases."""

        def add(cls: T) -> T:
            for name in (*((cls.__name__,) if own_name else ()), *aliases):
                self.add(name, cls)
            return cls

        return add

    def add(self, name: str, cls: type, **arguments: Any) -> None:
        """List a class with preset arguments under a separate name."""
        known = self._members.get(name)
        if known is not None and class_path(known.cls) != class_path(cls):
            raise InputError(f"{self.kind}: the name {name} is taken by {known.path}")
        self._members[name] = Member(name, cls, arguments, summary(cls))

    def add_numbered(self, prefix: str, cls: type, argument: str, example: int, **arguments: Any) -> None:
        """Names with a number, such as ``PGD-20``; the number is passed as ``argument``."""
        self._patterns[prefix] = lambda n: Member(f"{prefix}-{n}", cls, {argument: n, **arguments}, summary(cls))
        self.add(f"{prefix}-{example}", cls, **{argument: example}, **arguments)

    @cached_property
    def base_class(self) -> type:
        """The class that all members derive from."""
        base: type = _attribute(self.base)
        return base

    @cached_property
    def _loaded(self) -> dict[str, Member]:
        for module_name in self.modules:
            importlib.import_module(module_name)
        package = importlib.import_module(self.package)
        if self.exported:
            classes = (cls for cls in vars(package).values() if inspect.isclass(cls))
            for cls in (cls for cls in classes if issubclass(cls, self.base_class) and cls is not self.base_class):
                self.add(cls.__name__, cls)
            return self._members
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            if module.name != "__main__":
                importlib.import_module(f"{self.package}.{module.name}")
        for entry in installed_entry_points(f"atoll.{self.title}"):
            if entry.name not in self._members:
                self.add(entry.name, entry.load())
        return self._members

    def members(self) -> dict[str, Member]:
        """All members by name, in alphabetical order."""
        return dict(sorted(self._loaded.items(), key=lambda item: item[0].lower()))

    def resolve(self, name: object, *, trust: bool = True) -> Member:
        """The member that a name stands for.

        Dotted paths and files run code when they are imported.  Without ``trust``, only registered classes and those of
        Atoll are accepted; this is how runs from elsewhere are opened.
        """
        if not isinstance(name, str):
            raise InputError(f"expected the name of {_article(self.kind)}, got {shorten(name)}")
        members = self._loaded
        if member := members.get(name) or {known.lower(): m for known, m in members.items()}.get(name.lower()):
            return member
        prefix, _, number = name.rpartition("-")
        patterns = {known.lower(): make for known, make in self._patterns.items()}
        if prefix.lower() in patterns and re.fullmatch(r"[1-9]\d{0,5}", number):
            return patterns[prefix.lower()](int(number))
        if member := next((member for member in members.values() if member.path == name), None):
            return Member(name, member.cls, {}, member.summary)
        if name.startswith("atoll.") and (member := members.get(name.rpartition(".")[2])):
            return Member(name, member.cls, {}, member.summary)  # the class has moved since this name was stored
        dotted = "." in name and all(part.isidentifier() for part in name.split("."))
        if not dotted and ".py:" not in name:
            raise unknown_member(self.kind, name, members)
        return Member(name, self._import(name, trust))

    def _import(self, name: str, trust: bool) -> type:
        if not trust and not name.startswith(self.trusted):
            raise InputError(f"{name} runs code from outside Atoll; pass --trust if you trust its author")
        try:
            if ".py:" in name:
                path, _, attribute = name.rpartition(":")
                cls = getattr(load_file(Path(path)), attribute)
            else:
                with _current_folder_importable():
                    cls = _attribute(name)
        except (ImportError, AttributeError, OSError, SyntaxError) as error:
            raise InputError(f"cannot import {name!r}: {error}") from None
        if not (inspect.isclass(cls) and issubclass(cls, self.base_class)):
            raise InputError(f"expected a subclass of {self.base}, got {name}")
        return cls


OPTIMIZERS = Registry(
    "optimizer", "optimizers", "torch.optim.Optimizer", "torch.optim", trusted=("torch.optim.",), exported=True
)

# Where the table of each kind is; loaded when it is needed, so that nothing imports what it does not use.
REGISTRIES = {
    "data": "atoll.data.base.DATA",
    "augmentation": "atoll.data.augment.AUGMENTATIONS",
    "corruption": "atoll.corruptions.base.CORRUPTIONS",
    "model": "atoll.models.base.MODELS",
    "loss": "atoll.losses.base.LOSSES",
    "attack": "atoll.attacks.base.ATTACKS",
    "method": "atoll.training.methods.base.METHODS",
    "schedule": "atoll.training.schedules.SCHEDULES",
    "optimizer": "atoll.registry.OPTIMIZERS",
    "attribution": "atoll.explain.attributions.ATTRIBUTIONS",
    "measurement": "atoll.measure.MEASUREMENTS",
    "study": "atoll.studies.base.STUDIES",
}


def registry(kind: str) -> Registry:
    """The registry of a kind.

    >>> registry("attack").title
    'attacks'
    """
    table: Registry = _attribute(REGISTRIES[kind])
    return table


def installed_entry_points(group: str) -> list[EntryPoint]:
    """Entry points of installed packages; those that lie in the current folder or in a run's folder are ignored."""
    return [
        entry
        for entry in entry_points(group=group)
        if entry.dist is None or not may_hold_foreign_code(str(entry.dist.locate_file("")))
    ]


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """For names that the user typed or trusts: modules in the current folder, after all installed ones."""
    folder = os.getcwd()
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def registry_of(hint: Any) -> Registry | None:
    """The registry whose members a type hint stands for: it is their base class."""
    if not inspect.isclass(hint):
        return None
    if hint.__module__.startswith("torch.optim"):
        return OPTIMIZERS if hint is OPTIMIZERS.base_class else None
    table = getattr(hint, "registry", None)
    return table if isinstance(table, Registry) and table.base_class is hint else None


def load_file(path: Path) -> Any:
    """Import a Python file as a separate module, once unless it changes."""
    path = path.expanduser().resolve()
    content = path.read_bytes() if path.is_file() else b""  # an edited file is another module
    name = f"atoll_file_{hashlib.sha256(str(path).encode() + content).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def class_path(cls: type) -> str:
    """The name under which ``resolve`` gives a class again.

    >>> class_path(Registry)
    'atoll.registry.Registry'
    """
    if cls.__module__.startswith("atoll_file_"):
        return f"{inspect.getfile(cls)}:{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that resemble a name, the most similar first; empty if none does.

    >>> closest("TRDAES", ["AT", "TRADES"])
    ['TRADES']
    """
    lower = {each.lower(): each for each in sorted(known)}
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3)]


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known ones, or all of them.

    >>> suggest("TRDAES", ["AT", "TRADES"]), suggest("x", ["AT", "TRADES"])
    ('; did you mean TRADES?', '; expected one of AT, TRADES')
    """
    names = sorted(known)
    close = closest(name, names)
    return f"; did you mean {' or '.join(close)}?" if close else f"; expected one of {', '.join(names)}"


def unknown_member(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error about a name that no member of a kind has."""
    return InputError(f"expected {_article(kind)}, got {shorten(name)}{suggest(name, known)}")


def summary(cls: type) -> str:
    """First line of a class's own documentation."""
    text = str(cls.__dict__.get("__doc__") or getattr(cls, "title", ""))
    return inspect.cleandoc(text).splitlines()[0] if text.strip() else ""


def _attribute(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def constructor_call(instance: object, **attributes: str) -> str:
    """The call that makes an object again, without the arguments that have their default value.

    Every argument is expected as an attribute of the same name, or of the name given in ``attributes``.  Arguments that
    a constructor passes on (``**options``) are looked up in its base class.

    >>> class Point:
    ...     def __init__(self, x, *, y=0):
    ...         self.x, self.y = x, y
    >>> constructor_call(Point(3)), constructor_call(Point(3, y=4))
    ('Point(x=3)', 'Point(x=3, y=4)')
    """
    given: dict[str, object] = {}
    for kind in type(instance).__mro__:
        parameters = inspect.signature(kind).parameters
        for name, parameter in parameters.items():
            value = getattr(instance, attributes.get(name, name), None)
            if parameter.kind is not parameter.VAR_KEYWORD and value != parameter.default:
                given.setdefault(name, str(value) if isinstance(value, Path) else value)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return f"{type(instance).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
