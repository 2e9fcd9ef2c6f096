"""Street View House Numbers (SVHN), read from the ``.mat`` files of cropped digits."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from atoll.data.base import DATA, Data, MemorySplit, Splits
from atoll.data.decode import as_images, as_labels
from atoll.data.download import Remote
from atoll.errors import DataError


def _remote(name: str, md5: str) -> Remote:
    return Remote(name, md5, (f"http://ufldl.stanford.edu/housenumbers/{name}",))


@DATA.register()
class SVHN(Data):
    """Street View House Numbers: 73,257 training and 26,032 test images of digits, 32x32 pixels.

    Y. Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning" (2011).

    >>> SVHN(download=False).classes[:2]
    ('0', '1')
    """

    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    files: ClassVar[tuple[Remote, Remote]] = (
        _remote("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        _remote("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )

    def load(self) -> Splits:
        train, test = (self._read(self._obtain(remote)) for remote in self.files)
        return Splits(train, test)

    @staticmethod
    def _read(path: Path) -> MemorySplit:
        from scipy.io import loadmat  # slow to import

        try:
            content = loadmat(path, variable_names=["X", "y"])
            pixels, labels = np.asarray(content["X"]), np.asarray(content["y"])
        except Exception as error:  # loadmat raises many kinds of errors on corrupt files
            raise DataError(f"{path}: expected a .mat file with X and y, got: {error}") from None
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
            raise DataError(f"{path}: expected X of uint8 (32, 32, 3, N), got {pixels.dtype} {pixels.shape}")
        images = as_images(pixels.transpose(3, 0, 1, 2), f"{path}, X")
        digits = as_labels(labels, len(images), f"{path}, y")
        if digits.min() < 1 or digits.max() > 10:
            raise DataError(f"{path}: expected labels 1 to 10, got {digits.min()} to {digits.max()}")
        return MemorySplit(images, digits % 10)  # the label of digit 0 is 10
