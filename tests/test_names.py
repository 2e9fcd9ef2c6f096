"""Names of the whole package: no two public classes share one, no `found` as an identifier, every member registered."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import atoll
import atoll_papers
from atoll.registry import REGISTRIES, registry

ROOTS = [Path(inspect.getfile(package)).parent for package in (atoll, atoll_papers)]
FILES = [path for root in ROOTS for path in sorted(root.rglob("*.py"))]

# Bases without the ABC machinery, and attacks that need more than a name.
UNREGISTERED = {
    *("PlainConvNet", "OneShot", "Transfer", "PrototypeAttack", "BoundaryAttribution", "Noise", "StoredClassifier"),
    *("AccuracyTable", "CostTable", "ParameterSweep"),
}


@cache
def modules() -> list[ModuleType]:
    names = [m.name for p in (atoll, atoll_papers) for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


def public_classes() -> Iterator[type]:
    for module in modules():
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and not name.startswith("_"):
                yield cls


def test_no_two_public_classes_have_one_name():
    homes = defaultdict(set)
    for cls in public_classes():
        homes[cls.__name__].add(cls.__module__)
    shared = {name: homes[name] for name in homes if len(homes[name]) > 1}
    assert not shared


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def test_identifiers_say_what_a_thing_is():
    assert not [path for path in FILES if "found" in map(str.lower, identifiers(ast.parse(path.read_text())))]


@pytest.mark.parametrize("kind", sorted(REGISTRIES.keys() - {"optimizer"}))
def test_every_concrete_class_of_a_kind_is_registered(kind):
    table = registry(kind)
    members = {member.cls for member in table.members().values()} | {table.base_class}
    concrete = {cls for cls in public_classes() if issubclass(cls, table.base_class) and not inspect.isabstract(cls)}
    assert not [cls for cls in concrete - members if cls.__name__ not in UNREGISTERED]
