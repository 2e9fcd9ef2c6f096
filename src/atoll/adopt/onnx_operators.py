"""ONNX operators as PyTorch functions, in one table.

To add an operator, write one function with the decorator `operator`.  Its positional parameters are the inputs of the
ONNX operator, and its keyword parameters are the attributes with their defaults.  Annotations say how inputs arrive:

- ``Tensor``: as a tensor.
- ``Numbers``: as numbers that do not depend on the values of the input, such as the shape of a Reshape.
- ``Operand``: a scalar constant as a Python number, everything else as a tensor.
- ``Value``: unchanged.

A parameter ``context`` gets the `NodeContext`.  Attributes that a function does not list are refused.  Computations
with sizes have a second, smaller table (`known`), because tensors would turn the batch size into a constant.
"""

from __future__ import annotations

import inspect
import math
import operator as python
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import InputError

MAX_ELEMENTS = 2**31  # of a tensor that an operator creates: 8 GiB in float32
MAX_KNOWN = 4096  # numbers of a constant that sizes may be computed from
_SYMBOLS = (torch.SymInt, torch.SymFloat)
_ROUND: dict[torch.dtype, Any] = {torch.float16: np.float16, torch.float32: np.float32}

# The data types of ONNX by their numbers in files.
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


class Numbers:
    """An array of numbers that are known without the input: constants, and sizes that may contain the batch size.

    >>> Numbers([2.7, 3.0], torch.int64).ints()
    [2, 3]
    """

    def __init__(self, values: Any, dtype: torch.dtype) -> None:
        rounded = np.frompyfunc(lambda value: _convert(value, dtype), 1, 1)(np.array(values, dtype=object))
        self.array, self.dtype = np.array(rounded, dtype=object), dtype

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(value, _SYMBOLS) for value in self.array.flat)

    def item(self) -> Any:
        if self.array.size != 1:
            raise InputError(f"expected one number, got {self.array.size}")
        return self.array.reshape(-1)[0]

    def ints(self) -> list[int]:
        return list(self.array.reshape(-1))

    def tensor(self, device: torch.device) -> Tensor:
        if not self.is_symbolic:
            return torch.tensor(self.array.tolist(), dtype=self.dtype, device=device)
        values = [torch.full((), value, dtype=self.dtype, device=device) for value in self.array.flat]
        return torch.stack(values).reshape(self.array.shape)


def _convert(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, _SYMBOLS):
        return (torch.sym_float if dtype.is_floating_point else torch.sym_int)(value)  # type: ignore[no-untyped-call]
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        return int(value)
    return float(_ROUND[dtype](value)) if dtype in _ROUND else float(value)


Value = Tensor | Numbers
Operand = Tensor | float
Results = Value | tuple[Value, ...]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class NodeContext:
    """Where an operator is executed.

    Args:
        opset: version of the operators in the file.
        device: of the input.
        outputs: how many outputs the node has.
        varies: for every input, whether it depends on the input of the model.
        fixed_batch: the batch size that the file was written for; None for any.
        batch: the batch size of the input of the model.
        batch_axis: the axis of a Reshape that contains the batch size as a constant.
    """

    opset: int
    device: torch.device
    outputs: int = 1
    varies: tuple[bool, ...] = ()
    fixed_batch: int | None = None
    batch: int = 1
    batch_axis: int | None = None


@dataclass(frozen=True)
class Operator:
    """A function of the table, and what its signature says.

    Attributes:
        function: computes the outputs.
        kinds: annotations of the inputs.
        required: number of inputs that have no default.
        repeats: whether the last kind stands for any number of inputs.
        attributes: names of the attributes.
        outputs: number of outputs that are computed; None for any number.
        needs_context: whether the function has a parameter ``context``.
    """

    function: Callable[..., Results]
    kinds: tuple[str, ...]
    required: int
    repeats: bool
    attributes: frozenset[str]
    outputs: int | None
    needs_context: bool

    def kind(self, position: int) -> str:
        return self.kinds[min(position, len(self.kinds) - 1)]


OPERATORS: dict[str, Operator] = {}
KNOWN: dict[str, Operator] = {}


def operator(*names: str, outputs: int | None = 1) -> Callable[[Function], Function]:
    """Add a function to the table, under the names of ONNX operators."""

    def add(function: Function) -> Function:
        for name in names:
            OPERATORS[name] = _describe(function, outputs)
        return function

    return add


def known(*names: str) -> Callable[[Function], Function]:
    """Add a function that computes operators whose inputs are all `Numbers`, with arrays of Python objects."""

    def add(function: Function) -> Function:
        KNOWN.update(dict.fromkeys(names, _describe(function, None)))
        return function

    return add


def _describe(function: Callable[..., Results], outputs: int | None) -> Operator:
    parameters = inspect.signature(function).parameters.values()
    inputs = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    attributes = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
    return Operator(
        function,
        tuple(str(p.annotation).removesuffix(" | None") for p in inputs),
        sum(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in inputs),
        any(p.kind == p.VAR_POSITIONAL for p in inputs),
        frozenset(attributes - {"context"}),
        outputs,
        "context" in attributes,
    )


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_size(sizes: Sequence[int]) -> None:
    plain = [size for size in sizes if isinstance(size, int)]
    _expect(math.prod(plain) <= MAX_ELEMENTS, f"a tensor of shape {list(sizes)} is too large")


# --- sizes and other numbers


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float):
        return a / b if b else math.copysign(math.inf, a) if a else math.nan
    if isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0):
        return -(abs(a) // abs(b))  # ONNX rounds towards zero
    return a / b if isinstance(a, torch.SymFloat) else a // b


# Functions of single numbers; the result has the data type of the first input, or of the second for "Where".
_KNOWN_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Abs": abs, "Add": python.add, "Ceil": math.ceil, "Div": _divide, "Floor": math.floor, "Max": torch.sym_max,
    "Min": torch.sym_min, "Mul": python.mul, "Neg": python.neg, "Sqrt": lambda x: x**0.5, "Sub": python.sub,
    "Where": lambda condition, a, b: a if condition else b,
}  # fmt: skip
_KNOWN_CONDITIONS: dict[str, Callable[..., Any]] = {
    "And": lambda a, b: a and b, "Equal": python.eq, "Greater": python.gt, "GreaterOrEqual": python.ge,
    "Less": python.lt, "LessOrEqual": python.le, "Not": python.not_, "Or": lambda a, b: a or b,
}  # fmt: skip


def _add_known(name: str, function: Callable[..., Any], dtype: torch.dtype | None) -> None:
    count = {"Abs": 1, "Ceil": 1, "Floor": 1, "Neg": 1, "Not": 1, "Sqrt": 1, "Where": 3}.get(name, 2)

    @known(name)
    def elementwise(*xs: Numbers) -> Numbers:
        first, *rest = [x.array for x in xs]
        value = np.frompyfunc(function, count, 1)
        array = reduce(value, rest, first) if name in ("Min", "Max") else value(first, *rest)
        return Numbers(array, dtype or xs[name == "Where"].dtype)


for _name, _number_function in _KNOWN_ARITHMETIC.items():
    _add_known(_name, _number_function, None)
for _name, _number_function in _KNOWN_CONDITIONS.items():
    _add_known(_name, _number_function, torch.bool)


@known("Mod")
def _known_mod(a: Numbers, b: Numbers, *, fmod: int = 0) -> Numbers:
    return Numbers(np.frompyfunc(math.fmod if fmod else python.mod, 2, 1)(a.array, b.array), a.dtype)


@known("Identity")
def _known_identity(x: Numbers) -> Numbers:
    return x


@known("Cast")
def _known_cast(x: Numbers, *, to: int, saturate: int = 1, round_mode: str = "up") -> Numbers:
    return Numbers(x.array, _dtype(to))


@known("Gather")
def _known_gather(x: Numbers, indices: Numbers, *, axis: int = 0) -> Numbers:
    return Numbers(np.take(x.array, indices.array.astype(np.int64), axis), x.dtype)


@known("Concat")
def _known_concat(*xs: Numbers, axis: int) -> Numbers:
    return Numbers(np.concatenate([x.array for x in xs], axis), xs[0].dtype)


@known("Slice")
def _known_slice(
    x: Numbers,
    starts_input: Numbers | None = None,
    ends_input: Numbers | None = None,
    axes_input: Numbers | None = None,
    steps: Numbers | None = None,
    *,
    starts: list[int] | None = None,
    ends: list[int] | None = None,
    axes: list[int] | None = None,
) -> Numbers:
    array = x.array
    for axis, start, end, step in _slices(
        _ints(starts_input, starts), _ints(ends_input, ends), _ints(axes_input, axes), _ints(steps, None)
    ):
        array = np.take(array, _slice_range(array.shape[axis], start, end, step), axis)
    return Numbers(array, x.dtype)


@known("Squeeze")
def _known_squeeze(x: Numbers, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Numbers:
    chosen = _ints(axes_input, axes)
    return Numbers(np.squeeze(x.array, None if chosen is None else tuple(chosen)), x.dtype)


@known("Unsqueeze")
def _known_unsqueeze(x: Numbers, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Numbers:
    return Numbers(np.expand_dims(x.array, tuple(_ints(axes_input, axes) or ())), x.dtype)


@known("Reshape")
def _known_reshape(x: Numbers, shape: Numbers, *, allowzero: int = 0) -> Numbers:
    return Numbers(x.array.reshape(_reshape_sizes(x.array.shape, shape, allowzero)), x.dtype)


@known("Transpose")
def _known_transpose(x: Numbers, *, perm: list[int] | None = None) -> Numbers:
    return Numbers(x.array.transpose(perm), x.dtype)


@known("Expand")
def _known_expand(x: Numbers, shape: Numbers, *, context: NodeContext) -> Value:
    if shape.is_symbolic:
        return x.tensor(context.device).expand(_expand_sizes(x.array.shape, shape.ints()))
    _check_size(shape.ints())
    return Numbers(x.array * np.ones(shape.ints(), dtype=object), x.dtype)


@known("Split")
def _known_split(
    x: Numbers,
    split_input: Numbers | None = None,
    *,
    axis: int = 0,
    split: list[int] | None = None,
    num_outputs: int | None = None,
    context: NodeContext,
) -> tuple[Numbers, ...]:
    sizes = _split_sizes(x.array.shape[axis], _ints(split_input, split), num_outputs or context.outputs)
    return tuple(Numbers(part, x.dtype) for part in np.split(x.array, np.cumsum(sizes)[:-1], axis))


@known("ReduceProd")
def _known_product(
    x: Numbers,
    axes_input: Numbers | None = None,
    *,
    axes: list[int] | None = None,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Numbers:
    chosen = _ints(axes_input, axes)
    product = np.prod(x.array, axis=tuple(chosen) if chosen else None, keepdims=bool(keepdims))
    return x if noop_with_empty_axes and not chosen else Numbers(product, x.dtype)


def _ints(values: Numbers | None, attribute: list[int] | None) -> list[int] | None:
    """Settings that are attributes in older opsets, and inputs in newer ones."""
    return attribute if values is None else values.ints()


def _dtype(number: int) -> torch.dtype:
    _expect(number in DTYPES, f"the data type {number} is not supported")
    return DTYPES[number]


# --- creation


@operator("Shape")
def _shape(x: Value, *, start: int = 0, end: int | None = None) -> Numbers:
    shape = x.array.shape if isinstance(x, Numbers) else x.shape
    return Numbers(list(shape)[start:end], torch.int64)


@operator("Size")
def _size(x: Value) -> Numbers:
    return Numbers(math.prod(x.array.shape if isinstance(x, Numbers) else x.shape), torch.int64)


@operator("ConstantOfShape")
def _constant_of_shape(shape: Numbers, *, value: Numbers | None = None, context: NodeContext) -> Value:
    value = value or Numbers(0.0, torch.float32)
    sizes = shape.ints()
    _check_size(sizes)
    if not shape.is_symbolic and not value.dtype.is_floating_point and math.prod(sizes) <= MAX_KNOWN:
        return Numbers(np.full(sizes, value.item(), dtype=object), value.dtype)
    return torch.full(sizes, value.item(), dtype=value.dtype, device=context.device)


@operator("Range")
def _range(start: Numbers, limit: Numbers, delta: Numbers, *, stash_type: int = 1, context: NodeContext) -> Value:
    bounds = [start.item(), limit.item(), delta.item()]
    if any(isinstance(bound, _SYMBOLS) for bound in bounds):
        return torch.arange(*bounds, dtype=start.dtype, device=context.device)
    count = max(math.ceil((bounds[1] - bounds[0]) / bounds[2]), 0)
    _check_size([count])
    if count <= MAX_KNOWN:
        return Numbers([bounds[0] + i * bounds[2] for i in range(count)], start.dtype)
    steps: Tensor = torch.arange(count, dtype=start.dtype, device=context.device) * bounds[2]
    return torch.add(steps, bounds[0])


@operator("EyeLike")
def _eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0, context: NodeContext) -> Tensor:
    ones = torch.ones(*x.shape, dtype=x.dtype if dtype is None else _dtype(dtype), device=context.device)
    return ones.triu(k).tril(k)


@operator("OneHot")
def _one_hot(indices: Tensor, depth: Numbers, values: Tensor, *, axis: int = -1, context: NodeContext) -> Tensor:
    size = depth.item()
    _check_size([*indices.shape, size])
    classes = torch.arange(size, device=context.device)
    hot = (_wrap(indices, size).unsqueeze(-1) == classes).movedim(-1, axis)
    return torch.where(hot, values[1], values[0])


# --- arithmetic

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish,
    "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": python.add, "Sub": python.sub, "Mul": python.mul, "Equal": python.eq, "Less": python.lt,
    "LessOrEqual": python.le, "Greater": python.gt, "GreaterOrEqual": python.ge,
}  # fmt: skip
LOGICAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
}  # fmt: skip


def _add_tables() -> None:
    for name, function in UNARY.items():
        OPERATORS[name] = Operator(function, ("Tensor",), 1, False, frozenset(), 1, False)
    for name, binary in BINARY.items():
        OPERATORS[name] = Operator(binary, ("Operand", "Operand"), 2, False, frozenset(), 1, False)
    for name, logical in LOGICAL.items():
        OPERATORS[name] = Operator(logical, ("Tensor", "Tensor"), 2, False, frozenset(), 1, False)


_add_tables()


@operator("Div")
def _div(a: Operand, b: Operand) -> Tensor:
    dtype = next(x.dtype for x in (a, b) if isinstance(x, Tensor))
    if dtype.is_floating_point:
        return a / b  # type: ignore[return-value]  # not both are numbers
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")


@operator("Mod")
def _mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@operator("Pow")
def _pow(x: Tensor, exponent: Operand) -> Tensor:
    return torch.pow(x, exponent).to(x.dtype)


@operator("Min")
def _min(*xs: Tensor) -> Tensor:
    return reduce(torch.minimum, xs)


@operator("Max")
def _max(*xs: Tensor) -> Tensor:
    return reduce(torch.maximum, xs)


@operator("Sum")
def _sum(*xs: Tensor) -> Tensor:
    return reduce(torch.add, xs)


@operator("Mean")
def _mean(*xs: Tensor) -> Tensor:
    return reduce(torch.add, xs) / len(xs)


@operator("Clip")
def _clip(
    x: Tensor,
    low: Operand | None = None,
    high: Operand | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> Tensor:
    low, high = min if low is None else low, max if high is None else high
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        x = x if low is None else torch.maximum(x, torch.as_tensor(low, dtype=x.dtype))
        return x if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype))
    return x if low is None and high is None else x.clamp(low, high)


@operator("Where")
def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Cast")
def _cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(_dtype(to))


@operator("CastLike")
def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(like.dtype)


@operator("IsInf")
def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    return (x == math.inf) & bool(detect_positive) | (x == -math.inf) & bool(detect_negative)


@operator("CumSum")
def _cum_sum(x: Tensor, axis: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = axis.item()
    x = x.flip(dim) if reverse else x
    total = x.cumsum(dim, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(dim) if reverse else total


# --- activations


@operator("LeakyRelu")
def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("PRelu")
def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    per_channel = slope.dim() == x.dim() - 1 and slope.numel() == slope.shape[0] == x.shape[1]
    if slope.numel() == 1 or per_channel:
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@operator("ThresholdedRelu")
def _thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.threshold(x, alpha, 0.0)


@operator("Elu")
def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("Selu")
def _selu(x: Tensor, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Tensor:
    return gamma * F.elu(x, alpha)


@operator("Celu")
def _celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@operator("Gelu")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("HardSigmoid")
def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0.0, 1.0)


@operator("Swish")
def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("Shrink")
def _shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@operator("Softmax")
def _softmax(x: Tensor, *, axis: int | None = None, context: NodeContext) -> Tensor:
    return _along_axis(lambda values, dim: values.softmax(dim), x, axis, context)


@operator("LogSoftmax")
def _log_softmax(x: Tensor, *, axis: int | None = None, context: NodeContext) -> Tensor:
    return _along_axis(lambda values, dim: values.log_softmax(dim), x, axis, context)


def _along_axis(function: Callable[[Tensor, int], Tensor], x: Tensor, axis: int | None, context: NodeContext) -> Tensor:
    if context.opset >= 13:
        return function(x, -1 if axis is None else axis)
    axis = 1 if axis is None else axis % x.dim()  # older operators normalize over all axes from this one on
    return function(x.flatten(axis), axis).reshape(x.shape)


@operator("Dropout")
def _dropout(
    x: Tensor, rate: Numbers | None = None, training_mode: Numbers | None = None, *, ratio: float = 0.5, seed: int = 0
) -> Tensor:
    _expect(not (training_mode and training_mode.item()), "dropout in training mode is random")
    return x


# --- linear operators

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("MatMul")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@operator("Gemm")
def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    a, b = a.T if transA else a, b if transB else b.T
    if alpha == beta == 1.0 and c is not None and c.dim() == 1 and c.shape[0] == b.shape[0]:
        return F.linear(a, b, c)
    product = F.linear(a, b) if alpha == 1.0 else alpha * F.linear(a, b)
    return product if c is None else product + (c if beta == 1.0 else beta * c)


@operator("Einsum")
def _einsum(*xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *xs)


@operator("Conv")
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    window = _Window.of(x, weight.shape[2:], strides, dilations, pads, auto_pad)
    _expect(kernel_shape in (None, list(weight.shape[2:])), f"kernel_shape {kernel_shape} is not that of the weights")
    x, padding = window.pad(x, 0.0)
    return _CONVOLUTIONS[window.axes](x, weight, bias, window.strides, padding, window.dilations, group)


@operator("ConvTranspose")
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    window = _Window.of(x, weight.shape[2:], strides, dilations, pads, "NOTSET")
    _expect(kernel_shape in (None, list(weight.shape[2:])), f"kernel_shape {kernel_shape} is not that of the weights")
    extra, n = output_padding or [0] * window.axes, window.axes
    amounts = window.pads
    full = [
        (size - 1) * s + e + k for size, s, e, k in zip(x.shape[2:], window.strides, extra, window.extents, strict=True)
    ]
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(x.shape[2:], window.strides, strict=True)]
    if output_shape is not None:
        totals = [size - wanted for size, wanted in zip(full, output_shape[-n:], strict=True)]
        halves = [(total // 2, total - total // 2) for total in totals]
        amounts = halves if auto_pad == "SAME_UPPER" else [(end, begin) for begin, end in halves]
    function = _TRANSPOSED[n]
    if all(begin == end >= 0 for begin, end in amounts):
        padding = [begin for begin, _ in amounts]
        return function(x, weight, bias, window.strides, padding, extra, group, window.dilations)
    _expect(max(extra) < max(*window.strides, *window.dilations), "output_padding is too large")
    y = function(x, weight, bias, window.strides, [0] * n, extra, group, window.dilations)
    return F.pad(y, [-amount for pair in reversed(amounts) for amount in pair])


@dataclass(frozen=True)
class _Window:
    """How a kernel moves over an image; lists have one entry per axis."""

    sizes: list[int]
    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int, int]]

    @staticmethod
    def of(
        x: Tensor,
        kernel: Sequence[int],
        strides: list[int] | None,
        dilations: list[int] | None,
        pads: list[int] | None,
        auto_pad: str,
    ) -> _Window:
        n = x.dim() - 2
        _expect(n in _CONVOLUTIONS, f"expected inputs with 1 to 3 spatial axes, got {n}")
        _expect(auto_pad in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), f"unknown auto_pad {auto_pad}")
        strides, dilations = strides or [1] * n, dilations or [1] * n
        pads = (pads if auto_pad == "NOTSET" else None) or [0] * (2 * n)
        lengths = {len(kernel), len(strides), len(dilations), len(pads) // 2}
        _expect(lengths == {n} and min(*kernel, *strides, *dilations) > 0, "sizes of the kernel are not valid")
        window = _Window(
            list(x.shape[2:]), list(kernel), strides, dilations, list(zip(pads[:n], pads[n:], strict=True))
        )
        if not auto_pad.startswith("SAME"):
            return window
        amounts = []
        for size, extent, stride in zip(window.sizes, window.extents, strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            half = total // 2
            amounts.append((half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half))
        return _Window(window.sizes, window.kernel, strides, dilations, amounts)

    @property
    def axes(self) -> int:
        return len(self.kernel)

    @property
    def extents(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def pad(self, x: Tensor, value: float) -> tuple[Tensor, list[int]]:
        """Return the input and the padding for PyTorch, which is the same on both sides; pad the input if it is not."""
        if all(begin == end >= 0 for begin, end in self.pads):
            return x, [begin for begin, _ in self.pads]
        return _pad_ends(x, self.pads, value), [0] * self.axes

    def fits_pooling(self) -> bool:
        """Whether pooling functions of PyTorch support the padding."""
        return all(begin == end and 0 <= 2 * begin <= k for (begin, end), k in zip(self.pads, self.kernel, strict=True))

    def overhang(self, ceil_mode: bool) -> list[tuple[int, int]]:
        """Return padding with which the last window of every axis ends at the border."""
        amounts = []
        for size, (begin, end), stride, extent in zip(self.sizes, self.pads, self.strides, self.extents, strict=True):
            free = size + begin + end - extent
            count = (-(-free // stride) if ceil_mode else free // stride) + 1
            if ceil_mode and (count - 1) * stride >= size + begin:
                count -= 1  # windows that start in the padding do not count
            amounts.append((begin, (count - 1) * stride + extent - size - begin))
        return amounts


def _pad_ends(x: Tensor, amounts: Sequence[tuple[int, int]], value: float) -> Tensor:
    """Pad the last axes of a tensor with a constant; negative amounts crop."""
    _check_size(
        [*x.shape[: -len(amounts)], *(size + sum(a) for size, a in zip(x.shape[-len(amounts) :], amounts, strict=True))]
    )
    return F.pad(x, [amount for pair in reversed(amounts) for amount in pair], value=value)


# --- pooling

_MAX_POOLS: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool")
def _max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
) -> Tensor:
    window = _Window.of(x, kernel_shape, strides, dilations, pads, auto_pad)
    padding, ceil = [begin for begin, _ in window.pads], bool(ceil_mode)
    if not window.fits_pooling():
        x, padding, ceil = _pad_ends(x, window.overhang(ceil), -math.inf), [0] * window.axes, False
    return _MAX_POOLS[window.axes](x, window.kernel, window.strides, padding, window.dilations, ceil)


@operator("AveragePool")
def _average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    context: NodeContext,
) -> Tensor:
    window = _Window.of(x, kernel_shape, strides, dilations, pads, auto_pad)
    if window.fits_pooling() and set(window.dilations) == {1}:
        padding = [begin for begin, _ in window.pads]
        arguments = (window.kernel, window.strides, padding, bool(ceil_mode), bool(count_include_pad))
        return _AVERAGE_POOLS[window.axes](x, *arguments)
    amounts, channels = window.overhang(bool(ceil_mode)), x.shape[1]
    ones = torch.ones(1, 1, *window.sizes, dtype=x.dtype, device=context.device)
    if count_include_pad:
        ones = _pad_ends(ones, window.pads, 1.0)
        rest = [(0, end - old) for (_, end), (_, old) in zip(amounts, window.pads, strict=True)]
        ones = _pad_ends(ones, rest, 0.0)
    else:
        ones = _pad_ends(ones, amounts, 0.0)
    kernel = torch.ones(1, 1, *window.kernel, dtype=x.dtype, device=context.device)
    convolve = _CONVOLUTIONS[window.axes]
    counts = convolve(ones, kernel, None, window.strides, 0, window.dilations)
    kernels = kernel.expand(channels, *kernel.shape[1:])
    x = _pad_ends(x, amounts, 0.0)
    return convolve(x, kernels, None, window.strides, 0, window.dilations, channels) / counts


@operator("GlobalAveragePool")
def _global_average_pool(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


# --- normalization


@operator("BatchNormalization")
def _batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    _expect(not training_mode, "batch normalization in training mode depends on the batch")
    mean, var = (t.detach() if t.requires_grad else t for t in (mean, var))  # shared with a parameter
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)


@operator("InstanceNormalization")
def _instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, epsilon)


@operator("GroupNormalization")
def _group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
    context: NodeContext,
) -> Tensor:
    if context.opset < 21:  # one number per group
        scale, bias = (t.repeat_interleave(x.shape[1] // num_groups) for t in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LayerNormalization")
def _layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    sizes = list(x.shape[axis % x.dim() :])
    if list(scale.shape) == sizes and (bias is None or list(bias.shape) == sizes):
        return F.layer_norm(x, sizes, scale, bias, epsilon)
    normalized = F.layer_norm(x, sizes, None, None, epsilon) * scale
    return normalized if bias is None else normalized + bias


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.rms_norm(x, list(x.shape[axis % x.dim() :]), None, epsilon) * scale


@operator("LpNormalization")
def _lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    norm = x.norm(p, axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("LRN")
def _local_response_normalization(
    x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    channels, rest = x.shape[1], [(0, 0)] * (x.dim() - 2)
    squares = _pad_ends(x.square(), [((size - 1) // 2, size // 2), *rest], 0.0)
    total = reduce(torch.add, [squares[:, i : i + channels] for i in range(size)])
    return x / (bias + alpha / size * total) ** beta


@operator("Attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softmax_precision: int | None = None,
    context: NodeContext,
) -> Tensor:
    joined = query.dim() == 3  # (batch, tokens, heads times width)
    if joined:
        _expect(bool(q_num_heads and kv_num_heads), "the number of heads is missing")
        query = _split_axis(query, 2, q_num_heads or 1, -1).transpose(1, 2)
        key, value = (_split_axis(t, 2, kv_num_heads or 1, -1).transpose(1, 2) for t in (key, value))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is not None and mask.shape[-1] < key.shape[-2]:
        hidden = False if mask.dtype == torch.bool else -math.inf
        mask = F.pad(mask, (0, key.shape[-2] - mask.shape[-1]), value=hidden)
    if is_causal and mask is not None:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=context.device).tril()
        mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -math.inf)
    y = F.scaled_dot_product_attention(query, key, value, mask, 0.0, bool(is_causal) and mask is None, scale=scale)
    return y.transpose(1, 2).flatten(2) if joined else y


# --- shapes


@operator("Flatten")
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis if axis >= 0 else axis + x.dim()
    if axis == 1 and x.dim() > 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Reshape")
def _reshape(
    x: Tensor,
    shape_input: Numbers | None = None,
    *,
    allowzero: int = 0,
    shape: list[int] | None = None,
    context: NodeContext,
) -> Tensor:
    values = shape_input if shape_input is not None else Numbers(shape, torch.int64)
    sizes = _reshape_sizes(x.shape, values, allowzero)
    axis = context.batch_axis
    if axis is not None and context.fixed_batch:
        _expect(sizes[axis] % context.fixed_batch == 0, "the batch size is fixed")
        sizes[axis] = sizes[axis] // context.fixed_batch * context.batch
    return x.reshape(sizes)


def _reshape_sizes(old: Sequence[int], shape: Numbers, allowzero: int) -> list[int]:
    sizes = shape.ints()
    is_zero = [isinstance(size, int) and size == 0 and not allowzero for size in sizes]
    return [old[i] if copied else size for i, (size, copied) in enumerate(zip(sizes, is_zero, strict=True))]


@operator("Transpose")
def _transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(reversed(range(x.dim()))))


@operator("Squeeze")
def _squeeze(x: Tensor, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Tensor:
    chosen = _ints(axes_input, axes)
    if chosen is None:
        return x.squeeze()
    dims = [axis % x.dim() for axis in chosen]
    _expect(all(x.shape[dim] == 1 for dim in dims), f"cannot squeeze axes {chosen} of shape {list(x.shape)}")
    return x.squeeze(dims)


@operator("Unsqueeze")
def _unsqueeze(x: Tensor, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Tensor:
    chosen = _ints(axes_input, axes) or []
    for axis in sorted(axis % (x.dim() + len(chosen)) for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Concat")
def _concat(*xs: Tensor, axis: int, context: NodeContext) -> Tensor:
    if context.fixed_batch and axis % xs[0].dim() and any(context.varies):
        pairs = zip(xs, context.varies, strict=True)
        xs = tuple(x if varies else x[:1].expand(context.batch, *x.shape[1:]) for x, varies in pairs)
    return torch.cat(xs, axis)


@operator("Split", outputs=None)
def _split(
    x: Tensor,
    split_input: Numbers | None = None,
    *,
    axis: int = 0,
    split: list[int] | None = None,
    num_outputs: int | None = None,
    context: NodeContext,
) -> tuple[Tensor, ...]:
    sizes = _split_sizes(x.shape[axis], _ints(split_input, split), num_outputs or context.outputs)
    return torch.split(x, sizes, axis)


def _split_sizes(size: int, sizes: list[int] | None, count: int) -> list[int]:
    if sizes is not None:
        return sizes
    part = -(-size // count)
    return [part] * (count - 1) + [size - part * (count - 1)]


@operator("Slice")
def _slice(
    x: Tensor,
    starts_input: Numbers | None = None,
    ends_input: Numbers | None = None,
    axes_input: Numbers | None = None,
    steps: Numbers | None = None,
    *,
    starts: list[int] | None = None,
    ends: list[int] | None = None,
    axes: list[int] | None = None,
    context: NodeContext,
) -> Tensor:
    for axis, start, end, step in _slices(
        _ints(starts_input, starts), _ints(ends_input, ends), _ints(axes_input, axes), _ints(steps, None)
    ):
        if step > 0:
            index = [slice(None)] * x.dim()
            index[axis] = slice(start, end, step)
            x = x[tuple(index)]
        else:
            x = _select(x, axis, _slice_range(x.shape[axis], start, end, step), context)
    return x


def _slices(
    starts: list[int] | None, ends: list[int] | None, axes: list[int] | None, steps: list[int] | None
) -> list[tuple[int, int, int, int]]:
    """Return axis, start, end and step for every axis."""
    starts, ends = starts or [], ends or []
    axes = list(range(len(starts))) if axes is None else axes
    return list(zip(axes, starts, ends, steps or [1] * len(starts), strict=True))


def _slice_range(size: int, start: int, end: int, step: int) -> list[int]:
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    return list(range(min(max(start, max(low, 0)), high), min(max(end, low), high), step))


def _select(x: Tensor, axis: int, indices: Sequence[int], context: NodeContext) -> Tensor:
    return x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64, device=context.device))


@operator("Gather")
def _gather(x: Tensor, indices: Value, *, axis: int = 0, context: NodeContext) -> Tensor:
    if isinstance(indices, Numbers) and indices.array.ndim == 0 and not indices.is_symbolic:
        return x.select(axis, indices.item())
    index = indices.tensor(context.device) if isinstance(indices, Numbers) else indices
    axis = axis % x.dim()
    if context.fixed_batch == 1 and context.varies == (True, False) and x.dim() == 1 < index.dim() and len(index) == 1:
        # What the exporter makes of as_strided: places in the flat values of one image.
        flat = x.reshape(context.batch, -1)
        return flat.index_select(1, _wrap(index, flat.shape[1]).reshape(-1)).reshape(context.batch, *index.shape[1:])
    index = _wrap(index, x.shape[axis])
    rows = x.index_select(axis, index.reshape(-1))
    return rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _wrap(indices: Tensor, size: int) -> Tensor:
    """Negative indices count from the end."""
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


@operator("GatherElements")
def _gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, _wrap(indices, x.shape[axis]))


@operator("GatherND")
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0, context: NodeContext) -> Tensor:
    depth, sizes = indices.shape[-1], indices.shape[:batch_dims]
    leading = []
    for axis, size in enumerate(sizes):
        shape = [size if i == axis else 1 for i in range(indices.dim() - 1)]
        leading.append(torch.arange(size, device=context.device).reshape(shape))
    return x[(*leading, *(indices[..., i].long() for i in range(depth)))]


@operator("ScatterElements")
def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    _expect(reduction == "none", f"the reduction {reduction} is not supported")
    return x.scatter(axis, _wrap(indices, x.shape[axis]), updates)


@operator("ScatterND")
def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    _expect(reduction in ("none", "add"), f"the reduction {reduction} is not supported")
    places = tuple(indices[..., i].long() for i in range(indices.shape[-1]))
    return x.index_put(places, updates, accumulate=reduction == "add")


@operator("Expand")
def _expand(x: Tensor, shape: Numbers, *, context: NodeContext) -> Tensor:
    sizes = shape.ints()
    if context.fixed_batch and context.varies[0] and len(sizes) == x.dim() and sizes[0] == context.fixed_batch:
        sizes = [1, *sizes[1:]]  # the input has its own batch size
    _check_size(sizes)
    return x.expand(_expand_sizes(x.shape, sizes))


def _expand_sizes(old: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Sizes after broadcasting; comparisons with the batch size would turn it into a constant."""
    rank = max(len(old), len(sizes))
    pairs = zip([1] * (rank - len(old)) + list(old), [1] * (rank - len(sizes)) + list(sizes), strict=True)
    return [a if isinstance(b, int) and b == 1 else b for a, b in pairs]


@operator("Tile")
def _tile(x: Tensor, repeats: Numbers) -> Tensor:
    counts = repeats.ints()
    _check_size([size * count for size, count in zip(x.shape, counts, strict=True)])
    return x.repeat(counts)


@operator("Trilu")
def _trilu(x: Tensor, k: Numbers | None = None, *, upper: int = 1) -> Tensor:
    diagonal = k.item() if k else 0
    return x.triu(diagonal) if upper else x.tril(diagonal)


def _split_axis(x: Tensor, axis: int, *sizes: int) -> Tensor:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


@operator("DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    x = _split_axis(x, 1, blocksize, blocksize, -1).permute(0, 3, 4, 1, 5, 2)
    return x.flatten(4).flatten(2, 3)


@operator("SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    x = _split_axis(_split_axis(x, 3, -1, blocksize), 2, -1, blocksize)
    return x.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


@operator("Pad")
def _pad(
    x: Tensor,
    pads_input: Numbers | None = None,
    constant: Numbers | None = None,
    axes: Numbers | None = None,
    *,
    mode: str = "constant",
    pads: list[int] | None = None,
    value: float = 0.0,
    context: NodeContext,
) -> Tensor:
    amounts = _ints(pads_input, pads) or []
    chosen = [axis % x.dim() for axis in axes.ints()] if axes else list(range(x.dim()))
    pairs = dict(zip(chosen, zip(amounts[: len(chosen)], amounts[len(chosen) :], strict=True), strict=True))
    if mode == "constant":
        return _pad_ends(
            x, [pairs.get(axis, (0, 0)) for axis in range(x.dim())], constant.item() if constant else value
        )
    _expect(mode in ("reflect", "edge", "wrap"), f"the mode {mode} is not supported")
    for axis, (begin, end) in pairs.items():
        if begin or end:
            _check_size([*(size for i, size in enumerate(x.shape) if i != axis), x.shape[axis] + begin + end])
            places = np.pad(np.arange(x.shape[axis]), (max(begin, 0), max(end, 0)), mode=mode)  # type: ignore[call-overload]
            x = _select(x, axis, places[max(-begin, 0) : len(places) - max(-end, 0)], context)
    return x


# --- reductions

_Axes = list[int]
_REDUCTIONS: dict[str, Callable[[Tensor, _Axes, bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keep),
    "ReduceProd": lambda x, axes, keep: _product(x, axes, keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keep, dtype=x.dtype),
}


def _product(x: Tensor, axes: _Axes, keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep, dtype=x.dtype)
    return x


def _add_reduction(name: str, function: Callable[[Tensor, _Axes, bool], Tensor]) -> None:
    @operator(name)
    def reduction(
        x: Tensor,
        axes_input: Numbers | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        chosen = [axis % x.dim() for axis in _ints(axes_input, axes) or []]
        if not chosen and noop_with_empty_axes:
            return function(x.unsqueeze(-1), [x.dim()], False)
        return function(x, chosen or list(range(x.dim())), bool(keepdims))


for _name, _function in _REDUCTIONS.items():
    _add_reduction(_name, _function)


@operator("ArgMax")
def _arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    if select_last_index:
        return x.shape[axis] - 1 - x.flip(axis).argmax(axis, bool(keepdims))
    return x.argmax(axis, bool(keepdims))


@operator("ArgMin")
def _arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _arg_max(-x, axis=axis, keepdims=keepdims, select_last_index=select_last_index)


@operator("TopK", outputs=2)
def _top_k(
    x: Tensor, count: Numbers | None = None, *, axis: int = -1, k: int = 0, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(count.item() if count else k, axis, bool(largest), True)
    return values, indices


# --- resizing


@operator("Resize")
def _resize(
    x: Tensor,
    roi: Numbers | None = None,
    scales: Numbers | None = None,
    sizes: Numbers | None = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    context: NodeContext,
) -> Tensor:
    if context.opset < 11:
        return _upsample(x, roi, mode=mode, context=context)  # the second input has the scales
    _expect(not antialias, "antialiasing is not supported")
    chosen = [axis % x.dim() for axis in axes] if axes else list(range(x.dim()))
    old = [x.shape[axis] for axis in chosen]
    if sizes is not None and sizes.array.size:
        factors = [new / size if isinstance(size, int) else 1.0 for new, size in zip(sizes.ints(), old, strict=True)]
        new_sizes = sizes.ints()
        if keep_aspect_ratio_policy != "stretch":
            choose = {"not_larger": min, "not_smaller": max}[keep_aspect_ratio_policy]
            factors = [choose(factors)] * len(factors)
            new_sizes = [math.floor(size * factor + 0.5) for size, factor in zip(old, factors, strict=True)]
    else:
        _expect(scales is not None and len(scales.ints()) == len(old), "expected one scale per axis")
        factors = [float(scale) for scale in scales.ints()]  # type: ignore[union-attr]
        pairs = list(zip(old, factors, strict=True))
        new_sizes = [size if scale == 1.0 else math.floor(size * scale) for size, scale in pairs]
        is_whole = all(scale == 1.0 or (size * scale).is_integer() for size, scale in pairs)
        is_clear = is_whole or coordinate_transformation_mode != "align_corners"
        _expect(is_clear, "align_corners is supported only for whole sizes")  # ONNX and ONNX Runtime disagree on others
    for axis, size, factor in zip(chosen, new_sizes, factors, strict=True):
        if axis == 0 and context.fixed_batch and context.varies[0]:
            continue
        if factor != 1.0 or (isinstance(size, int) and isinstance(x.shape[axis], int) and size != x.shape[axis]):
            _check_size([*(n for i, n in enumerate(x.shape) if i != axis), size])
            places = _coordinates(coordinate_transformation_mode, x.shape[axis], size, factor)
            taps = _taps(mode, places, x.shape[axis], nearest_mode, cubic_coeff_a, bool(exclude_outside))
            x = _interpolate(x, axis, taps, context)
    return x


@operator("Upsample")
def _upsample(
    x: Tensor,
    scales_input: Numbers | None = None,
    *,
    mode: str = "nearest",
    scales: list[float] | None = None,
    context: NodeContext,
) -> Tensor:
    factors = scales_input if scales_input is not None else Numbers(scales, torch.float32)
    newer = replace(context, opset=11)
    return _resize(
        x, None, factors, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor", context=newer
    )


def _coordinates(mode: str, old: int, new: int, scale: float) -> np.ndarray:
    """Return the position in the input of every output along an axis."""
    places = np.arange(new, dtype=np.float64)
    if mode == "align_corners":
        return places * (old - 1) / (new - 1) if new > 1 else places * 0
    if mode == "asymmetric":
        return places / scale
    if mode == "tf_half_pixel_for_nn":
        return (places + 0.5) / scale
    if mode == "pytorch_half_pixel" and new == 1:
        return places * 0
    _expect(mode in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"), f"the mode {mode} is not supported")
    offset = old / 2 * (1 - new / (scale * old)) if mode == "half_pixel_symmetric" else 0.0
    return offset + (places + 0.5) / scale - 0.5


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _taps(
    mode: str, places: np.ndarray, size: int, nearest_mode: str, a: float, exclude_outside: bool
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return the inputs that contribute to every output, with their weights; None means a weight of 1."""
    if mode == "nearest":
        return [(np.clip(_NEAREST[nearest_mode](places), 0, size - 1), None)]
    low = np.floor(places)
    t = places - low
    if mode in ("linear", "bilinear"):
        offsets, weights = [0, 1], [1 - t, t]
    else:
        _expect(mode == "cubic", f"the mode {mode} is not supported")
        offsets, weights = [-1, 0, 1, 2], [_cubic(np.abs(t - offset), a) for offset in (-1, 0, 1, 2)]
    if exclude_outside:
        inside = [(low + offset >= 0) & (low + offset < size) for offset in offsets]
        weights = [weight * mask for weight, mask in zip(weights, inside, strict=True)]
        total = sum(weights)
        weights = [weight / total for weight in weights]
    return [(np.clip(low + offset, 0, size - 1), weight) for offset, weight in zip(offsets, weights, strict=True)]


def _cubic(t: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.asarray(np.where(t <= 1, near, far))


def _interpolate(
    x: Tensor, axis: int, taps: list[tuple[np.ndarray, np.ndarray | None]], context: NodeContext
) -> Tensor:
    parts = []
    for places, weights in taps:
        part = _select(x, axis, places.astype(np.int64).tolist(), context)
        if weights is not None:
            shape = [-1 if i == axis else 1 for i in range(x.dim())]
            part = part * torch.tensor(weights.tolist(), dtype=x.dtype, device=context.device).reshape(shape)
        parts.append(part)
    return reduce(torch.add, parts)


# --- quantization


@operator("QuantizeLinear")
def _quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """Round to integers, which stay floating-point numbers so that the gradient exists; it is zero."""
    _expect(not block_size, "quantization in blocks is not supported")
    dtype = zero_point.dtype if zero_point is not None else _dtype(output_dtype or 2)
    limits = torch.iinfo(dtype)
    values = torch.round(x / _per_axis(scale, x, axis))
    if zero_point is not None:
        values = values + _per_axis(zero_point, x, axis).to(x.dtype)
    return values.clamp(limits.min, limits.max)


@operator("DequantizeLinear")
def _dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    _expect(not block_size, "quantization in blocks is not supported")
    values = x.to(scale.dtype)
    if zero_point is not None:
        values = values - _per_axis(zero_point, x, axis).to(scale.dtype)
    result = values * _per_axis(scale, x, axis)
    return result.to(_dtype(output_dtype)) if output_dtype else result


def _per_axis(values: Tensor, x: Tensor, axis: int) -> Tensor:
    if values.numel() == 1:
        return values.reshape(())
    _expect(values.dim() == 1, "quantization in blocks is not supported")
    return values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
