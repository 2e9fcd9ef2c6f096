r"""Certification rules of operations: Lipschitz constant, rounding error and overflow.

A rule takes a ``Call`` and returns a ``Value`` (or several, for operations with several results; None for a result
that cannot be certified).  To add an operation, write a function with the decorator ``@rule("its ATen name")``.  Graphs
with other operations are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.certify.bounds import Bound, Error, Precision, Selection, Value, hypot, norm
from atoll.certify.linear import Dense, Diagonal, convolution
from atoll.certify.propagation import (
    BATCHES,
    Call,
    Refusal,
    Rule,
    as_linear,
    entries,
    joined,
    most_repeats,
    numbered,
    operation_kind,
    selection_of,
)

RULES: dict[str, Rule] = {}

# Upper bounds of the largest slopes.
GELU_SLOPE = 1.13  # 1.12890... for GELU and its tanh approximation
SILU_SLOPE = 1.1  # 1.09984...
MISH_SLOPE = 1.09  # 1.08850...
ERF_SLOPE = 1.13  # 2 / sqrt(pi) = 1.12838...


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, by ATen name without the overload."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# --- linear operations with weights


@rule("linear")
def _linear(call: Call) -> Value:
    weight, bias = call.constant("weight"), call.constant("bias")
    assert weight is not None
    return call.linear(call.value("input"), Dense(weight), bias)


@rule("addmm")
def _addmm(call: Call) -> Value:
    shift, matrix = call.constant("self"), call.constant("mat2")
    assert shift is not None
    assert matrix is not None
    if call["alpha"] != 1 or call["beta"] != 1:
        raise Refusal("expected alpha = beta = 1")
    shift = call.propagation.per_point(shift, (matrix.shape[1],))
    return call.linear(call.value("mat1"), Dense(matrix.T), shift)


@rule("mm", "matmul")
def _matmul(call: Call) -> Value:
    right = "mat2" if operation_kind(call.node) == "mm" else "other"
    if not isinstance(call[right], Value):
        matrix = call.constant(right)
        assert matrix is not None
        if matrix.dim() != 2 or len(call.value("self").shape) < 1:
            raise Refusal("expected a matrix as the second factor")
        return call.linear(call.value("self"), Dense(matrix.T))
    matrix, value = call.constant("self"), call.value(right)
    assert matrix is not None
    if matrix.dim() != 2 or len(value.shape) < 2:
        raise Refusal("it mixes the points of a batch")
    dense = Dense(matrix)
    return call.operator(value, dense.norm(call.propagation.budget).value, dense.spread, dense.terms)


@rule("convolution")
def _convolution(call: Call) -> Value:
    weight, bias, value = call.constant("weight"), call.constant("bias"), call.value("input")
    assert weight is not None
    if weight.dim() not in (3, 4):
        raise Refusal("expected a convolution in one or two dimensions")
    spatial = call.result.shape[2:] if call["transposed"] else None
    stride, padding, dilation = (_sizes(call[name], weight.dim() - 2) for name in ("stride", "padding", "dilation"))
    output = tuple(spatial) if spatial is not None else None
    linear = convolution(weight, value.shape[1:], stride, padding, dilation, call["groups"], output)
    return call.linear(value, linear, None if bias is None else bias.view(-1, *[1] * (weight.dim() - 2)))


def _sizes(values: Any, count: int) -> tuple[int, ...]:
    sizes: tuple[int, ...] = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    return sizes * count if len(sizes) == 1 else sizes


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(call: Call) -> tuple[Value | None, ...]:
    r"""Rule for batch norm with mean, variance, factor and shift in any order; shift and mean may cancel."""
    value = call.value("input")
    mean, variance = call.constant("running_mean"), call.constant("running_var")
    weight, bias = call.constant("weight"), call.constant("bias")
    assert mean is not None
    assert variance is not None
    if not (variance >= 0).all() or not (variance + call["eps"] > 0).all():
        raise Refusal("expected positive running variances")
    factor = (variance + call["eps"]).rsqrt() * (1 if weight is None else weight)
    shape = (-1, *[1] * (len(value.shape) - 1))
    diagonal = Diagonal(factor.view(shape), 8 * 2.0**-53 * float(factor.abs().max()))
    zero = call.result[0]
    shifts = (2 * mean * factor).abs() + (0 if bias is None else bias.abs())
    composed = _call_linear(call, value, diagonal, zero, shifts.view(shape).expand(value.shape), terms=12)
    return composed, None, None


def _call_linear(call: Call, value: Value, diagonal: Diagonal, zero: Tensor, shifts: Tensor, terms: int) -> Value:
    """Apply a diagonal map with a known result at zero; ``terms`` bounds the number of roundings."""
    precision = call.precision
    relation = call.composed(value, diagonal)
    if relation is None:
        value, relation = call.propagation.anchor(value), diagonal
    rounding = call.rounding(value, diagonal.spread, terms, zero.numel(), norm(shifts))
    # The factor itself may be subnormal and flushed to zero.
    rounding = rounding + value.magnitude.times(terms * precision.tiny)
    return call.named(Value(value.base, relation, zero, value.local.times(diagonal.spread) + rounding))


# --- arithmetic


@rule("add", "sub")
def _add(call: Call) -> Value:
    kind, alpha = operation_kind(call.node), call.arguments.get("alpha", 1)
    left, right = call["self"], call["other"]
    signs = (1, alpha if kind == "add" else -alpha)
    if isinstance(left, Value) and isinstance(right, Value):
        return _sum(call, left, right, signs)
    value, constant = (left, right) if isinstance(left, Value) else (right, left)
    sign = signs[0] if isinstance(left, Value) else signs[1]
    tensor = call.propagation.per_point(call.propagation.finite(constant), value.shape)
    value = _expanded(call, value)
    return call.linear(value, _number(sign), tensor * (signs[1] if isinstance(left, Value) else signs[0]))


def _number(value: float) -> Diagonal:
    return Diagonal(torch.tensor(float(value), dtype=torch.float64))


def _sum(call: Call, left: Value, right: Value, signs: tuple[float, float]) -> Value:
    propagation, zero = call.propagation, call.result
    left, right = (_expanded(call, value) for value in (left, right))
    factors = [abs(sign) for sign in signs]
    parts = list(zip((left, right), factors, strict=True))
    terms = Error()
    for value, factor in parts:
        terms = terms + value.magnitude.times(factor)
    propagation.limit(terms, call.precision)
    unit, tiny = call.precision.unit, call.precision.tiny
    rounding = terms.times(3 * unit) + Error(0.0, 4 * tiny * math.sqrt(zero.numel()))
    common = propagation.common_base(left, right)
    if common is not None:
        maps = [as_linear(value).scaled(_number(sign)) for value, sign in zip(common, signs, strict=True)]
        total = maps[0].plus(maps[1]) if maps[0] is not None and maps[1] is not None else None
        if total is not None:
            local = common[0].local.times(factors[0]) + common[1].local.times(factors[1]) + rounding
            return call.named(Value(common[0].base, total, zero, local))
    lipschitz, error = 0.0, rounding
    for value, factor in parts:
        bound = propagation.bound(value)
        lipschitz, error = lipschitz + factor * bound.lipschitz, error + bound.error.times(factor)
    return call.anchored(Bound(lipschitz, 0.0, error.relative, error.absolute), zero)


def _expanded(call: Call, value: Value) -> Value:
    """Broadcast a value to the shape of the result; repeated entries count as often as they are repeated."""
    shape = tuple(call.result.shape[1:])
    if value.shape == shape:
        return value
    if len(value.shape) != len(shape):
        raise Refusal("it mixes the points of a batch")
    if not isinstance(value.relation, Selection):
        value = call.propagation.anchor(value)
    selection = selection_of(value)
    slope = selection.slope.expand(shape) if isinstance(selection.slope, Tensor) else selection.slope
    repeated = Selection(entries(value).expand(shape), slope, selection.linear)
    times = math.prod(shape) / value.size
    return replace(value, relation=repeated, zero=value.zero.expand(1, *shape), local=value.local.times(times**0.5))


@rule("mul", "div")
def _mul(call: Call) -> Value:
    left, right = call["self"], call["other"]
    division = operation_kind(call.node) == "div"
    if call.arguments.get("rounding_mode") is not None:
        raise Refusal("it rounds to integers")
    if isinstance(left, Value) and isinstance(right, Value):
        raise Refusal("it combines two values that depend on the input")
    if division and isinstance(right, Value):
        raise Refusal("it divides by a value that depends on the input")
    value, constant = (left, right) if isinstance(left, Value) else (right, left)
    weight = call.propagation.per_point(call.propagation.finite(constant), value.shape)
    error = 0.0
    if division:
        weight = 1 / weight
        if not weight.isfinite().all():
            raise Refusal("it divides by zero")
        error = 2 * 2.0**-53 * float(weight.abs().max())
    value = _expanded(call, value)
    diagonal, zero = Diagonal(weight, error), call.result
    return _call_linear(call, value, diagonal, zero, torch.zeros(()), terms=6)


@rule("neg")
def _neg(call: Call) -> Value:
    return call.linear(call.value("self"), _number(-1))


@rule("mean", "sum")
def _mean(call: Call) -> Value:
    value, dims = call.value("self"), call.arguments.get("dim")
    if not dims:
        raise Refusal("it mixes the points of a batch")
    _keep_batch(call, dims)
    count = value.size // call.result.numel() if call.result.numel() else 1
    root = math.sqrt(count) * (1 + 1e-15)
    gain = root / count if operation_kind(call.node) == "mean" else root
    call.propagation.limit(value.magnitude.times(root), call.precision)  # the sum before it is divided
    return call.operator(value, gain, gain, count + 2)


@rule("cumsum")
def _cumsum(call: Call) -> Value:
    _keep_batch(call, [call["dim"]])
    return _non_negative(call, call.value("self").size)


@rule("avg_pool2d")
def _average_pool(call: Call) -> Value:
    value = call.value("self")
    kernel, padding = (_sizes(call[name], 2) for name in ("kernel_size", "padding"))
    stride = _sizes(call["stride"], 2) if call["stride"] else kernel
    terms = math.prod(kernel)
    pads = any(padding) and not call["count_include_pad"]
    if len(value.shape) != 3 or call["ceil_mode"] or call.arguments.get("divisor_override") or pads:
        return _non_negative(call, terms)
    # All weights are positive, so the norm equals that of their absolute values.
    window = torch.full((1, 1, *kernel), 1 / terms, dtype=torch.float64)
    linear = convolution(window, value.shape[1:], stride, padding, (1, 1), 1)
    norm = linear.norm(call.propagation.budget).value * (1 + 1e-12)
    call.propagation.limit(value.magnitude.times(math.sqrt(terms)), call.precision)  # sums before they are divided
    return call.operator(value, norm, norm, terms)


@rule("_adaptive_avg_pool2d", "upsample_bilinear2d", "upsample_nearest2d")
def _interpolate(call: Call) -> Value:
    name = "self" if "self" in call.arguments else "input"
    # Additional terms, because the weights depend on positions that are also computed.
    return _non_negative(call, call.value(name).size + 16, name)


def _non_negative(call: Call, terms: int, name: str = "self") -> Value:
    """Apply a linear map with weights >= 0; by Schur's test, its squared norm is at most row sum times column sum."""
    value = call.value(name)
    with torch.enable_grad():
        ones = torch.ones(1, *value.shape, dtype=torch.float64, requires_grad=True)
        sums = call.run({name: ones})
        (columns,) = torch.autograd.grad(sums.sum(), ones)
    if sums.numel() and (sums.min() < 0 or columns.min() < 0):
        raise Refusal("its weights are negative")
    norm = math.sqrt(float(sums.detach().max()) * float(columns.max())) * (1 + 1e-9)
    # Averages add before they divide.
    call.propagation.limit(value.magnitude.times(max(1.0, norm) * math.sqrt(value.size)), call.precision)
    return call.operator(value, norm, norm, terms)


# --- operations that move entries


def _keep_batch(call: Call, dims: Any, name: str = "self") -> None:
    value = call[name]
    count = len(value.shape) + 1
    if any(dim % count == 0 for dim in dims):
        raise Refusal("it mixes the points of a batch")


@rule(
    "alias", "clone", "constant_pad_nd", "detach", "expand", "flip", "im2col", "index_select", "pad",
    "permute", "reflection_pad1d", "reflection_pad2d", "repeat", "replication_pad1d", "replication_pad2d", "select",
    "slice", "squeeze", "unfold", "unsqueeze", "view",
)  # fmt: skip
def _move(call: Call) -> Value:
    name = "input" if "input" in call.arguments else "self"
    value = call.value(name)
    _check_dims(call, name)
    index = _moved(call, name, numbered(value))
    if not isinstance(value.relation, Selection):
        value = call.propagation.anchor(value)
    return _reindexed(call, value, index)


@rule("split_with_sizes")
def _split(call: Call) -> tuple[Value, ...]:
    value = call.value("self")
    _keep_batch(call, [call["dim"]])
    if not isinstance(value.relation, Selection):
        value = call.propagation.anchor(value)
    parts = call.run({"self": numbered(value)[None]})
    zeros = call.result
    return tuple(_reindexed(call, value, part[0], zero) for part, zero in zip(parts, zeros, strict=True))


def _check_dims(call: Call, name: str) -> None:
    dims = [call[key] for key in ("dim", "dims", "dimension") if key in call.arguments]
    flat = [d for dim in dims for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    kind = operation_kind(call.node)
    if kind in ("permute", "unsqueeze", "squeeze"):
        return  # checked by the shape of the result
    if kind == "slice" and flat == [0]:
        start, end = call["start"], call["end"]
        if start not in (None, 0) or call["step"] != 1 or not (end is None or (isinstance(end, int) and end >= 2**62)):
            raise Refusal("it mixes the points of a batch")
        return
    _keep_batch(call, flat, name)


def _moved(call: Call, name: str, numbers: Tensor) -> Tensor:
    """Find where each entry of the result comes from (0 for a constant) by moving numbers; points must not mix."""
    changes: dict[str, Any] = {"value": 0.0} if isinstance(call.arguments.get("value"), (int, float)) else {}
    results = []
    for batch in BATCHES:
        steps = (numbers.numel() + 1) * torch.arange(batch, dtype=torch.float64)  # no row has a number that is a step
        rows = numbers[None] + steps.view(-1, *[1] * numbers.dim())
        moved = call.run({name: rows}, batch, **changes)
        if moved.dim() == 0 or len(moved) != batch:
            raise Refusal("it mixes the points of a batch")
        own = torch.where(moved == 0, 0.0, moved - steps.view(-1, *[1] * (moved.dim() - 1)))
        if not (own == own[:1]).all() or own.min() < 0 or own.max() > numbers.numel():
            raise Refusal("it mixes the points of a batch")
        results.append(own[0])
    if not torch.equal(*results):
        raise Refusal("it mixes the points of a batch")
    return results[0]


def _reindexed(call: Call, value: Value, index: Tensor, zero: Tensor | None = None) -> Value:
    """Return a selection of the entries of a value that is itself a selection."""
    zero, selection = call.result if zero is None else zero, selection_of(value)
    count = value.size
    in_order = index.numel() == count and torch.equal(index.flatten(), numbered(value).flatten())
    if in_order and selection.index is None and not isinstance(selection.slope, Tensor):
        return call.named(replace(value, zero=zero))
    place, nothing = index.long(), torch.zeros(1, dtype=torch.float64)
    repeats = math.sqrt(most_repeats(place, count))
    source = torch.cat([nothing, entries(value).flatten()])[place]
    slope = selection.slope
    if isinstance(slope, Tensor):
        slope = torch.cat([nothing, slope.expand(value.shape).flatten()])[place]
    moved = Selection(source, slope, selection.linear)
    return call.named(replace(value, relation=moved, zero=zero, local=value.local.times(repeats)))


@rule("full_like")
def _full_like(call: Call) -> Tensor:
    """Return a constant in the shape of a value."""
    return call.propagation.row_constant(call.result.to(call.node.meta["val"].dtype))


@rule("_to_copy")
def _to_copy(call: Call) -> Value:
    """Rule for a change of precision, which is exact from float32 to float64."""
    value, precision = call.value("self"), call.precision
    before = Precision.of(call.node.all_input_nodes[0].meta["val"].dtype)
    if precision.unit <= before.unit:
        return call.named(value)
    call.propagation.limit(value.magnitude, precision)
    lost = value.magnitude.times(precision.unit) + Error(0.0, precision.tiny * math.sqrt(value.size))
    return call.named(replace(value, local=value.local + lost))


@rule("cat")
def _cat(call: Call) -> Value:
    propagation, tensors = call.propagation, call["tensors"]
    shapes = [t.shape if isinstance(t, Value) else tuple(t.shape[1:]) for t in tensors]
    dim = call["dim"] % (len(shapes[0]) + 1)
    if dim == 0:
        raise Refusal("it mixes the points of a batch")
    values = [t for t in tensors if isinstance(t, Value)]
    zeros = [t.zero if isinstance(t, Value) else propagation.finite(t)[:1] for t in tensors]
    zero = torch.cat(zeros, dim)
    join = joined(propagation, values)
    if join is None:
        bounds = [propagation.bound(value) for value in values]
        error = Error.joint([bound.error for bound in bounds])
        lipschitz = hypot(*(bound.lipschitz for bound in bounds)) * (1 + 1e-12)
        return call.anchored(Bound(lipschitz, 0.0, error.relative, error.absolute), zero)
    base, parts = join
    pieces = iter(parts)
    columns: list[tuple[Tensor, Tensor]] = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        if isinstance(tensor, Value):
            part = next(pieces)
            slope = torch.as_tensor(selection_of(part).slope, dtype=torch.float64).expand(shape)
            columns.append((entries(part).view(shape), slope))
        else:
            columns.append((torch.zeros(shape, dtype=torch.float64),) * 2)
    index, slope = (torch.cat(list(column), dim - 1) for column in zip(*columns, strict=True))
    linear = all(selection_of(part).linear for part in parts)
    local = Error.joint([part.local for part in parts])
    uniform = float(slope.max()) if (slope == slope.max()).logical_or(index == 0).all() else slope
    return call.named(Value(base, Selection(index, uniform, linear), zero, local))


# --- minimum, maximum, sorting


@rule("minimum", "maximum")
def _minimum(call: Call) -> Value:
    r"""Rule for elementwise extremes: :math:`|\Delta \min(a, b)|^2 \le \Delta a^2 + \Delta b^2` for each entry."""
    propagation, left, right = call.propagation, call["self"], call["other"]
    if not (isinstance(left, Value) and isinstance(right, Value)):
        value = left if isinstance(left, Value) else right
        propagation.finite(right if isinstance(left, Value) else left)
        return call.elementwise(_expanded(call, value), 1.0)
    left, right = (_expanded(call, value) for value in (left, right))
    left, right = (v if isinstance(v.relation, Selection) else propagation.anchor(v) for v in (left, right))
    zero = call.result
    if left.base is right.base:
        pair = torch.stack([entries(left), entries(right)])
        slopes = [torch.as_tensor(selection_of(v).slope, dtype=torch.float64).expand(v.shape) for v in (left, right)]
        gain, before = Selection(pair, torch.stack(slopes)).gain, left.base.bound
        error = before.error.times(gain) + Error.joint([left.local, right.local])
        bound = Bound(gain * before.lipschitz, 0.0, error.relative, error.absolute)
    else:
        bounds = [propagation.bound(value) for value in (left, right)]
        error = Error.joint([bound.error for bound in bounds])
        lipschitz = hypot(*(bound.lipschitz for bound in bounds)) * (1 + 1e-12)
        bound = Bound(lipschitz, 0.0, error.relative, error.absolute)
    value = call.anchored(bound, zero)
    kind = operation_kind(call.node)
    order = ("minimum" if kind == "minimum" else "maximum", left, right)
    return replace(value, base=replace(value.base, order=order))  # type: ignore[arg-type]


@rule("amax", "amin")
def _extreme(call: Call) -> Value:
    if not call["dim"]:
        raise Refusal("it mixes the points of a batch")
    _keep_batch(call, call["dim"])
    return call.exact(call.value("self"), 1.0)


@rule("max", "min", "sort", "topk")
def _sort(call: Call) -> tuple[Value, None]:
    """Rule for sorting, which does not increase distances, nor does a part of the result; indices have no bound."""
    if "dim" not in call.arguments:
        raise Refusal("it mixes the points of a batch")
    _keep_batch(call, [call["dim"]])
    return call.exact(call.value("self"), 1.0, call.result[0]), None


@rule("max_pool2d_with_indices", "adaptive_max_pool2d")
def _max_pool(call: Call) -> tuple[Value, None]:
    """Rule for max-pooling: the squared constant is the largest number of windows that contain an entry."""
    value = call.value("self")
    if operation_kind(call.node) == "adaptive_max_pool2d":
        sizes = zip(value.shape[-2:], call["output_size"], strict=True)
        windows = math.prod(
            1 if size % out == 0 else 2 if out <= size else math.ceil(out / size) + 1 for size, out in sizes
        )
    else:
        kernel, dilation = _sizes(call["kernel_size"], 2), _sizes(call["dilation"], 2)
        stride = _sizes(call["stride"], 2) if call["stride"] else kernel
        sides = zip(kernel, stride, dilation, strict=True)
        windows = math.prod(math.ceil(k * math.gcd(s, d) / s) for k, s, d in sides)
    return call.exact(value, math.sqrt(windows) * (1 + 1e-15), call.result[0]), None


# --- functions of every entry


def _function(slope: float, roundings: int = 0, *, size: float = 0.0) -> Rule:
    def apply(call: Call) -> Value:
        name = "input" if "input" in call.arguments else "self"
        return call.elementwise(call.value(name), slope, roundings, size=size)

    return apply


# Lipschitz constants, and rounding errors relative to |t| and to a size; see `Call.elementwise`.
RULES.update(
    abs=_function(1.0),
    atan=_function(1.0, 8),
    cos=_function(1.0, 8, size=1.0),
    erf=_function(ERF_SLOPE, 8),
    gelu=_function(GELU_SLOPE, 16),
    log_sigmoid=_function(1.0, 8, size=1.0),
    mish=_function(MISH_SLOPE, 16),
    relu=_function(1.0),
    sigmoid=_function(0.25, 16, size=1.0),
    silu=_function(SILU_SLOPE, 16),
    sin=_function(1.0, 8),
    tanh=_function(1.0, 8),
)


@rule("clamp", "hardtanh")
def _clamp(call: Call) -> Value:
    limits = [call[name] for name in ("min", "max", "min_val", "max_val") if call.arguments.get(name) is not None]
    if any(isinstance(limit, Value) for limit in limits):
        raise Refusal("its bounds depend on the input")
    sizes = [float(torch.as_tensor(limit).double().nan_to_num(0, 0, 0).abs().max()) for limit in limits]
    return call.elementwise(_expanded(call, call.value("self")), 1.0, 1, size=max(sizes, default=0.0))


@rule("hardsigmoid", "hardswish")
def _hard(call: Call) -> Value:
    """Rule for hardsigmoid and hardswish; PyTorch multiplies by 1/6 in float32 in every precision."""
    value, slope = call.value("self"), 0.166667 if operation_kind(call.node) == "hardsigmoid" else 1.50001
    result = call.elementwise(value, slope, 8, size=3.0)
    factor = value.magnitude.times(1e-6) + Error(0.0, 1e-6 * math.sqrt(value.size))
    return replace(result, local=result.local + factor)


@rule("leaky_relu")
def _leaky_relu(call: Call) -> Value:
    return call.elementwise(call.value("self"), max(1.0, abs(call["negative_slope"])), 2)


@rule("_prelu_kernel")
def _prelu(call: Call) -> Value:
    weight = call.constant("weight")
    assert weight is not None
    return call.elementwise(call.value("self"), max(1.0, float(weight.abs().max())), 2)


@rule("elu", "celu")
def _elu(call: Call) -> Value:
    alpha = abs(float(call["alpha"]))
    if operation_kind(call.node) == "celu":  # alpha (exp(t / alpha) - 1)
        if not alpha > 0 or call["alpha"] < 0:
            raise Refusal(f"expected alpha > 0, got {call['alpha']}")
        return call.elementwise(call.value("self"), 1.0, 16, size=alpha)
    scale, inner = abs(float(call["scale"])), float(call["input_scale"])
    if inner < 0:
        raise Refusal(f"expected input_scale >= 0, got {inner}")
    return call.elementwise(call.value("self"), scale * max(1.0, alpha * inner), 16, size=scale * alpha)


@rule("softplus")
def _softplus(call: Call) -> Value:
    """Rule for softplus; PyTorch switches to the identity above a threshold, and the jump counts as an error."""
    value, beta, threshold = call.value("self"), float(call["beta"]), float(call["threshold"])
    limit = math.log(call.precision.largest) - 1
    if not (beta > 0 and threshold <= limit):
        raise Refusal(f"expected beta > 0 and a threshold up to {limit:.0f}, got {beta} and {threshold}")
    call.propagation.limit(value.magnitude.times(beta), call.precision)
    size = 1 / beta
    jump = math.log1p(math.exp(-threshold)) / beta if threshold > -limit else math.inf
    return call.elementwise(value, 1.0, 16, size=size, jump=jump * 1.001)


@rule("threshold")
def _threshold(call: Call) -> Value:
    if call["threshold"] != call["value"]:
        raise Refusal("it jumps at its threshold")
    return call.elementwise(call.value("self"), 1.0, 1, size=abs(float(call["value"])))
