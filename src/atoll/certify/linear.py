"""Linear maps between values of a graph, with proven norms, sums, and products with diagonals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.certify.norms import BUDGET, Pair, SpectralNormBound, conv_norm, dense_norm

UNIT = 2.0**-53  # unit roundoff of float64, in which maps are added and scaled


class LinearMap(Protocol):
    r"""A linear map A of one point.

    ``spread`` is a cheap bound of the norm of :math:`|A|`, the map with the absolute values of all weights, to which
    rounding errors are proportional.  ``terms`` is the number of products in one output.
    """

    @property
    def spread(self) -> float: ...

    @property
    def terms(self) -> int: ...

    def norm(self, budget: float = BUDGET) -> SpectralNormBound: ...

    def after(self, diagonal: Diagonal) -> LinearMap | None:
        """Return this map applied after ``diagonal``, or None if the product is not a map of this kind."""
        ...

    def scaled(self, diagonal: Diagonal) -> LinearMap | None:
        """Return this map followed by ``diagonal``, or None."""
        ...

    def plus(self, other: LinearMap) -> LinearMap | None:
        """Return the sum of two maps, or None."""
        ...


@dataclass(frozen=True, eq=False)
class Diagonal:
    """Multiplies every entry by a number.

    Args:
        weight: factors in float64: one number, or with as many dimensions as the value (broadcasting).
        error: error of the norm due to rounding of the weights.

    >>> Diagonal(torch.tensor([3.0, -4.0]).double()).norm().value
    4.0
    """

    weight: Tensor
    error: float = 0.0

    @property
    def spread(self) -> float:
        return _largest(self.weight) + self.error

    @property
    def terms(self) -> int:
        return 1

    def norm(self, budget: float = BUDGET) -> SpectralNormBound:
        return SpectralNormBound(self.spread, "exact")

    def after(self, diagonal: Diagonal) -> Diagonal:
        error = (self.error * diagonal.spread + self.spread * diagonal.error) + 2 * UNIT * self.spread * diagonal.spread
        return Diagonal(self.weight * diagonal.weight, error)

    def scaled(self, diagonal: Diagonal) -> Diagonal:
        return self.after(diagonal)

    def plus(self, other: LinearMap) -> LinearMap | None:
        if isinstance(other, Diagonal):
            error = self.error + other.error + 2 * UNIT * (self.spread + other.spread)
            return Diagonal(self.weight + other.weight, error)
        return other.plus(self)


@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix that acts on the last dimension of a value, float64.

    >>> Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double()).norm().value < 4.01
    True
    """

    weight: Tensor
    error: float = 0.0

    @property
    def spread(self) -> float:
        return _spread(self.weight) + self.error

    @property
    def terms(self) -> int:
        return self.weight.shape[1]

    def norm(self, budget: float = BUDGET) -> SpectralNormBound:
        return _with_error(_normalized(self.weight, dense_norm), self.error)

    def after(self, diagonal: Diagonal) -> Dense | None:
        return self._times(diagonal, self.weight.shape[1], 0)

    def scaled(self, diagonal: Diagonal) -> Dense | None:
        return self._times(diagonal, self.weight.shape[0], 1)

    def _times(self, diagonal: Diagonal, size: int, axis: int) -> Dense | None:
        factors = _per_entry(diagonal.weight, size)
        if factors is None:
            return None
        product = self.weight * (factors if axis == 0 else factors[:, None])
        return Dense(product, _product_error(self, diagonal))

    def plus(self, other: LinearMap) -> Dense | None:
        if isinstance(other, Diagonal):
            rows, columns = self.weight.shape
            factors = _per_entry(other.weight, rows)
            if factors is None or rows != columns:
                return None
            other = Dense(torch.diag(factors.expand(rows)), other.error)
        if not isinstance(other, Dense) or other.weight.shape != self.weight.shape:
            return None
        error = self.error + other.error + 2 * UNIT * (self.spread + other.spread)
        return Dense(self.weight + other.weight, error)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A two-dimensional convolution with zero padding, without groups or dilation; see ``convolution``.

    Args:
        weight: ``(out, in, height, width)``, float64.
        size: height and width of the input.
        stride: vertical and horizontal stride.
        padding: vertical and horizontal padding.
        adjoint: whether this is the transposed map, from outputs to inputs.
        error: error of the norm due to rounding of the weights.
    """

    weight: Tensor
    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    adjoint: bool = False
    error: float = 0.0

    @property
    def spread(self) -> float:
        """Bound by Schur's test, or by Cauchy-Schwarz with the number of patches that contain a pixel."""
        scale = _power_of_two(self.weight)
        weight = (self.weight / scale).abs()
        patches = math.prod(math.ceil(k / s) for k, s in zip(weight.shape[2:], self.stride, strict=True))
        frobenius = float(weight.norm()) * math.sqrt(patches)
        rows, columns = weight.sum((1, 2, 3)).max(), self._column_sums(weight).max()
        return min(frobenius, math.sqrt(float(rows) * float(columns))) * (1 + 1e-12) * scale + self.error

    def _column_sums(self, weight: Tensor) -> Tensor:
        """Return the largest sum of the weights of one pixel, for each input channel."""
        (s, t), (height, width) = self.stride, weight.shape[2:]
        weight = F.pad(weight, (0, -width % t, 0, -height % s)).sum(0)
        rows, columns = weight.shape[1] // s, weight.shape[2] // t
        phases = weight.reshape(-1, rows, s, columns, t)
        return phases.sum((1, 3)).amax((1, 2))

    @property
    def terms(self) -> int:
        return self.weight[0].numel() if not self.adjoint else self.weight[:, 0].numel()

    def norm(self, budget: float = BUDGET) -> SpectralNormBound:
        def proven(weight: Tensor) -> SpectralNormBound:
            return conv_norm(weight, self.size, self.stride, self.padding, budget=budget)

        return _with_error(_normalized(self.weight, proven), self.error)

    def after(self, diagonal: Diagonal) -> Convolution | None:
        return self._times(diagonal, outputs=self.adjoint)

    def scaled(self, diagonal: Diagonal) -> Convolution | None:
        return self._times(diagonal, outputs=not self.adjoint)

    def _times(self, diagonal: Diagonal, *, outputs: bool) -> Convolution | None:
        factors = _per_channel(diagonal.weight, self.weight.shape[0 if outputs else 1])
        if factors is None:
            return None
        factors = factors[:, None, None, None] if outputs else factors[:, None, None]
        return replace(self, weight=self.weight * factors, error=_product_error(self, diagonal))

    def plus(self, other: LinearMap) -> Convolution | None:
        if isinstance(other, Diagonal):
            channels = self.weight.shape[0]
            factors = _per_channel(other.weight, channels)
            if factors is None or channels != self.weight.shape[1]:
                return None
            weight = torch.diag(factors.expand(channels))[:, :, None, None]
            other = Convolution(weight, self.size, adjoint=self.adjoint, error=other.error)
        if not isinstance(other, Convolution) or self.adjoint != other.adjoint or self.size != other.size:
            return None
        if self.stride != other.stride or self.weight.shape[:2] != other.weight.shape[:2]:
            return None
        return self._sum(other)

    def _sum(self, other: Convolution) -> Convolution | None:
        """Add two kernels after padding them to the same size; None if they are not centered alike."""
        sides = []
        for axis in (0, 1):
            small, large = sorted((c.weight.shape[2 + axis], c.padding[axis]) for c in (self, other))
            if large[0] - small[0] != 2 * (large[1] - small[1]):
                return None
            sides.append((large[0], large[1]))
        (height, down), (width, across) = sides
        weights = []
        for one in (self, other):
            top, left = down - one.padding[0], across - one.padding[1]
            weights.append(F.pad(one.weight, (left, left, top, top)))
        if any(w.shape[2:] != (height, width) for w in weights):
            return None
        error = self.error + other.error + 2 * UNIT * (self.spread + other.spread)
        return replace(self, weight=weights[0] + weights[1], padding=(down, across), error=error)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Maps on separate parts of the input, such as a grouped convolution."""

    maps: tuple[Convolution, ...]

    @property
    def spread(self) -> float:
        return max(part.spread for part in self.maps)

    @property
    def terms(self) -> int:
        return self.maps[0].terms

    def norm(self, budget: float = BUDGET) -> SpectralNormBound:
        norms = [part.norm(budget) for part in self.maps]
        return max(norms, key=lambda norm: norm.value)

    def after(self, diagonal: Diagonal) -> Blocks | None:
        return None

    def scaled(self, diagonal: Diagonal) -> Blocks | None:
        return None

    def plus(self, other: LinearMap) -> Blocks | None:
        return None


def convolution(
    weight: Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    output_size: tuple[int, ...] | None = None,
) -> Convolution | Blocks:
    """Build a convolution in one or two dimensions, or a transposed one if ``output_size`` is given.

    >>> kernel = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> convolution(kernel, (20,), (1,), (0,), (1,), 1).norm().value < 2  # 2 cos(pi / 21)
    True
    """
    adjoint = output_size is not None
    size = output_size or size
    weight = weight.detach().double()
    if weight.dim() == 3:
        weight = weight[:, :, None]
        size, stride, padding, dilation = (1, *size), (1, *stride), (0, *padding), (1, *dilation)
    weight = _dilated(weight, (dilation[0], dilation[1]))
    parts = tuple(
        Convolution(part, (size[0], size[1]), (stride[0], stride[1]), (padding[0], padding[1]), adjoint)
        for part in weight.chunk(groups)
    )
    return parts[0] if groups == 1 else Blocks(parts)


def _dilated(weight: Tensor, dilation: Pair) -> Tensor:
    height, width = weight.shape[2:]
    if dilation == (1, 1):
        return weight
    larger = weight.new_zeros(*weight.shape[:2], dilation[0] * (height - 1) + 1, dilation[1] * (width - 1) + 1)
    larger[:, :, :: dilation[0], :: dilation[1]] = weight
    return larger


def _per_entry(weight: Tensor, size: int) -> Tensor | None:
    """Return the factors of a diagonal if there is one per entry of the last dimension, or one for all, or None."""
    if weight.numel() == 1 or weight.numel() == weight.shape[-1] == size:
        return weight.reshape(-1)
    return None


def _per_channel(weight: Tensor, channels: int) -> Tensor | None:
    """Return the factors of a diagonal if there is one per channel, or one for all, or None."""
    if weight.numel() == 1 or weight.numel() == weight.shape[0] == channels:
        return weight.reshape(-1)
    return None


def _product_error(linear: Dense | Convolution, diagonal: Diagonal) -> float:
    spread = linear.spread
    return linear.error * diagonal.spread + spread * diagonal.error + 2 * UNIT * spread * diagonal.spread


def _largest(weight: Tensor) -> float:
    return float(weight.abs().max()) if weight.numel() else 0.0


def _spread(weight: Tensor) -> float:
    """Return an upper bound of the norm of the matrix of absolute values, by Frobenius or Schur's test."""
    if not weight.numel():
        return 0.0
    scale = _power_of_two(weight)
    size = (weight / scale).abs()
    schur = math.sqrt(float(size.sum(0).max()) * float(size.sum(1).max()))
    return min(float(size.norm()), schur) * (1 + 1e-12) * scale


def _power_of_two(weight: Tensor) -> float:
    """Return a power of two close to the largest entry, so that squares of the quotient neither overflow nor vanish."""
    largest = _largest(weight)
    return 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0


def _normalized(weight: Tensor, proven: Callable[[Tensor], SpectralNormBound]) -> SpectralNormBound:
    scale = _power_of_two(weight)
    bound = proven(weight / scale)
    return replace(bound, value=bound.value * scale)


def _with_error(bound: SpectralNormBound, error: float) -> SpectralNormBound:
    return replace(bound, value=(bound.value + error) * (1 + 1e-15)) if error else bound
