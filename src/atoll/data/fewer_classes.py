"""A data set reduced to its first classes, to study the effect of the number of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.data.base import DATA, Data, Split, Splits, SubSplit
from atoll.errors import InputError, check_count


@DATA.register()
class FewerClasses(Data):
    """The first classes of another data set.

    Args:
        data: the data set; set limit, augment and extra on ``FewerClasses``, not here.
        count: number of classes, at least 2.
        options: options of all data sets.

    >>> from atoll.data import Digits
    >>> data = FewerClasses(data=Digits(), count=3)
    >>> data.classes, sorted(set(data.train.labels.tolist()))
    (('0', '1', '2'), [0, 1, 2])
    """

    def __init__(self, *, data: Data, count: int, **options: Any) -> None:
        super().__init__(**options)
        check_count(2, count=count)
        if data.limit is not None or data.augment or data.extra is not None:
            raise InputError("data: limit, augment and extra are options of FewerClasses; move them out of data")
        self.data, self.count, self.bounds, self.resize = data, count, data.bounds, data.resize

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.data.classes
        if len(names) < self.count:
            raise InputError(f"count: expected at most {len(names)}, the number of classes, got {self.count}")
        return names[: self.count]

    def read_image(self, file: Path, shape: tuple[int, ...], *, fit: bool = False) -> Tensor:
        return self.data.read_image(file, shape, fit=fit)

    def load(self) -> Splits:
        self.data.progress = self.progress
        published = self.data.load()
        return Splits(self._first(published.train), self._first(published.test))

    def _first(self, split: Split) -> SubSplit:
        return SubSplit(split, (split.labels < len(self.classes)).nonzero().squeeze(1))

    @property
    def notes(self) -> tuple[str, ...]:
        return self.data.notes
