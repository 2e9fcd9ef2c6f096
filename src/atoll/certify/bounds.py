"""What is known of the values of a graph, and of their computation with rounding."""

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
    """The relative error of a sum of products, in any order (Higham, 2002, section 3.1)."""
    if terms * unit >= 0.5:
        raise InputError(f"{terms:,} terms are too many to add up in this precision")
    return terms * unit / (1 - terms * unit)


@dataclass(frozen=True)
class Precision:
    r"""Floating-point arithmetic: an operation returns :math:`r (1 + \delta) + \eta`.

    :math:`|\delta|` is at most the unit roundoff, and :math:`|\eta|` the smallest normal number: subnormal numbers may
    be flushed to zero.
    """

    unit: float
    tiny: float
    largest: float

    @staticmethod
    def of(dtype: torch.dtype) -> Precision:
        if dtype not in UNIT_ROUNDOFF:
            raise InputError(f"certificates are for float32 and float64, got {dtype}")
        info = torch.finfo(dtype)
        return Precision(UNIT_ROUNDOFF[dtype], float(info.tiny), float(info.max))


@dataclass(frozen=True)
class Error:
    r"""A bound :math:`\rho \|x\| + \sigma` for inputs x of the network."""

    relative: float = 0.0
    absolute: float = 0.0

    def __add__(self, other: Error) -> Error:
        return Error(self.relative + other.relative, self.absolute + other.absolute)

    def times(self, factor: float) -> Error:
        return Error(factor * self.relative, factor * self.absolute) if factor else Error()

    @staticmethod
    def joint(errors: list[Error]) -> Error:
        """Of values side by side, in l2."""
        return Error(math.hypot(*(e.relative for e in errors)), math.hypot(*(e.absolute for e in errors)))


class TracedConstant(float):
    """A Lipschitz constant that remembers how it was computed from others, so that it can be computed again.

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
        """The constant with other numbers in the place of those it was made from."""
        if not isinstance(self.recipe, tuple):
            return leaves[self.recipe]
        function, *arguments = self.recipe
        tensors = [a.evaluate(leaves) if isinstance(a, TracedConstant) else a for a in arguments]
        like = next(t for t in tensors if isinstance(t, Tensor))
        result: Tensor = function(*(torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in tensors))
        return result


def hypot(*values: float) -> float:
    """The root of the sum of squares."""
    total = values[0]
    for value in values[1:]:
        length = math.hypot(total, value)
        traced = isinstance(total, TracedConstant) or isinstance(value, TracedConstant)
        total = TracedConstant(length, (torch.hypot, total, value)) if traced else length
    return total


@dataclass(frozen=True)
class Bound:
    r"""What is known of a function f of the network's input and of its computation :math:`\hat f`, in l2.

    Args:
        lipschitz: :math:`\|f(x) - f(y)\| \le L \|x - y\|`.
        offset: :math:`\|f(0)\| \le \beta`.
        relative: with ``absolute``, :math:`\|\hat f(x) - f(x)\| \le \rho \|x\| + \sigma`.
        absolute: see ``relative``.
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
    """A value that others are expressed by: bound, node, and, of a minimum or maximum, the two values."""

    bound: Bound
    node: str = ""
    order: tuple[Literal["minimum", "maximum"], Value, Value] | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    r"""Every entry is a function of one entry of the base, or constant.

    Args:
        index: which entry of the base (from 1; 0 for a constant), float64 in the shape of the value; None for all
            entries in their order.
        slope: Lipschitz constant of the functions, one number or one for each entry.
        linear: the functions are the identity.
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
    """The result of an operation for one point: how it depends on a base, and what rounding may have added.

    Args:
        base: what it is expressed by.
        relation: how.
        zero: the value where the network's input is zero, float64, with a batch dimension of 1.
        local: error of the operations between base and value.
        name: of the layer, for the table.
        kind: of operation.
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
        """An upper bound of the Lipschitz constant of the relation that takes no proof."""
        return self.relation.gain if isinstance(self.relation, Selection) else self.relation.spread

    @cached_property
    def cheap_error(self) -> Error:
        return self.base.bound.error.times(self.cheap_gain) + self.local

    @cached_property
    def magnitude(self) -> Error:
        """A bound of the norm of the computed value."""
        error = self.cheap_error
        length = norm(self.zero) + error.absolute
        return Error(self.cheap_gain * self.base.bound.lipschitz, length) + error


def norm(value: Tensor) -> float:
    """An upper bound of the l2 norm, without overflow of squares."""
    largest = float(value.abs().max()) if value.numel() else 0.0
    if not 0 < largest < math.inf:
        return largest
    return float((value / largest).norm()) * largest * (1 + 1e-12)
