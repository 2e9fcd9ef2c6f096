"""The 8x8 digits that come inside scikit-learn: real images without any download."""

from __future__ import annotations

import numpy as np
import torch

from atoll.data.base import DATA, Data, MemorySplit, Splits


@DATA.register()
class Digits(Data):
    """1797 handwritten digits of 8x8 pixels, a fifth of them for testing.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI repository.

    >>> data = Digits()
    >>> data.shape, data.num_classes, len(data.train), len(data.validation), len(data.test)
    ((1, 8, 8), 10, 1293, 144, 360)
    """

    classes = tuple("0123456789")

    def load(self) -> Splits:
        from sklearn.datasets import load_digits  # a second to import
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        # Pixels count from 0 to 16; as uint8 with 16 = 255 they are images like any other.
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        whole = MemorySplit(images, torch.from_numpy(labels.astype(np.int64)))
        # Nobody published a test set here, so this seed is one: it never changes.
        train, test = train_test_split(np.arange(len(whole)), test_size=0.2, random_state=0, stratify=labels)
        return Splits(whole.take(torch.from_numpy(np.sort(train))), whole.take(torch.from_numpy(np.sort(test))))
