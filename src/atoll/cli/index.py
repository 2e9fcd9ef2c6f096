"""What commands list and complete without importing PyTorch: components, recipes, flags and constants.

The entries come from the classes themselves.  Importing these takes seconds, so a command stores all entries in the
user's cache folder and later commands read them there.  The file names what it depends on: Python, the installed
distributions, and size and time of every source file of the packages that register components.  If anything differs, or
the file is missing or damaged, the entries are computed again.  A process that has already imported PyTorch does not
use the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.errors import DamagedError
from atoll.files import read_record, write_record
from atoll.import_path import may_hold_foreign_code
from atoll.registry import REGISTRIES, installed_entry_points, registry

RECORD = "an index of components"
SETTINGS = ("attack", "certify", "curvature", "explain", "health")
CONSTANTS = (
    "atoll.audit.engine.GATES",
    "atoll.audit.plan.STEPS",
    "atoll.certify.norms.BUDGET",
    "atoll.runs.data_record.LOCATIONS",
    "atoll.studies.base.SCALES",
)
SOURCES = (".py", ".yaml")
_NOT_WATCHED = sys.stdlib_module_names | {"torch"}  # distributions have versions


def look_up(section: str, key: str) -> Any:
    """Return an entry of the index as plain data.

    Args:
        section: ``members`` (of a kind), ``settings`` (of a measurement), ``constants`` or ``tables``.
        key: the kind, the measurement, the dotted path of the constant, or the name of the table.

    >>> look_up("members", "loss")["TRADES"]["parameters"]["lambda_t"]
    {'type': 'a number', 'default': '6.0'}
    """
    record = _stored()
    if record is None:
        return SECTIONS[section][1](key)
    return record["entries"][section][key]


def remember(name: str, states: Mapping[str, str], compute: Callable[[str], Any]) -> dict[str, Any]:
    """Return what a function computes for some keys, which is stored until the state of a key changes.

    Args:
        name: identifies the function and its keys.
        states: a digest of what the function reads, by key.
        compute: returns plain data; it may import PyTorch.
    """
    record = _stored()
    if record is None or not record["version"]:
        return {key: compute(key) for key in states}
    path, known = cache_path(name), {}
    with contextlib.suppress(OSError, DamagedError, KeyError, TypeError):
        stored = read_record(path, RECORD)
        if stored["version"] == record["version"]:
            known = {key: value for key, (state, value) in stored["values"].items() if states.get(key) == state}
    if known.keys() != states.keys():
        known = {key: known[key] if key in known else compute(key) for key in states}
        with contextlib.suppress(OSError, DamagedError):
            values = {key: [states[key], value] for key, value in known.items()}
            write_record(path, RECORD, {"version": record["version"], "values": values})
    return {key: known[key] for key in states}


# --- the entries -----------------------------------------------------------------------------------------------------


def _members(kind: str) -> dict[str, Any]:
    """Class path, summary and parameters of every member of a kind, by name."""
    from atoll.config import parameters

    return {
        name: {
            "path": member.path,
            "summary": member.summary,
            "parameters": parameters(member.cls, member.arguments),
        }
        for name, member in registry(kind).members().items()
    }


def _settings(kind: str) -> list[dict[str, Any]]:
    """The flags of a measurement: one for each field of its settings."""
    from atoll.cli.flags import flags_of
    from atoll.measure import measurement

    return [dataclasses.asdict(flag) for flag in flags_of(measurement(kind).settings)]


def _constant(dotted: str) -> Any:
    """A number, or a list of names."""
    module, _, name = dotted.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    return list(value) if isinstance(value, Iterable) else value


def _recipes() -> dict[str, Any]:
    """Summary and variants of every recipe or grid."""
    from atoll.runs.recipe import recipes, variants

    return {name: {"summary": text, "variants": variants(name)} for name, text in recipes().items()}


def _keys() -> dict[str, list[str]]:
    """Keys of every recipe, or of the first variant of every grid."""
    from atoll.runs.recipe import read_recipe, recipe_keys, recipes, variants

    return {name: recipe_keys(read_recipe(variants(name)[0])) for name in recipes()}


def _suites() -> dict[str, str]:
    """Suites of attacks, with a summary."""
    from atoll.attacks.suites import SUITES

    return {name: (make.__doc__ or "").splitlines()[0] for name, make in SUITES.items()}


def _studies() -> dict[str, list[str]]:
    """Title and reference of every study."""
    studies: list[Any] = [member.cls for member in registry("study").members().values()]
    return {study.name: [study.title, study.reference] for study in studies}


def _kinds() -> dict[str, dict[str, str]]:
    """What every kind is called, in the singular and in the plural."""
    return {kind: {"kind": registry(kind).kind, "title": registry(kind).title} for kind in REGISTRIES}


_TABLES: dict[str, Callable[[], Any]] = {
    "recipes": _recipes,
    "keys": _keys,
    "suites": _suites,
    "studies": _studies,
    "kinds": _kinds,
}
SECTIONS: dict[str, tuple[Iterable[str], Callable[[str], Any]]] = {
    "members": (REGISTRIES, _members),
    "settings": (SETTINGS, _settings),
    "constants": (CONSTANTS, _constant),
    "tables": (_TABLES, lambda name: _TABLES[name]()),
}


def build() -> dict[str, Any]:
    """Compute all entries, which imports every component."""
    return {section: {key: compute(key) for key in keys} for section, (keys, compute) in SECTIONS.items()}


# --- the stored entries ----------------------------------------------------------------------------------------------


@functools.cache
def _stored() -> dict[str, Any] | None:
    """The record in the cache folder, computed and stored if necessary; None if it is of no use here."""
    if _is_live():
        return None
    path, began = cache_path("index"), time.time_ns()
    with contextlib.suppress(OSError, DamagedError, KeyError, TypeError):
        record: dict[str, Any] = read_record(path, RECORD)
        if record["version"] == fingerprint(record["sources"])[0] and record["entries"]:
            return record
    try:
        entries = build()
    except Exception:  # a package that cannot be imported must not break the help
        return None
    sources = _sources()
    version, newest = fingerprint(sources)
    if newest >= began:  # a file may have changed after its import, so nothing can be stored
        return {"version": "", "entries": entries}
    record = {"version": version, "sources": sources, "entries": entries}
    with contextlib.suppress(OSError, DamagedError):
        write_record(path, RECORD, record)
    return record


def _is_live() -> bool:
    """Whether the classes are imported; there may be more than those of a new process."""
    return "torch" in sys.modules


def cache_path(name: str) -> Path:
    """Where something is stored: one file per name and environment, next to downloaded data."""
    from platformdirs import user_cache_path

    digest = hashlib.sha256(os.fsencode(f"{sys.prefix} {__file__} {name}")).hexdigest()[:16]
    return user_cache_path("atoll", appauthor=False) / "index" / f"{digest}.json"


def fingerprint(sources: list[str]) -> tuple[str, int]:
    """Digest of Python, the installed distributions and the source files, and the time of the newest of these files."""
    folders = [os.path.realpath(folder) for folder in sys.path if not may_hold_foreign_code(folder)]
    files = list(_files(sources))
    installed = [entry for folder in folders for entry in _distributions(folder)]
    content = json.dumps([sys.version, sys.platform, folders, installed, files])
    return hashlib.sha256(content.encode()).hexdigest(), max((changed for _, _, changed in files), default=0)


def _distributions(folder: str) -> Iterator[tuple[str, int]]:
    """Names of the distributions in a folder, and when their entry points changed."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # an archive, or nothing
        names = []
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            changed = 0
            with contextlib.suppress(OSError):
                changed = os.stat(os.path.join(folder, name, "entry_points.txt")).st_mtime_ns
            yield os.path.join(folder, name), changed
        elif name.endswith((".pth", ".egg-link")):
            yield os.path.join(folder, name), os.stat(os.path.join(folder, name)).st_mtime_ns


def _files(sources: list[str]) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of every source file."""
    for source in sources:
        if os.path.isfile(source):
            yield _state(source)
        for place, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(SOURCES):
                    yield _state(os.path.join(place, name))


def _state(path: str) -> tuple[str, int, int]:
    try:
        state = os.stat(path)
    except OSError:  # a link to nothing
        return path, -1, 0
    return path, state.st_size, state.st_mtime_ns


def _sources() -> list[str]:
    """Files and folders of the packages that register components, and of those that define or derive them."""
    groups = ["atoll.recipes", *(f"atoll.{registry(kind).title}" for kind in REGISTRIES)]
    modules = {"atoll"} | {entry.module for group in groups for entry in installed_entry_points(group)}
    for kind in REGISTRIES:
        members = registry(kind).members().values()
        modules |= {base.__module__ for member in members for base in member.cls.__mro__}
    packages = {module.partition(".")[0] for module in modules} - _NOT_WATCHED
    specs = [spec for package in sorted(packages) if (spec := importlib.util.find_spec(package)) is not None]
    places = [list(spec.submodule_search_locations or [spec.origin or ""]) for spec in specs]
    return sorted(os.path.realpath(place) for group in places for place in group if place)
