"""Images listed in a CSV file of paths and labels."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from atoll.data.base import DATA, Splits
from atoll.data.fingerprint import first_few
from atoll.data.folder import FolderSplit, ImageFiles, choose_rows
from atoll.errors import DataError, InputError

_HEADER = "a header with the columns path and label, separated by commas, and optionally split"
_SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}
_LONGEST = 1 << 20  # bytes of a line


class Row(NamedTuple):
    """A row of a CSV file: path and label as written, split (empty if there is no such column), and line number."""

    path: str
    label: str
    split: str
    line: int


@DATA.register()
class ImageCsv(ImageFiles):
    """Images listed in a CSV file with the columns ``path``, ``label`` and optionally ``split``.

    The first line names the columns; other columns are ignored.  Relative paths start at the folder of the CSV file.
    Each label is a class.  Classes are in alphabetical order, or in numerical order if all labels are whole numbers.

    ``split`` is ``train``, ``val`` or ``test``.  Images of ``val`` are the validation set if there are also images of
    ``test``; then the argument ``validation`` is not used.  Otherwise they are the test set.  Without the column, a
    share ``test_share`` of each class becomes the test set.  The paths determine which, as in ``ImageFolder``.

    Images are converted to RGB, the shorter side is resized to ``resize``, and the center square of ``size`` pixels is
    cropped.

    Args:
        path: the CSV file, in UTF-8.
        resize: length of the shorter side after resizing.
        size: side of the center crop.
        test_share: share of each class in the test set if there is no column ``split``.
        options: options of all data sets.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in range(4):
    ...         Image.new("RGB", (12, 10)).save(Path(folder, f"{number}.png"))
    ...     lines = ["path,label,split", "0.png,cat,train", "1.png,dog,train", "2.png,cat,test", "3.png,dog,test"]
    ...     _ = Path(folder, "photos.csv").write_text(chr(10).join(lines))
    ...     data = ImageCsv(path=Path(folder, "photos.csv"), resize=8, size=8, validation=0)
    ...     data.classes, data.shape, len(data.train), len(data.test)
    (('cat', 'dog'), (3, 8, 8), 2, 2)
    """

    def __init__(
        self, *, path: Path | str, resize: int = 256, size: int = 224, test_share: float = 0.2, **options: Any
    ) -> None:
        super().__init__(resize=resize, size=size, test_share=test_share, **options)
        if path == "":
            raise InputError("path: expected a file, got an empty string")
        self.path = Path(path).expanduser()

    @property
    def _source(self) -> str:
        return str(self.path)

    @cached_property
    def _content(self) -> list[Row]:
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; set the path with --data.path FILE")
        return read_rows(self.path)

    @property
    def _is_divided(self) -> bool:
        """Whether the file says which images are the test set."""
        return bool(self._content[0].split)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        labels = {row.label for row in self._content}
        numbers = all(map(str.isdecimal, labels))
        return tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._is_divided else (self._split_note(f"{self.path} has no column split"),)

    @cached_property
    def _parts(self) -> dict[str, list[Row]]:
        """The rows of the training, validation and test set; the validation set is empty unless it is listed."""
        parts = self._listed() if self._is_divided else self._drawn()
        if not parts["test"]:
            parts["val"], parts["test"] = [], parts["val"]
        for name, names in (("train", "train"), ("test", "val or test")):
            if not parts[name]:
                raise DataError(f"{self.path}: expected images of split {names}, got none")
        return parts

    def _listed(self) -> dict[str, list[Row]]:
        parts: dict[str, list[Row]] = {"train": [], "val": [], "test": []}
        for row in self._content:
            parts[row.split].append(row)
        return parts

    def _drawn(self) -> dict[str, list[Row]]:
        """Divide the rows of each class."""
        classes: dict[str, list[Row]] = defaultdict(list)
        for row in self._content:
            classes[row.label].append(row)
        parts: dict[str, list[Row]] = {"train": [], "val": [], "test": []}
        for name in self.classes:
            rows = classes[name]
            if len(rows) < 2:
                raise DataError(
                    f"{self.path}, line {rows[0].line}: expected at least 2 images of each class, got 1 of {name}"
                )
            test = set(choose_rows([row.path for row in rows], self.test_share))
            for number, row in enumerate(rows):
                parts["test" if number in test else "train"].append(row)
        return parts

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        train, validation = len(self._parts["train"]), len(self._parts["val"])
        if not validation:
            return super()._rows
        return torch.arange(train), torch.arange(train, train + validation)

    def load(self) -> Splits:
        return Splits(self._split([*self._parts["train"], *self._parts["val"]]), self._split(self._parts["test"]))

    def _split(self, rows: Sequence[Row]) -> FolderSplit:
        number_of = {name: number for number, name in enumerate(self.classes)}
        labels = torch.tensor([number_of[row.label] for row in rows])
        folder, lines = self.path.parent, tuple(row.line for row in rows)
        files = tuple(os.path.join(folder, row.path) for row in rows)
        return FolderSplit(files, labels, self.resize, self.size, root=folder, lines=lines)


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file of paths and labels; raises a DataError with the line number of the first fault."""
    with path.open("rb") as file:
        reader = csv.reader(_lines(path, file), strict=True)
        try:
            places = _columns(path, next(reader, []))
            rows = [_row(path, line, cells, places) for line, cells in _records(reader)]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None
    if not rows:
        raise DataError(f"{path}: expected images, got only a header")
    return rows


def _lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """Decode a file line by line, so that faults have a line number."""
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST + 1), b""), 1):
        if len(line) > _LONGEST:
            raise DataError(f"{path}, line {number}: expected at most {_LONGEST:,} bytes, got more")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: expected UTF-8 text") from None
        if "\0" in text:
            raise DataError(f"{path}, line {number}: expected text, got a NUL character")
        yield text


def _columns(path: Path, header: Sequence[str]) -> tuple[int, int, int | None, int]:
    """The places of path, label and split, and the number of columns."""
    names = [name.strip().lower() for name in header]
    if any(names.count(name) != 1 for name in ("path", "label")) or names.count("split") > 1:
        got = repr(first_few(header, 5)) if header else "an empty line"
        raise DataError(f"{path}, line 1: expected {_HEADER}; got {got}")
    return names.index("path"), names.index("label"), names.index("split") if "split" in names else None, len(names)


def _records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, and the lines at which they start."""
    line = reader.line_num + 1
    for cells in reader:
        if cells:
            yield line, cells
        line = reader.line_num + 1


def _row(path: Path, line: int, cells: Sequence[str], places: tuple[int, int, int | None, int]) -> Row:
    image, label, part, count = places
    if len(cells) != count:
        hint = "; put values that contain commas in quotes" if len(cells) > count else ""
        raise DataError(f"{path}, line {line}: expected {count} columns, got {len(cells)}{hint}")
    values = cells[image].strip(), cells[label].strip()
    if not all(values):
        raise DataError(f"{path}, line {line}: expected a path and a label, got an empty cell")
    if part is None:
        return Row(*values, "", line)
    split = _SPLITS.get(cells[part].strip().lower())
    if split is None:
        raise DataError(f"{path}, line {line}: expected split train, val or test, got {cells[part].strip()!r}")
    return Row(*values, split, line)
