"""Mixup and CutMix, which combine pairs of images and their labels.

These are pure functions: the caller chooses the pairs and the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.data.boxes import rectangles
from atoll.errors import InputError
from atoll.threat import per_point


def mixup(x: Tensor, y_onehot: Tensor, permutation: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    r"""Return convex combinations :math:`w x_i + (1 - w) x_{\pi(i)}` of images and of labels.

    H. Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018).

    Args:
        x: images (or any inputs), ``(batch, ...)``.
        y_onehot: class probabilities, ``(batch, classes)``.
        permutation: the partner of each point, ``(batch,)``.
        weight: weight of the point itself, in [0, 1]; one number, or one per point.

    >>> x, y = mixup(torch.tensor([[0.0], [1.0]]), torch.eye(2), torch.tensor([1, 0]), 0.75)
    >>> x.flatten().tolist(), y.tolist()
    ([0.25, 0.75], [[0.75, 0.25], [0.25, 0.75]])
    """
    _check(x, y_onehot, permutation)
    w = torch.as_tensor(weight, dtype=x.dtype, device=x.device).expand(len(x))
    if not ((w >= 0) & (w <= 1)).all():
        raise InputError("weight: expected numbers in [0, 1]")
    # x + (1 - w)(partner - x) would not return x exactly when w is 1.
    mixed = per_point(w, x) * x + per_point(1 - w, x) * x[permutation]
    v = w.to(y_onehot.dtype)[:, None]
    return mixed, v * y_onehot + (1 - v) * y_onehot[permutation]


def cutmix(x: Tensor, y_onehot: Tensor, permutation: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Paste a box of the partner's image and mix the labels in proportion to the covered area.

    S. Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features"
    (2019).

    Args:
        x: images, ``(batch, C, H, W)``.
        y_onehot: class probabilities, ``(batch, classes)``.
        permutation: the partner of each image, ``(batch,)``.
        boxes: top, left, bottom, right of each box, ``(batch, 4)``, the last two exclusive; see ``cutmix_boxes``.

    >>> x = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    >>> mixed, y = cutmix(x, torch.eye(2), torch.tensor([1, 0]), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]))
    >>> mixed[0].tolist(), y.tolist()
    ([[[1.0, 0.0], [0.0, 0.0]]], [[0.75, 0.25], [0.0, 1.0]])
    """
    _check(x, y_onehot, permutation)
    if x.dim() != 4 or boxes.shape != (len(x), 4):
        raise InputError(
            f"cutmix: expected images (batch, C, H, W) and boxes (batch, 4), got {tuple(x.shape)}"
            f" and {tuple(boxes.shape)}"
        )
    height, width = x.shape[2:]
    top, left, bottom, right = boxes.unbind(1)
    inside = rectangles(top, left, bottom, right, height, width)
    mixed = torch.where(inside[:, None], x[permutation], x)
    area = inside.sum((1, 2)).to(y_onehot.dtype)[:, None] / (height * width)
    return mixed, (1 - area) * y_onehot + area * y_onehot[permutation]


def cutmix_boxes(weight: Tensor, center: Tensor, height: int, width: int) -> Tensor:
    """Return boxes of area ``1 - weight`` around a center, clipped to the image, as in the paper.

    Args:
        weight: share of the image that is not covered, ``(batch,)``.
        center: relative vertical and horizontal position of the center, ``(batch, 2)``, in [0, 1).
        height: height of the images.
        width: width of the images.

    >>> cutmix_boxes(torch.tensor([0.75]), torch.tensor([[0.5, 0.0]]), 8, 8)
    tensor([[2, 0, 6, 2]])
    """
    size = torch.tensor([height, width], device=weight.device)
    middle = (center * size).long()
    half = ((1 - weight).clamp(0, 1).sqrt()[:, None] * size).long() // 2
    low, high = (middle - half).clamp_min(0), torch.minimum(middle + half, size)
    return torch.cat([low, high], dim=1)


def _check(x: Tensor, y_onehot: Tensor, permutation: Tensor) -> None:
    if y_onehot.dim() != 2 or not y_onehot.is_floating_point():
        raise InputError(
            f"y_onehot: expected float probabilities (batch, classes), got {y_onehot.dtype} {tuple(y_onehot.shape)}"
        )
    if not len(x) == len(y_onehot) == len(permutation):
        raise InputError(
            f"expected a label and a partner for each of {len(x)} inputs, got {len(y_onehot)} and {len(permutation)}"
        )
