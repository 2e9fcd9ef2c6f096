"""What a run remembers of its data: their fingerprint, and where relative paths start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.data.base import Data
from atoll.data.fingerprint import Fingerprint
from atoll.errors import CheckpointError, InputError
from atoll.files import write_atomic

LOCATIONS = ("root", "path", "extra", "boxes")
"""Arguments of data sets that say where files are.  They may change during the life of a run; the data may not."""


@dataclass(frozen=True)
class DataRecord:
    """The file ``data.json`` of a run.

    Args:
        fingerprint: of the data that the run is trained and tested on.
        folder: where the run was started; relative paths in its recipe start there.
        validation: number of validation points.
        classes: names of the classes, so that predictions do not need the data.
    """

    fingerprint: Fingerprint
    folder: Path
    validation: int
    classes: tuple[str, ...] = ()

    @staticmethod
    def of(data: Data, known: DataRecord | None = None) -> DataRecord:
        """Inspect data; files that have not been touched since the ``known`` record are not read again."""
        fingerprint = data.inspect(known.fingerprint if known else None)
        return DataRecord(fingerprint, Path.cwd(), len(data.validation), data.classes)

    def save(self, run: Path) -> None:
        tree = {"folder": str(self.folder), "validation": self.validation, "classes": self.classes}
        tree |= self.fingerprint.to_json()
        write_atomic(run / "data.json", json.dumps(tree).encode())

    @staticmethod
    def load(run: Path) -> DataRecord | None:
        """The record of a run; None if it was trained by a version that kept none."""
        path = run / "data.json"
        if not path.exists():
            return None
        try:
            tree = json.loads(path.read_text())
            classes = tuple(map(str, tree.get("classes", ())))
            return DataRecord(Fingerprint.from_json(tree), Path(tree["folder"]), int(tree["validation"]), classes)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}: damaged; delete it to go on without a check of the data") from None


def locate(tree: Any, folder: Path) -> Any:
    """The data section of a recipe with relative paths from ``folder``, if the files are still there.

    Otherwise paths stay relative to the current folder, so that a project may be moved as a whole.
    """
    return _map_arguments(tree, lambda key, value: str(folder / value) if (folder / value).exists() else value)


def relocate(tree: Any, data: Mapping[str, Path | str]) -> Any:
    """The data section of a recipe with other locations (``{"root": "photos"}``), also of a data set inside another."""
    for key, place in data.items():
        if key not in LOCATIONS:
            raise InputError(f"data: expected a location ({', '.join(LOCATIONS)}), got {key!r}; a run keeps the rest")
        if not str(place):
            raise InputError(f"data.{key}: expected a path, got an empty string")
        changed = _map_arguments(tree, lambda name, old, key=key, place=place: str(place) if name == key else old)
        if changed == tree:  # it is not in use yet: the default, such as the cache folder
            changed = {**tree, "init_args": {**(tree.get("init_args") or {}), key: str(place)}}
        tree = changed
    return tree


def without_locations(tree: Any) -> Any:
    """The data section of a recipe without the locations, for comparisons."""
    return _map_arguments(tree, lambda key, value: None)


def _map_arguments(tree: Any, change: Any) -> Any:
    """A data section with ``change(key, value)`` for all locations in it, also those of data sets inside others."""
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
