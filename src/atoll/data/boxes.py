"""Bounding boxes of objects: x1, y1, x2, y2 in pixels of the fetched image, inclusive.

A split with annotations has an attribute ``boxes``, int64 ``(len, 4)``, with -1, -1, -1, -1 for images without a box.
Augmentation is applied later and may move an object out of its box, so use boxes only for validation and test splits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import DataError, InputError

UNKNOWN = (-1, -1, -1, -1)


def boxes_of(split: object) -> Tensor | None:
    """Return the boxes of a split, or None if it has none.

    >>> from atoll.data import Digits
    >>> boxes_of(Digits().test) is None
    True
    """
    boxes: Tensor | None = getattr(split, "boxes", None)
    return boxes


def known(boxes: Tensor) -> Tensor:
    """Return which images have a box.

    >>> known(torch.tensor([[0, 0, 3, 3], UNKNOWN]))
    tensor([ True, False])
    """
    return (boxes >= 0).all(1)


def check_boxes(boxes: Tensor, count: int, shape: tuple[int, ...], source: str) -> None:
    """Raise an InputError unless each of ``count`` images of ``shape`` (..., H, W) has a valid box, or -1s."""
    if boxes.dtype != torch.int64 or boxes.shape != (count, 4):
        raise InputError(
            f"{source}: expected int64 x1, y1, x2, y2 for each of {count} images,"
            f" got {boxes.dtype} {tuple(boxes.shape)}"
        )
    height, width = shape[-2:]
    low, high = boxes[:, :2], boxes[:, 2:]
    inside = ((low >= 0) & (low <= high) & (high < boxes.new_tensor([width, height]))).all(1)
    wrong = ~inside & (boxes != boxes.new_tensor(UNKNOWN)).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"{source}: expected 0 <= x1 <= x2 < {width} and 0 <= y1 <= y2 < {height} (or -1, -1, -1, -1),"
            f" got {boxes[row].tolist()} for image {row}"
        )


def as_boxes(array: NDArray[Any], count: int, shape: tuple[int, ...], source: str) -> Tensor:
    """Convert untrusted integers ``(count, 4)`` to a checked int64 tensor.

    >>> as_boxes(np.array([[1, 2, 5, 6]], np.uint8), 1, (3, 8, 8), "box_test")
    tensor([[1, 2, 5, 6]])
    """
    if array.dtype.kind not in "iu":
        raise DataError(f"{source}: expected integers x1, y1, x2, y2, got {array.dtype}")
    boxes = torch.from_numpy(array.astype(np.int64))
    try:
        check_boxes(boxes, count, shape, source)
    except InputError as error:
        raise DataError(str(error)) from None
    return boxes


def mask(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return which pixels are inside each box, bool ``(boxes, height, width)``; none for images without a box.

    >>> mask(torch.tensor([[1, 0, 2, 0]]), 2, 3).int()
    tensor([[[0, 1, 1],
             [0, 0, 0]]], dtype=torch.int32)
    """
    x1, y1, x2, y2 = boxes.unbind(1)
    return rectangles(y1, x1, y2 + 1, x2 + 1, height, width)


def rectangles(top: Tensor, left: Tensor, bottom: Tensor, right: Tensor, height: int, width: int) -> Tensor:
    """Return which pixels are inside, bool ``(batch, height, width)``; bottom and right are exclusive."""
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    rows = (top[:, None] <= row) & (row < bottom[:, None])
    columns = (left[:, None] <= column) & (column < right[:, None])
    return rows[:, :, None] & columns[:, None, :]
