"""The data record of a run: the fingerprint of its data, and the base folder of relative paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.data.base import Data
from atoll.data.fingerprint import Fingerprint
from atoll.errors import CheckpointError, DamagedError, InputError
from atoll.files import read_record, write_record

LOCATIONS = ("root", "path", "extra", "boxes")
"""Arguments of data sets that are locations of files.  A run may change them, but not the data."""


@dataclass(frozen=True)
class DataRecord:
    """The file ``data.json`` of a run.

    Args:
        fingerprint: fingerprint of the training and test data.
        folder: folder in which the run was started, the base of relative paths in its recipe.
        validation: number of validation points.
        classes: names of the classes, so that predictions do not need the data.
    """

    fingerprint: Fingerprint
    folder: Path
    validation: int
    classes: tuple[str, ...] = ()

    @staticmethod
    def of(data: Data, known: DataRecord | None = None) -> DataRecord:
        """Inspect data; files that have not changed since the ``known`` record are not read again."""
        fingerprint = data.inspect(known.fingerprint if known else None)
        return DataRecord(fingerprint, Path.cwd(), len(data.validation), data.classes)

    def save(self, run: Path) -> None:
        tree = {"folder": str(self.folder), "validation": self.validation, "classes": self.classes}
        tree |= self.fingerprint.to_json()
        write_record(run / "data.json", "a data set", tree)

    @staticmethod
    def load(run: Path) -> DataRecord | None:
        """Load the record of a run; returns None if it was trained by a version without records."""
        path = run / "data.json"
        try:
            tree = read_record(path, "a data set")
            classes = tuple(map(str, tree.get("classes", ())))
            return DataRecord(Fingerprint.from_json(tree), Path(tree["folder"]), int(tree["validation"]), classes)
        except FileNotFoundError:
            return None
        except (DamagedError, ValueError, TypeError, KeyError, AttributeError):
            raise CheckpointError(f"{path} is damaged; delete it to continue without checking the data") from None


def locate(tree: Any, folder: Path) -> Any:
    """Make paths in the data section of a recipe relative to ``folder``, if the files still exist there.

    Other paths stay relative to the current folder, so that a whole project can be moved.
    """
    return _map_arguments(tree, lambda key, value: str(folder / value) if (folder / value).exists() else value)


def relocate(tree: Any, data: Mapping[str, Path | str]) -> Any:
    """Change locations in the data section of a recipe (``{"root": "photos"}``), also of nested data sets."""
    for key, place in data.items():
        if key not in LOCATIONS:
            raise InputError(f"data: expected a location ({', '.join(LOCATIONS)}), got {key!r}")
        if not str(place):
            raise InputError(f"data.{key}: expected a path, got an empty string")
        changed = _map_arguments(tree, lambda name, old, key=key, place=place: str(place) if name == key else old)
        if changed == tree:  # the argument is not set yet, so it has its default, such as the cache folder
            changed = {**tree, "init_args": {**(tree.get("init_args") or {}), key: str(place)}}
        tree = changed
    return tree


def without_locations(tree: Any) -> Any:
    """Remove locations from the data section of a recipe, for comparisons."""
    return _map_arguments(tree, lambda key, value: None)


def _map_arguments(tree: Any, change: Any) -> Any:
    """Apply ``change(key, value)`` to all locations in a data section, including those of nested data sets."""
    if not isinstance(tree, dict):
        return tree
    arguments = tree.get("init_args")
    if not isinstance(arguments, dict):
        return tree
    changed = {
        key: change(key, value) if key in LOCATIONS and isinstance(value, str) else _map_arguments(value, change)
        for key, value in arguments.items()
    }
    return {**tree, "init_args": changed}
