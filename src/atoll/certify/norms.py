"""Proven upper bounds of the norms of single linear maps, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.certify.banded import BlockBandedOperator
from atoll.errors import InputError

BUDGET = 1.5e11  # default number of operations for one proof: seconds on two cores

Pair = tuple[int, int]


@dataclass(frozen=True)
class SpectralNormBound:
    """An upper bound and the method of its proof: ``exact`` (to a thousandth), ``strip`` or ``torus``."""

    value: float
    method: str


def dense_norm(weight: Tensor) -> SpectralNormBound:
    """Return a proven upper bound of the largest singular value of a matrix.

    >>> round(dense_norm(torch.diag(torch.tensor([3.0, 4.0]))).value, 2)
    4.0
    """
    return SpectralNormBound(BlockBandedOperator(_exact(weight)[None, None]).norm(), "exact")


def conv_norm(
    weight: Tensor, size: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0), *, budget: float = BUDGET
) -> SpectralNormBound:
    """Return the tightest bound within the budget of the norm of a convolution with zero padding, for an input size.

    If windows do not overlap, this is the norm of the kernel as one matrix.  Otherwise it is one of ``OPERATORS``: the
    convolution itself, or a larger map that contains it and is easier to decompose.

    Args:
        weight: ``(out, in, height, width)``.
        size: height and width of the input.
        stride: vertical and horizontal stride.
        padding: vertical and horizontal padding.
        budget: largest number of operations for a proof; the torus is the last resort at any cost.

    >>> conv_norm(torch.ones(1, 1, 1, 2), (1, 20)).value < 2  # 2 cos(pi / 21)
    True
    """
    weight = _exact(weight)
    if any(n + 2 * p < k for n, p, k in zip(size, padding, weight.shape[2:], strict=True)):
        raise InputError(f"size: expected at least the kernel size {tuple(weight.shape[2:])}, got {size}")
    if all(k <= s for k, s in zip(weight.shape[2:], stride, strict=True)):
        return dense_norm(weight.flatten(1))
    layout = Layout(size, stride, padding)
    empty = weight.to("meta")  # the exact operator of a wide layer would take gigabytes
    method = next((name for name, make in OPERATORS.items() if make(empty, layout).flops <= budget), "torus")
    return SpectralNormBound(OPERATORS[method](weight, layout).norm(), method)


@dataclass(frozen=True)
class Layout:
    """The geometry of a convolution: input size, stride and padding, vertically and horizontally."""

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)

    def out(self, kernel: int, axis: int) -> int:
        """Return the size of the output along an axis."""
        return (self.size[axis] + 2 * self.padding[axis] - kernel) // self.stride[axis] + 1

    def banded(self, parts: Tensor, terms: int = 1) -> BlockBandedOperator:
        """Return the map between rows with the given parts."""
        rows_out = self.out(parts.shape[1], 0)
        return BlockBandedOperator(parts, self.size[0], rows_out, self.stride[0], self.padding[0], terms)


def exact(weight: Tensor, layout: Layout) -> BlockBandedOperator:
    """Return the convolution itself, which is block-banded with respect to rows of pixels."""
    channels_out, channels_in, height, width = weight.shape
    size, out = layout.size[1], layout.out(width, 1)
    parts = weight.new_zeros(height, out, channels_out, size, channels_in)
    for i in range(out):
        for tap in range(width):
            place = layout.stride[1] * i + tap - layout.padding[1]
            if 0 <= place < size:
                parts[:, i, :, place] = weight[:, :, :, tap].permute(2, 0, 1)
    return layout.banded(parts.flatten(3, 4).flatten(1, 2)[None].contiguous())


def strip(weight: Tensor, layout: Layout) -> BlockBandedOperator:
    """Return the convolution on a strip whose left and right ends are joined, with one banded map per frequency.

    The ring is wide enough that no output reaches around it, so the convolution is a part of this map, and its norm is
    not larger.
    """
    ring, terms = _ring(weight, 1, layout)  # out, in, height, phase, frequency
    return layout.banded(ring.permute(4, 2, 0, 1, 3).flatten(3).contiguous(), terms)


def torus(weight: Tensor, layout: Layout) -> BlockBandedOperator:
    """Return the convolution on a torus, with one small matrix per frequency.

    Its norm is at most the norm on the infinite grid, which has all frequencies, not only those of this torus.
    """
    half, rows = _ring(weight, 0, layout)  # out, in, width, phase, frequency
    both, columns = _ring(half, 1, layout)  # out, in, phase, frequency, phase, frequency
    parts = both.permute(3, 5, 0, 1, 2, 4).flatten(0, 1).flatten(2)
    return BlockBandedOperator(parts[:, None].contiguous(), terms=rows * columns)


# From tightest to cheapest.
OPERATORS: dict[str, Callable[[Tensor, Layout], BlockBandedOperator]] = {"exact": exact, "strip": strip, "torus": torus}


def _exact(weight: Tensor) -> Tensor:
    """Convert weights to float64, which represents every float32 exactly."""
    weight = weight.detach().double()
    if not weight.isfinite().all():
        raise InputError("weights: expected finite numbers, got NaN or infinity")
    return weight


def _ring(weight: Tensor, axis: int, layout: Layout) -> tuple[Tensor, int]:
    r"""Return a convolution along one axis as matrices for the frequencies of a ring, and the number of terms in each.

    A stride s is a stride 1 on s interleaved inputs (phases): input :math:`s J + a - p`, tap :math:`s q + a` and output
    j are connected if :math:`J = j + q`.  Inputs are nonzero for J from ``first`` to ``last``.  On a ring of m places,
    j + q and J may coincide only if they are equal, so m is larger than any difference between them.  The map is then a
    part of the circulant, and its norm is not larger.

    The first remaining axis of the kernel is moved to the end and replaced by (phase, frequency).  For real weights,
    only one of two complex conjugate frequencies is returned.
    """
    dim = 2 if axis == 0 or weight.is_complex() else 3
    size, stride, padding = layout.size[axis], layout.stride[axis], layout.padding[axis]
    taps = math.ceil(weight.shape[dim] / stride)
    first, last = padding // stride, (size - 1 + padding) // stride
    m = max(last, layout.out(weight.shape[dim], axis) + taps - 2 - first) + 1
    w = weight.movedim(dim, -1)
    w = F.pad(w, (0, taps * stride - w.shape[-1]))
    w = w.reshape(*w.shape[:-1], taps, stride).mT  # ..., phase, q
    # Angles are reduced in integer arithmetic, so that sine and cosine are accurate.
    count = m if weight.is_complex() else m // 2 + 1
    turns = torch.outer(torch.arange(taps), torch.arange(count)) % m
    angle = (2 * math.pi / m) * turns.double()
    return w.to(torch.complex128) @ torch.complex(angle.cos(), angle.sin()).to(w.device), taps
