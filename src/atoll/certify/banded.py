"""Norms of linear maps whose rows meet only their neighbours, proven by a Cholesky factorization.

A convolution, cut into rows of pixels, is one; a dense matrix is one with a single row, and what a convolution
becomes after a Fourier transform is a batch of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from atoll.rng import generator

UNIT = 2.0**-53  # unit roundoff of float64
FREQUENCIES = 8  # that are looked at closely for the largest singular value,
COARSE = 12  # after these Lanczos steps for all of them
CHUNK = 2**20  # numbers in the blocks of the frequencies that are factorised together


@dataclass(frozen=True)
class BlockBandedOperator:
    r"""Output row i is :math:`\sum_r P_r\, x_{s i + r - p}`, where rows outside the input are zero.

    Args:
        parts: the matrices :math:`P_r`, ``(frequencies, taps, outputs, inputs)``, float64 or complex128; the map is the
            direct sum over the frequencies.
        rows_in: rows of the input.
        rows_out: rows of the output.
        stride: s.
        padding: p.
        terms: how many numbers were added up to make one entry of the parts.
    """

    parts: Tensor
    rows_in: int = 1
    rows_out: int = 1
    stride: int = 1
    padding: int = 0
    terms: int = 1

    @property
    def taps(self) -> int:
        return self.parts.shape[1]

    @cached_property
    def output_side(self) -> bool:
        """Whether the Gram matrix is taken on the side of the outputs, A A^H, because that is cheaper."""
        return self._flops(output_side=True) < self._flops(output_side=False)

    @property
    def flops(self) -> float:
        """About how many real operations one attempt at a proof takes."""
        return self._flops(output_side=self.output_side)

    def norm(self, tolerance: float = 1e-3) -> float:
        r"""An upper bound t of the largest singular value, mostly within ``tolerance / 2`` of it.

        Whatever the computed factor R is, :math:`R^H R` is positive semi-definite; so with
        :math:`E = s I - G - R^H R`, :math:`G = A^H A`, the norm is at most :math:`\sqrt{s + \|E\|_F}`.  Cholesky gives
        an R with a tiny E if s is above the norm squared, and breaks down if it is not.  E is computed; its own
        rounding error, and that of G, is below :math:`4 u k\, n s`, with u the unit roundoff, n the order of G and k
        the number of terms in the longest sum, because :math:`|fl(X Y) - X Y| \le \gamma_k |X| |Y|` in any order of
        summation (Higham, 2002, section 3.5; 4 for complex numbers) and :math:`\|\, |X|^H |X|\, \|_F \le \|X\|_F^2`,
        which is the trace of :math:`X^H X`, at most n s for R and for A.
        """
        if not self.parts.any():
            return 0.0
        failed, proven, best = 0.0, math.inf, math.inf
        # A kernel may touch nothing but padding: then the map is zero, and anything above zero can be proven.
        least = 1e-18 * float(self.parts.abs().square().sum())
        square, step = max(least, self.largest() ** 2 * (1 + tolerance)), tolerance
        while True:
            defect = self._defect(square)
            if defect is None:
                failed = square
            else:
                proven, best = square, square + defect + self._rounding(square)
            if proven == math.inf:
                step *= 4
                square = failed * (1 + step)
            elif failed == 0 or proven <= failed * (1 + 4 * tolerance):
                return math.sqrt(best) * (1 + 4 * UNIT)
            else:  # the estimate was too low, and the steps up from it may have been too long
                square = (failed + proven) / 2

    def largest(self, steps: int = 60) -> float:
        """The largest singular value, from below, by Lanczos; only a proof makes it a bound.

        A few steps for every frequency tell which of them deserve more.
        """
        operator = self
        if len(self.parts) > FREQUENCIES:
            operator = replace(self, parts=self.parts[self._lanczos(COARSE).topk(FREQUENCIES).indices])
        return math.sqrt(max(0.0, float(operator._lanczos(steps).max())))

    def _lanczos(self, steps: int) -> Tensor:
        """An eigenvalue of the Gram matrix of each frequency, close to the largest.

        Lanczos vectors are not made orthogonal again: that costs copies of the largest value, which do no harm.
        """
        draw = generator("largest singular value")
        shape = (len(self.parts), self.rows_in, self.parts.shape[3])
        v = torch.randn(*shape, generator=draw, dtype=torch.float64).to(self.parts)
        v = v / _length(v)
        previous, length = torch.zeros_like(v), v.new_zeros(len(v), 1, 1)
        matrix = torch.zeros(len(v), steps, steps, dtype=torch.float64)
        for step in range(steps):
            w = self.transposed(self.apply(v)) - length * previous
            middle = (v.conj() * w).sum((1, 2), keepdim=True)
            w = w - middle * v
            length = _length(w)
            matrix[:, step, step] = middle.real[:, 0, 0]
            if step + 1 < steps:
                matrix[:, step, step + 1] = matrix[:, step + 1, step] = length.real[:, 0, 0]
            previous, v = v, w / length
        eigenvalues: Tensor = torch.linalg.eigvalsh(matrix)
        return eigenvalues[:, -1]

    def apply(self, x: Tensor) -> Tensor:
        """The map of ``(frequencies, rows_in, inputs)``."""
        y = x.new_zeros(len(x), self.rows_out, self.parts.shape[2])
        for tap in range(self.taps):
            source, target = self._meet(tap)
            y[:, target] += x[:, source] @ self.parts[:, tap].mT
        return y

    def transposed(self, y: Tensor) -> Tensor:
        """The adjoint map of ``(frequencies, rows_out, outputs)``."""
        x = y.new_zeros(len(y), self.rows_in, self.parts.shape[3])
        for tap in range(self.taps):
            source, target = self._meet(tap)
            x[:, source] += y[:, target].conj() @ self.parts[:, tap]
        return x.conj()

    def _meet(self, tap: int) -> tuple[slice, slice]:
        """The input and output rows that meet in a tap."""
        first = max(0, -((tap - self.padding) // self.stride))
        last = min(self.rows_out - 1, (self.rows_in - 1 + self.padding - tap) // self.stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        start = self.stride * first + tap - self.padding
        return slice(start, start + self.stride * (last - first) + 1, self.stride), slice(first, last + 1)

    # --- the Gram matrix ----------------------------------------------------------------------------------------

    def _shape(self, output_side: bool) -> tuple[int, int, int]:
        """Rows of the Gram matrix, the size of each, and how many neighbours on each side a row meets."""
        if output_side:
            return self.rows_out, self.parts.shape[2], min(self.rows_out - 1, (self.taps - 1) // self.stride)
        return self.rows_in, self.parts.shape[3], min(self.rows_in - 1, self.taps - 1)

    def _flops(self, output_side: bool) -> float:
        rows, size, width = self._shape(output_side)
        group = max(1, width)
        factor = 8.0 * math.ceil(rows / group) * (group * size) ** 3
        gram = 2.0 * self.taps**2 * size**2 * self.parts.shape[3 if output_side else 2]
        return len(self.parts) * (factor + gram) * (4 if self.parts.is_complex() else 1)

    @cached_property
    def _product(self) -> Callable[[int, int], Tensor]:
        """The product of two taps, as a block of the Gram matrix contains it; each is computed once."""
        parts = self.parts.unbind(1)
        if self.output_side:
            return cache(lambda tap, other: parts[tap] @ parts[other].mH)
        return cache(lambda tap, other: parts[tap].mH @ parts[other])

    def _block(self, row: int, offset: int) -> Tensor | None:
        """Block (row, row + offset) of the Gram matrix; None for zero."""
        total: Tensor | None = None
        for tap in range(self.taps):
            if self.output_side:  # sum over input rows y of P_{y+p-si} P_{y+p-s(i+d)}^H
                inside = 0 <= self.stride * row + tap - self.padding < self.rows_in
                other = tap - self.stride * offset
            else:  # sum over output rows i of P_{y+p-si}^H P_{y+d+p-si}
                place, rest = divmod(row + self.padding - tap, self.stride)
                inside = rest == 0 and 0 <= place < self.rows_out
                other = tap + offset
            if inside and 0 <= other < self.taps:
                product = self._product(tap, other)
                total = product if total is None else total + product
        return total

    def _tridiagonal(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The Gram matrix as diagonal blocks and the blocks to the right of them, rows joined until that is all."""
        rows, size, width = self._shape(self.output_side)
        group = max(1, width)
        for first in range(0, rows, group):
            own = range(first, min(rows, first + group))
            following = range(own.stop, min(rows, own.stop + group)) if width else range(0)
            whole = self.parts.new_zeros(len(self.parts), len(own) * size, (len(own) + len(following)) * size)
            for i, row in enumerate(own):
                for j, column in enumerate((*own, *following)):
                    block = self._block(min(row, column), abs(column - row)) if abs(column - row) <= width else None
                    if block is not None:
                        place = whole[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
                        place.copy_(block if column >= row else block.mH)
            split = len(own) * size
            yield whole[:, :, :split], whole[:, :, split:] if following else None

    def _defect(self, square: float) -> float | None:
        """Frobenius norm of ``square * I - G - R^H R`` with the Cholesky factor R, or None if there is none."""
        _, size, width = self._shape(self.output_side)
        # A few frequencies at a time: more would only wait for fresh memory.
        some = max(1, CHUNK // (max(1, width) * size) ** 2)
        parts = [self] if len(self.parts) <= some else [replace(self, parts=p) for p in torch.split(self.parts, some)]
        total = 0.0
        for part in parts:
            defect = part._own_defect(square)
            if defect is None:
                return None
            total += defect
        return math.sqrt(total)

    def _own_defect(self, square: float) -> float | None:
        """The same squared, with all frequencies at once."""
        total, carried = 0.0, None
        for diagonal, beside in self._tridiagonal():
            rest = -diagonal
            rest.diagonal(dim1=1, dim2=2).add_(square)
            if carried is not None:
                rest -= carried
            lower, failed = torch.linalg.cholesky_ex(rest)
            if failed.any():
                return None
            total += float((rest - lower @ lower.mH).abs().square().sum())
            if beside is None:
                carried = None
                continue
            right = torch.linalg.solve_triangular(lower, -beside, upper=False)
            total += 2 * float((lower @ right + beside).abs().square().sum())
            carried = right.mH @ right
        return total

    def _rounding(self, square: float) -> float:
        """What rounding can hide in the defect and in the Gram matrix; see ``norm``."""
        rows, size, width = self._shape(self.output_side)
        inner = self.taps * self.parts.shape[3 if self.output_side else 2]
        longest = 4 * (max(1, width) * size + inner + self.terms**2 + 8)
        return 4 * UNIT * longest * rows * size * square


def _length(v: Tensor) -> Tensor:
    """The norm of each frequency's vector; where nothing is left of it, any number that can be divided by."""
    return v.abs().square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-200).to(v.dtype)
