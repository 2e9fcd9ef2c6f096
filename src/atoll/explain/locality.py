"""Locality: how much of an attribution lies on the object."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from atoll.data.boxes import check_boxes, known, mask
from atoll.errors import InputError
from atoll.stats import Estimate


@dataclass(frozen=True)
class Locality:
    """Precision, recall and F1 of each point; NaN if they are not defined."""

    precision: Tensor
    recall: Tensor
    f1: Tensor

    @property
    def means(self) -> dict[str, Estimate]:
        """Means over the points for which they are defined, with standard errors."""
        return {name: Estimate.mean_of(values) for name, values in vars(self).items()}

    @property
    def undefined(self) -> dict[str, int]:
        """Number of points for which they are not defined."""
        return {name: int(values.isnan().sum()) for name, values in vars(self).items()}


def locality(attributions: Tensor, boxes: Tensor, *, rho: float = 0.0) -> Locality:
    """Measure how well attributions agree with the bounding boxes of objects.

    Let A be the attribution of each pixel, summed over channels, A+ the same where it is positive and at least ``rho``
    (0 elsewhere), and B the pixels of the box (Z. Wang, "On the Feature Alignment of Deep Vision Models", definitions
    9 and 10 and equation 2.3)::

        precision = sum A+ B / sum A+        share of the positive attribution that is on the object
        recall    = sum A+ B / sum |A| B     share of the attribution on the object that is positive
        F1        = 2 sum A+ B / (sum A+ + sum |A| B), their harmonic mean

    A quotient 0 / 0 is NaN; for an attribution of zeros, all three are NaN.  The precision of a constant attribution is
    the share of the image that the box covers; the recall of an attribution with random signs is one half.

    Args:
        attributions: ``(N, C, H, W)`` or ``(N, H, W)``.
        boxes: int64 ``(N, 4)``: x1, y1, x2, y2, inclusive; filter images with ``usable`` first.
        rho: smallest attribution that counts as important.

    >>> import torch
    >>> maps = torch.tensor([[[3.0, 1.0], [0.0, -1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    >>> result = locality(maps, torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]]))  # the left half of each image
    >>> result.precision, result.recall, result.undefined["f1"]
    (tensor([0.7500,    nan], dtype=torch.float64), tensor([1., nan], dtype=torch.float64), 1)
    """
    if attributions.dim() not in (3, 4) or not attributions.is_floating_point():
        raise InputError(
            "attributions: expected floats of shape (N, C, H, W) or (N, H, W),"
            f" got {attributions.dtype} {tuple(attributions.shape)}"
        )
    if not attributions.isfinite().all():
        raise InputError("attributions: expected finite numbers, got NaN or infinity")
    if not 0 <= rho < math.inf:
        raise InputError(f"rho: expected a finite number >= 0, got {rho}")
    check_boxes(boxes, len(attributions), attributions.shape, "boxes")
    if not known(boxes).all():
        missing = int((~known(boxes)).sum())
        raise InputError(f"boxes: {missing} of {len(boxes)} images have no bounding box; filter them with `usable`")
    a = attributions.detach().double()
    a = a.sum(1) if a.dim() == 4 else a
    positive = a.clamp_min(0) * (a >= rho)
    inside = mask(boxes.to(a.device), *a.shape[1:])
    on_object, important, marked = (v.sum((1, 2)) for v in (positive * inside, positive, a.abs() * inside))
    return Locality(on_object / important, on_object / marked, 2 * on_object / (important + marked))


def usable(boxes: Tensor, shape: tuple[int, ...], most: float = 0.8) -> Tensor:
    """Return which images have a box that covers at most a share ``most`` of the image ``(..., H, W)``.

    >>> import torch
    >>> usable(torch.tensor([[0, 0, 3, 3], [0, 0, 7, 6], [-1, -1, -1, -1]]), (3, 8, 8))
    tensor([ True, False, False])
    """
    if not 0 < most <= 1:
        raise InputError(f"most: expected a share in (0, 1], got {most}")
    check_boxes(boxes, len(boxes), shape, "boxes")
    sides = boxes[:, 2:] - boxes[:, :2] + 1
    return known(boxes) & (sides.prod(1) <= most * shape[-2] * shape[-1])
