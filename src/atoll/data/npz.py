"""Images from an ``.npz`` file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.boxes import as_boxes
from atoll.data.decode import as_images, as_labels, read_npz
from atoll.errors import DataError, InputError

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("names", "box_train", "box_test")


@DATA.register()
class Npz(Data):
    """Images from an ``.npz`` file with arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``, as in Keras.

    Images are NHW or NHWC, uint8 or floats in [0, 1]; labels start at 0.  The optional array ``names`` contains class
    names.  The optional arrays ``box_train`` and ``box_test`` contain bounding boxes: integers x1, y1, x2, y2 for each
    image, in pixels counted from 0, inclusive; four times -1 for images without a box.

    Args:
        path: the file.
        options: options of all data sets.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    ...     np.savez(Path(folder, "tiny.npz"), x_train=x, y_train=y, x_test=x, y_test=y, names=["a", "b"])
    ...     data = Npz(path=Path(folder, "tiny.npz"), validation=0)
    ...     data.classes, data.shape
    (('a', 'b'), (1, 8, 8))
    """

    def __init__(self, *, path: Path | str, **options: Any) -> None:
        super().__init__(**options)
        if path == "":
            raise InputError("path: expected a file, got an empty string")
        self.path = Path(path).expanduser()

    @cached_property
    def _content(self) -> tuple[Splits, tuple[str, ...]]:
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; set the path with --data.path FILE")
        arrays = read_npz(self.path, (*_ARRAYS, *_OPTIONAL))
        if missing := [name for name in _ARRAYS if name not in arrays]:
            raise DataError(f"{self.path}: expected arrays {', '.join(_ARRAYS)}; missing: {', '.join(missing)}")
        parts = []
        for part in ("train", "test"):
            images = as_images(arrays[f"x_{part}"], f"{self.path}, x_{part}")
            labels = as_labels(arrays[f"y_{part}"], len(images), f"{self.path}, y_{part}")
            boxes, source = arrays.get(f"box_{part}"), f"{self.path}, box_{part}"
            checked = None if boxes is None else as_boxes(boxes, len(images), images.shape, source)
            parts.append(MemorySplit(images, labels, checked))
        train, test = parts
        if (train.images.shape[1:], train.images.dtype) != (test.images.shape[1:], test.images.dtype):
            raise DataError(
                f"{self.path}: expected the same shape and type in x_train and x_test, got {train.images.dtype}"
                f" {tuple(train.images.shape[1:])} and {test.images.dtype} {tuple(test.images.shape[1:])}"
            )
        if (names := arrays.get("names")) is not None:
            if names.ndim != 1 or names.dtype.kind != "U":
                raise DataError(f"{self.path}, names: expected one string per class, got {names.dtype} {names.shape}")
            return Splits(train, test), tuple(str(name) for name in names)
        highest = int(train.labels.max())
        if highest >= len(train):
            raise DataError(f"{self.path}, y_train: expected labels 0, 1, ... without large gaps, got {highest}")
        return Splits(train, test), tuple(str(label) for label in range(highest + 1))

    @property
    def classes(self) -> tuple[str, ...]:
        return self._content[1]

    def load(self) -> Splits:
        return self._content[0]
