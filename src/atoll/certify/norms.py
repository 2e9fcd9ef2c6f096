"""Upper bounds of the norms of single linear maps: proofs, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.certify.banded import Banded
from atoll.errors import InputError

BUDGET = 1.5e11  # operations that one proof may take by default: seconds on two cores

Pair = tuple[int, int]


@dataclass(frozen=True)
class Norm:
    """An upper bound and how it was proven: ``exact`` (to a thousandth), ``strip`` or ``torus``; see ``conv_norm``."""

    value: float
    how: str


def dense_norm(weight: Tensor) -> Norm:
    """The largest singular value of a matrix.

    >>> round(dense_norm(torch.diag(torch.tensor([3.0, 4.0]))).value, 2)
    4.0
    """
    return Norm(Banded(_exact(weight)[None, None]).norm(), "exact")


def conv_norm(
    weight: Tensor, size: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0), *, budget: float = BUDGET
) -> Norm:
    """The norm of a convolution with zero padding, for inputs of a known size; the tightest bound within the budget.

    ``exact``: the operator itself, which is block-banded once it is cut into rows of pixels.  Where kernels do not
    overlap it is the norm of the kernel as one matrix.

    ``strip``: the map is a part of the same convolution on a strip that is closed to a ring from left to right, with as
    much room that nothing meets itself around the ring; that one falls into one narrow banded map for each frequency
    of the ring, and its norm is at least that of its part.

    ``torus``: closed in both directions, one small matrix for each frequency.  Still never above the norm on the
    infinite grid, which takes the supremum over all frequencies, not only over those of this torus.

    Args:
        weight: ``(out, in, height, width)``.
        size: height and width of the input.
        stride: in both directions.
        padding: in both directions.
        budget: operations a proof may take; the torus is the last resort whatever it takes.

    >>> conv_norm(torch.ones(1, 1, 1, 2), (1, 100)).value < 2  # 2 cos(pi / 101)
    True
    """
    weight = _exact(weight)
    kernel = weight.shape[2:]
    if all(k <= s for k, s in zip(kernel, stride, strict=True)):
        return dense_norm(weight.flatten(1))
    out = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, padding, kernel, stride, strict=True)]
    if min(out) < 1:
        raise InputError(f"conv: expected an input at least as large as the kernel, got {size} for {tuple(kernel)}")
    rows = {"rows_in": size[0], "rows_out": out[0], "stride": stride[0], "padding": padding[0]}

    whole = (size[1], out[1], stride[1], padding[1])
    # The parts are not made before it is clear that they are wanted: they may be large.
    shape = (1, kernel[0], out[1] * weight.shape[0], size[1] * weight.shape[1])
    if Banded(torch.empty(shape, dtype=torch.float64, device="meta"), **rows).flops <= budget:
        return Norm(Banded(_columns(weight, *whole), **rows).norm(), "exact")
    ring, taps = _ring(weight, 3, *whole)
    strip = Banded(ring.permute(4, 2, 0, 1, 3).flatten(3), **rows, terms=taps)
    if strip.flops <= budget:
        return Norm(strip.norm(), "strip")
    # Both directions: the columns' frequencies become the batch, then the rows'.
    torus, more = _ring(weight, 2, size[0], out[0], stride[0], padding[0])  # out, in, phase, width, frequency
    both, _ = _ring(torus, 2, *whole)  # out, in, phase, frequency, phase, frequency
    small = both.permute(3, 5, 0, 1, 2, 4).flatten(0, 1).flatten(2)
    return Norm(Banded(small[:, None], terms=taps * more).norm(), "torus")


def _exact(weight: Tensor) -> Tensor:
    """The weights in float64, which holds every float32 as it is."""
    weight = weight.detach().double()
    if not weight.isfinite().all():
        raise InputError("weights: expected finite numbers, got NaN or infinity")
    return weight


def _columns(weight: Tensor, size: int, out: int, stride: int, padding: int) -> Tensor:
    """The rows of a kernel as matrices from rows of the input to rows of the output, ``(1, taps, out, in)``."""
    channels_out, channels_in, height, width = weight.shape
    parts = weight.new_zeros(height, out, channels_out, size, channels_in)
    for i in range(out):
        for tap in range(width):
            place = stride * i + tap - padding
            if 0 <= place < size:
                parts[:, i, :, place] = weight[:, :, :, tap].permute(2, 0, 1)
    return parts.flatten(3, 4).flatten(1, 2)[None]


def _ring(weight: Tensor, dim: int, size: int, out: int, stride: int, padding: int) -> tuple[Tensor, int]:
    r"""A convolution along one dimension as matrices for the frequencies of a ring, and the terms in each.

    A stride s is a stride 1 on s interleaved inputs (phases): input :math:`s J + a - p`, tap :math:`s q + a`, output j
    meet where :math:`J = j + q`.  Inputs are non-zero for J from ``first`` to ``last``; on a ring of m places j + q and
    J may meet only if they are equal, so m is larger than any difference between the two.  The map is then a part of
    the circulant, and not above its norm.

    Returns the kernel with that dimension moved to the end and turned into (phase, frequency); of the frequencies of
    real weights only those that are not each other's complex conjugates.
    """
    taps = math.ceil(weight.shape[dim] / stride)
    first, last = padding // stride, (size - 1 + padding) // stride
    m = max(last, out + taps - 2 - first) + 1
    w = weight.movedim(dim, -1)
    w = torch.nn.functional.pad(w, (0, taps * stride - w.shape[-1]))
    w = w.reshape(*w.shape[:-1], taps, stride).mT  # ..., phase, q
    # Angles are reduced in integers, so that sine and cosine are right to the last bits.
    count = m if weight.is_complex() else m // 2 + 1
    turns = torch.outer(torch.arange(taps), torch.arange(count)) % m
    angle = (2 * math.pi / m) * turns.double()
    return w.to(torch.complex128) @ torch.complex(angle.cos(), angle.sin()), taps
