"""Norms of block-banded linear maps, proven by a Cholesky factorization.

A convolution is block-banded with respect to rows of pixels.  A dense matrix is the case of a single row, and the
Fourier transform of a convolution is a batch of block-banded maps.
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
FREQUENCIES = 8  # number of frequencies that get all Lanczos steps to estimate the largest singular value
COARSE = 12  # Lanczos steps for all frequencies, to select these
CHUNK = 2**20  # largest size of the blocks that are factorized together


@dataclass(frozen=True)
class BlockBandedOperator:
    r"""A block-banded map: output row i is :math:`\sum_r P_r\, x_{s i + r - p}`, and rows outside the input are zero.

    Args:
        parts: the matrices :math:`P_r`, ``(frequencies, taps, outputs, inputs)``, float64 or complex128; the map is the
            direct sum over the frequencies.
        rows_in: number of input rows.
        rows_out: number of output rows.
        stride: s.
        padding: p.
        terms: number of terms in the sums that computed the entries of the parts.
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
        """Whether to use the Gram matrix A A^H instead of A^H A, because it is cheaper."""
        return self._flops(output_side=True) < self._flops(output_side=False)

    @property
    def flops(self) -> float:
        """Approximate number of real operations of one attempt at a proof."""
        return self._flops(output_side=self.output_side)

    def norm(self, tolerance: float = 1e-3) -> float:
        r"""Return an upper bound of the largest singular value, usually within ``tolerance / 2`` of it.

        For any computed factor R, :math:`R^H R` is positive semidefinite.  With :math:`E = s I - G - R^H R` and
        :math:`G = A^H A`, the norm is therefore at most :math:`\sqrt{s + \|E\|_F}`.  Cholesky gives an R with a tiny E
        if s is above the squared norm, and fails otherwise.  E is computed; its rounding error, and that of G, is below
        :math:`4 u k\, n s`, with u the unit roundoff, n the order of G and k the number of terms in the longest sum,
        because :math:`|fl(X Y) - X Y| \le \gamma_k |X| |Y|` in any order of summation (Higham, 2002, section 3.5; 4 for
        complex numbers) and :math:`\|\, |X|^H |X|\, \|_F \le \|X\|_F^2`, which is the trace of :math:`X^H X`, at most
        n s for R and for A.
        """
        if not self.parts.any():
            return 0.0
        failed, proven, best = 0.0, math.inf, math.inf
        # A kernel may cover only padding; the map is then zero, and any positive bound can be proven.
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
            else:  # the estimate was too low, and the steps above it may have been too large
                square = (failed + proven) / 2

    def largest(self, steps: int = 60) -> float:
        """Estimate the largest singular value from below with Lanczos, without a proof.

        A few steps for every frequency select the frequencies that get all steps.
        """
        operator = self
        if len(self.parts) > FREQUENCIES:
            operator = replace(self, parts=self.parts[self._lanczos(COARSE).topk(FREQUENCIES).indices])
        return math.sqrt(max(0.0, float(operator._lanczos(steps).max())))

    def _lanczos(self, steps: int) -> Tensor:
        """Return an eigenvalue of the Gram matrix of each frequency that is close to the largest.

        Lanczos vectors are not reorthogonalized; the resulting copies of the largest eigenvalue do no harm.
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
        """Apply the map to ``(frequencies, rows_in, inputs)``."""
        y = x.new_zeros(len(x), self.rows_out, self.parts.shape[2])
        for tap in range(self.taps):
            source, target = self._meet(tap)
            y[:, target] += x[:, source] @ self.parts[:, tap].mT
        return y

    def transposed(self, y: Tensor) -> Tensor:
        """Apply the adjoint map to ``(frequencies, rows_out, outputs)``."""
        x = y.new_zeros(len(y), self.rows_in, self.parts.shape[3])
        for tap in range(self.taps):
            source, target = self._meet(tap)
            x[:, source] += y[:, target].conj() @ self.parts[:, tap]
        return x.conj()

    def _meet(self, tap: int) -> tuple[slice, slice]:
        """Return the input and output rows that a tap connects."""
        first = max(0, -((tap - self.padding) // self.stride))
        last = min(self.rows_out - 1, (self.rows_in - 1 + self.padding - tap) // self.stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        start = self.stride * first + tap - self.padding
        return slice(start, start + self.stride * (last - first) + 1, self.stride), slice(first, last + 1)

    # --- the Gram matrix ----------------------------------------------------------------------------------------

    def _shape(self, output_side: bool) -> tuple[int, int, int]:
        """Return the number of block rows of the Gram matrix, their size, and the number of blocks on each side."""
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
        """A cached function that returns the product of two taps, a term of a block of the Gram matrix."""
        parts = self.parts.unbind(1)
        if self.output_side:
            return cache(lambda tap, other: parts[tap] @ parts[other].mH)
        return cache(lambda tap, other: parts[tap].mH @ parts[other])

    def _block(self, row: int, offset: int) -> Tensor | None:
        """Return block (row, row + offset) of the Gram matrix, or None if it is zero."""
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
        """Yield the Gram matrix as a block tridiagonal matrix: diagonal blocks and the blocks to the right of them."""
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
        """Return the Frobenius norm of ``square * I - G - R^H R`` with the Cholesky factor R, or None if it fails."""
        _, size, width = self._shape(self.output_side)
        # A few frequencies at a time, because allocating more memory would be slower.
        count = max(1, CHUNK // (max(1, width) * size) ** 2)
        parts = [self] if len(self.parts) <= count else [replace(self, parts=p) for p in torch.split(self.parts, count)]
        total = 0.0
        for part in parts:
            defect = part._own_defect(square)
            if defect is None:
                return None
            total += defect
        return math.sqrt(total)

    def _own_defect(self, square: float) -> float | None:
        """Return the square of ``_defect``, with all frequencies at once."""
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
        """Return a bound of the rounding error of the defect and the Gram matrix; see ``norm``."""
        rows, size, width = self._shape(self.output_side)
        inner = self.taps * self.parts.shape[3 if self.output_side else 2]
        longest = 4 * (max(1, width) * size + inner + self.terms**2 + 8)
        return 4 * UNIT * longest * rows * size * square


def _length(v: Tensor) -> Tensor:
    """Return the norm of the vector of each frequency, at least 1e-200 to avoid division by zero."""
    return v.abs().square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-200).to(v.dtype)
