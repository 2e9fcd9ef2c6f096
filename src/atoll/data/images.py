"""Image files that are not part of a data set, decoded like its images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from atoll.data.base import Data
from atoll.data.decode import image_files
from atoll.data.fingerprint import MAX_FAULTS, first_few
from atoll.errors import DataError


def find_images(paths: Iterable[Path | str]) -> tuple[list[Path], list[str]]:
    """Image files, and those in folders; and what is wrong with other paths."""
    files: list[Path] = []
    faults: list[str] = []
    for path in map(Path, paths):
        inside = image_files(path) if path.is_dir() else [path]
        files += [file for file in inside if file.is_file()]  # reading a pipe would never end
        if path.is_dir() and not inside:
            faults.append(f"{path}: expected images in this folder, got none")
        faults += [
            f"{file}: {'not a file' if file.exists() else 'no such file'}" for file in inside if not file.is_file()
        ]
    return files, faults


def decode_images(
    data: Data, files: Sequence[Path], shape: tuple[int, ...], *, fit: bool = False
) -> tuple[Tensor, list[str]]:
    """Image files as points of a data set, and why some of them cannot be read; see ``Data.read_image``."""

    def read(file: Path) -> Tensor | str:
        try:
            return data.read_image(file, shape, fit=fit)
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:  # Pillow decodes without the interpreter lock
        rows = list(pool.map(read, files))
    images = [row for row in rows if not isinstance(row, str)]
    empty = torch.empty(0, *shape, dtype=torch.uint8)
    return torch.stack(images) if images else empty, [row for row in rows if isinstance(row, str)]


def check_readable(faults: Sequence[str], total: int) -> None:
    """Refuse image files that cannot be read, all of them in one message."""
    if faults:
        reasons = first_few(faults, MAX_FAULTS, "\n  ")
        raise DataError(f"{len(faults):,} of {total:,} images cannot be read:\n  {reasons}")
