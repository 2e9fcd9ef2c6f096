"""Folders of runs, without opening them and without importing PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.errors import InputError
from atoll.files import json_digest


def run_folders(root: Path | str) -> list[Path]:
    """Return all folders with a recipe below a folder, in alphabetical order; the folder itself may be one."""
    folder = Path(root)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    return [path.parent for path in sorted(folder.rglob("recipe.yaml"))]


def folder_state(folder: Path) -> str:
    """Return a digest of names, sizes and times of everything in a folder; it changes if any of the files does."""
    entries: list[tuple[str | int, ...]] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        entries += [(os.path.join(place, name),) for name in folders]
        for path in (os.path.join(place, name) for name in sorted(names)):
            try:
                state = os.stat(path)
            except OSError:  # a link to nothing
                entries.append((path,))
            else:
                entries.append((path, state.st_size, state.st_mtime_ns))
    return json_digest(entries)
