"""Bounds of the values of a graph, and of the rounding errors of their computation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.certify.linear import LinearMap
from atoll.errors import InputError

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
Shape = tuple[int, ...]


def gamma(terms: int, unit: float) -> float:
    """Return the relative error of a sum of products, in any order of summation (Higham, 2002, section 3.1)."""
    if terms * unit >= 0.5:
        raise InputError(f"a sum of {terms:,} terms is too long for this precision")
    return terms * unit / (1 - terms * unit)


@dataclass(frozen=True)
class Precision:
    r"""Floating-point arithmetic: an operation returns :math:`r (1 + \delta) + \eta`.

    :math:`|\delta|` is at most the unit roundoff, and :math:`|\eta|` at most the smallest normal number, because
    subnormal numbers may be flushed to zero.
    """

    unit: float
    tiny: float
    largest: float

    @staticmethod
    def of(dtype: torch.dtype) -> Precision:
        if dtype not in UNIT_ROUNDOFF:
            raise InputError(f"certificates require float32 or float64, got {dtype}")
        info = torch.finfo(dtype)
        return Precision(UNIT_ROUNDOFF[dtype], float(info.tiny), float(info.max))


@dataclass(frozen=True)
class Error:
    r"""An error bound :math:`\rho \|x\| + \sigma` for inputs x of the network."""

    relative: float = 0.0
    absolute: float = 0.0

    def __add__(self, other: Error) -> Error:
        return Error(self.relative + other.relative, self.absolute + other.absolute)

    def times(self, factor: float) -> Error:
        return Error(factor * self.relative, factor * self.absolute) if factor else Error()

    @staticmethod
    def joint(errors: list[Error]) -> Error:
        """Return the l2 error of concatenated values."""
        return Error(math.hypot(*(e.relative for e in errors)), math.hypot(*(e.absolute for e in errors)))


class TracedConstant(float):
    """A Lipschitz constant that records how it was computed from others, so that it can be computed again.

    >>> sigma = TracedConstant(3.0, "norm")
    >>> total = hypot(2 * sigma + 1, 0.0)
    >>> total, total.evaluate({"norm": torch.tensor(1.0)})
    (7.0, tensor(3.))
    """

    recipe: Any

    def __new__(cls, value: float, recipe: Any) -> TracedConstant:
        constant = super().__new__(cls, value)
        constant.recipe = recipe
        return constant

    def __mul__(self, other: float) -> TracedConstant:
        return TracedConstant(float(self) * float(other), (torch.mul, self, other))

    def __add__(self, other: float) -> TracedConstant:
        return TracedConstant(float(self) + float(other), (torch.add, self, other))

    __rmul__, __radd__ = __mul__, __add__

    def evaluate(self, leaves: Mapping[Any, Tensor]) -> Tensor:
        """Compute the constant again from other numbers."""
        if not isinstance(self.recipe, tuple):
            return leaves[self.recipe]
        function, *arguments = self.recipe
        tensors = [a.evaluate(leaves) if isinstance(a, TracedConstant) else a for a in arguments]
        like = next(t for t in tensors if isinstance(t, Tensor))
        result: Tensor = function(*(as_tensor(t, like) for t in tensors))
        return result


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor or a number as a tensor of the data type and on the device of another, without waiting for it."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def hypot(*values: float) -> float:
    """Return the square root of the sum of squares; keeps the record of traced constants."""
    total = values[0]
    for value in values[1:]:
        length = math.hypot(total, value)
        traced = isinstance(total, TracedConstant) or isinstance(value, TracedConstant)
        total = TracedConstant(length, (torch.hypot, total, value)) if traced else length
    return total


@dataclass(frozen=True)
class Bound:
    r"""Bounds (l2) of a function f of the network's input and of its computation :math:`\hat f`.

    Args:
        lipschitz: L in :math:`\|f(x) - f(y)\| \le L \|x - y\|`.
        offset: :math:`\beta` in :math:`\|f(0)\| \le \beta`.
        relative: :math:`\rho` in :math:`\|\hat f(x) - f(x)\| \le \rho \|x\| + \sigma`.
        absolute: :math:`\sigma`, see ``relative``.
    """

    lipschitz: float = 1.0
    offset: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0

    @property
    def error(self) -> Error:
        return Error(self.relative, self.absolute)


@dataclass(frozen=True, eq=False)
class Base:
    """A value that other values are functions of: its bound, its node and, for a minimum or maximum, both arguments."""

    bound: Bound
    node: str = ""
    order: tuple[Literal["minimum", "maximum"], Value, Value] | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    r"""A relation in which every entry is a function of one entry of the base, or constant.

    Args:
        index: index of the entry of the base (starting at 1; 0 for a constant), float64 in the shape of the value; None
            for all entries in order.
        slope: Lipschitz constant of the functions, one number or one per entry.
        linear: whether the functions are the identity.
    """

    index: Tensor | None = None
    slope: float | Tensor = 1.0
    linear: bool = True

    @cached_property
    def gain(self) -> float:
        r"""The Lipschitz constant :math:`\max_j \sqrt{\sum_{i \to j} K_i^2}`."""
        if self.index is None:
            return float(torch.as_tensor(self.slope).max()) if torch.is_tensor(self.slope) else self.slope
        index = self.index.long().flatten()
        slopes = torch.as_tensor(self.slope, dtype=torch.float64).expand(self.index.shape).flatten()
        largest = float(slopes.max()) if slopes.numel() else 0.0
        if not 0 < largest < math.inf:
            return largest
        squares = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
        squares.index_add_(0, index, (slopes / largest).square())
        squares[0] = 0.0  # constants
        return largest * math.sqrt(float(squares.max())) * (1 + 1e-12 * (largest != 1.0))


@dataclass(frozen=True, eq=False)
class Value:
    """The result of an operation for one point, as a function of a base, with a bound of the rounding error.

    Args:
        base: the value that it is a function of.
        relation: the function.
        zero: the value for a zero input of the network, float64, with a batch dimension of 1.
        local: error of the operations between base and value.
        name: name of the layer, for reports.
        kind: kind of operation.
        node: name of the node.
    """

    base: Base
    relation: LinearMap | Selection
    zero: Tensor
    local: Error = Error()
    name: str = ""
    kind: str = ""
    node: str = ""

    @property
    def shape(self) -> Shape:
        return tuple(self.zero.shape[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def cheap_gain(self) -> float:
        """An upper bound of the Lipschitz constant of the relation that needs no expensive proof."""
        return self.relation.gain if isinstance(self.relation, Selection) else self.relation.spread

    @cached_property
    def cheap_error(self) -> Error:
        return self.base.bound.error.times(self.cheap_gain) + self.local

    @cached_property
    def magnitude(self) -> Error:
        """Bound of the norm of the computed value."""
        error = self.cheap_error
        length = norm(self.zero) + error.absolute
        return Error(self.cheap_gain * self.base.bound.lipschitz, length) + error


def norm(value: Tensor) -> float:
    """Return an upper bound of the l2 norm, without overflow of squares."""
    largest = float(value.abs().max()) if value.numel() else 0.0
    if not 0 < largest < math.inf:
        return largest
    return float((value / largest).norm()) * largest * (1 + 1e-12)
