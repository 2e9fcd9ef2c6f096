"""ATen operations as ONNX nodes, with the precision and the accuracy that certificates assume.

ONNX Runtime has no float64 kernels for convolutions, average pooling, erf, atan and a few more, and some of its kernels
for smooth functions are accurate in absolute terms only.  So operations are written with products of matrices,
comparisons, elementary arithmetic, exp, log, tanh, sin and cos.  Sums may be in another order than PyTorch's, which
certificates allow.  Smooth functions are computed in float64 even if the network is in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from atoll.errors import InputError
from atoll.export.writer import Number, OnnxValue
from atoll.graph import CapturedModel, bind_arguments, locate
from atoll.graph.nodes import live_nodes, operation_name

Values = OnnxValue | tuple[OnnxValue | None, ...]  # None for an output that has no form, such as the indices of a pool
Operand = OnnxValue | Number
Form = Callable[..., Values]


@dataclass(frozen=True)
class OnnxCall:
    """What a form knows of the operation besides its arguments.

    Args:
        shape: of the result, -1 for the batch dimension.
        dtype: of the result.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_graph(model: CapturedModel, x: OnnxValue, forms: Mapping[str, Form] | None = None) -> dict[fx.Node, Values]:
    """Append the operations of a captured model; returns the value of every node, the logits under the output node.

    Args:
        model: the function.
        x: its input, in the precision of the model.
        forms: by name of the operation; `FORMS` if None.

    Raises:
        InputError: an operation has no form; the message names it and the line of source.

    >>> from torch import nn
    >>> from atoll.export.writer import Writer
    >>> from atoll.graph import capture
    >>> writer, model = Writer(), capture(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    >>> values = write_graph(model, writer.input("x", torch.float32, (-1, 4)))
    >>> [operator for operator, *_ in writer.nodes]
    ['MatMul', 'Add', 'Relu']
    """
    forms = FORMS if forms is None else forms
    values: dict[fx.Node, Values] = {}
    rows: dict[fx.Node, Any] = {}  # of nodes that depend on weights and the batch size only: values for a batch of one
    for node in live_nodes(model.graph_module.graph):
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "get_attr":
            rows[node] = model.graph_module.get_buffer(str(node.target)).cpu()
            values[node] = x.writer.constant(rows[node])
        elif node.op == "output":
            values[node] = values[node.all_input_nodes[0]]
        elif operation_name(node) == "aten.sym_size.int":
            rows[node] = 1
        elif all(source in rows for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), rows.__getitem__)
            rows[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            if isinstance(rows[node], Tensor):
                values[node] = _repeat_row(x, rows[node]).of_shape(_call(node).shape)
        else:
            values[node] = _write_node(node, values, forms)
    return values


def _repeat_row(x: OnnxValue, row: Tensor) -> OnnxValue:
    """A constant that is the same for every input, for the batch size of x."""
    sizes = x.writer.integers(row.shape[1:])
    return x.writer.constant(row).expand(x.writer.concatenate([x.size(0), sizes], 0))


def _write_node(node: fx.Node, values: dict[fx.Node, Values], forms: Mapping[str, Form]) -> Values:
    operation = operation_name(node).removeprefix("aten.").partition(".")[0]
    # Sizes become None: the result has a shape.
    value_of: Callable[[fx.Node], Any] = values.get
    arguments: Any = fx.map_arg(list(bind_arguments(node).values()), value_of)
    if operation == "getitem":
        return _item(arguments, node)
    if operation not in forms:
        raise InputError(f"{_at(node)} has no ONNX form")
    call = _call(node)
    try:
        result = forms[operation](call, *arguments)
    except InputError as error:
        raise InputError(f"{_at(node)} has no ONNX form: {error}") from None
    return result.of_shape(call.shape) if isinstance(result, OnnxValue) else result


def _item(arguments: Sequence[Any], node: fx.Node) -> OnnxValue:
    items, index = arguments
    if items[index] is None:
        raise InputError(f"{_at(node.all_input_nodes[0])} has no ONNX form: the network reads output {index} of it")
    value: OnnxValue = items[index]
    return value.of_shape(_call(node).shape)


def _at(node: fx.Node) -> str:
    return operation_name(node) + (f" ({line})" if (line := locate(node)) else "")


def _call(node: fx.Node) -> OnnxCall:
    result = node.meta["val"]
    first = result[0] if isinstance(result, tuple | list) else result
    return OnnxCall(tuple(size if isinstance(size, int) else -1 for size in first.shape), first.dtype)


def _constant(value: OnnxValue) -> Tensor:
    if value.tensor is None:
        raise InputError("expected weights that do not depend on the input")
    return value.tensor


# --- sums of products


def _linear(call: OnnxCall, x: OnnxValue, weight: OnnxValue, bias: OnnxValue | None) -> OnnxValue:
    y = x @ _constant(weight).T
    return y if bias is None else y + bias


def _addmm(call: OnnxCall, bias: OnnxValue, a: OnnxValue, b: OnnxValue, beta: Number, alpha: Number) -> OnnxValue:
    product = a @ b
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _convolution(
    call: OnnxCall,
    x: OnnxValue,
    weight: OnnxValue,
    bias: OnnxValue | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> OnnxValue:
    """Patches times a matrix."""
    kernel, sizes, w = weight.shape[2:], x.shape[2:], _constant(weight)
    positions = _transposed_positions if transposed else _positions
    settings = zip(call.shape[2:], kernel, sizes, stride, padding, dilation, strict=True)
    patches = _windows(x, [positions(*values) for values in settings])
    taps, channels, outputs, area = math.prod(kernel), x.shape[1], call.shape[1], math.prod(call.shape[2:])
    if transposed:  # (inputs, outputs per group, *kernel)
        w = w.reshape(groups, channels // groups, outputs // groups, taps).permute(0, 3, 1, 2)
    else:  # (outputs, inputs per group, *kernel)
        w = w.reshape(groups, outputs // groups, channels // groups, taps).permute(0, 3, 2, 1)
    matrix = w.reshape(groups, taps * channels // groups, outputs // groups)
    patches = patches.reshape(-1, area, taps, groups, channels // groups).permute(0, 3, 1, 2, 4)
    y = patches.reshape(-1, groups, area, taps * channels // groups) @ (matrix if groups > 1 else matrix[0])
    y = y.permute(0, 1, 3, 2).reshape(*call.shape)
    return y if bias is None else y + _constant(bias).reshape(-1, *[1] * len(kernel))


def _batch_norm(
    call: OnnxCall,
    x: OnnxValue,
    weight: OnnxValue | None,
    bias: OnnxValue | None,
    mean: OnnxValue,
    var: OnnxValue,
    _: Number,
    eps: Number,
) -> tuple[OnnxValue | None, ...]:
    scale = 1 / (_constant(var) + eps).sqrt()
    scale = scale if weight is None else scale * _constant(weight)
    shift = -_constant(mean) * scale
    shift = shift if bias is None else shift + _constant(bias)
    channels = (-1, *[1] * (len(x.shape) - 2))
    return x * scale.reshape(channels) + shift.reshape(channels), None, None


def _layer_norm(
    call: OnnxCall,
    x: OnnxValue,
    sizes: Sequence[int],
    weight: OnnxValue | None,
    bias: OnnxValue | None,
    eps: Number,
) -> tuple[OnnxValue | None, ...]:
    axes = list(range(len(x.shape) - len(sizes), len(x.shape)))
    return _affine(_standardized(x, axes, eps), weight, bias), None, None


def _group_norm(
    call: OnnxCall,
    x: OnnxValue,
    weight: OnnxValue | None,
    bias: OnnxValue | None,
    _: Any,
    channels: int,
    __: Any,
    groups: int,
    eps: Number,
) -> tuple[OnnxValue | None, ...]:
    members = math.prod(x.shape[1:]) // groups
    rows = x.reshape(-1, groups, members).of_shape((-1, groups, members))
    y = _standardized(rows, [2], eps).reshape(*x.shape)
    shape = (channels, *[1] * (len(x.shape) - 2))
    return _affine(y, *(None if v is None else v.reshape(*shape) for v in (weight, bias))), None, None


def _rms_norm(
    call: OnnxCall, x: OnnxValue, sizes: Sequence[int], weight: OnnxValue | None, eps: Number | None
) -> OnnxValue:
    axes = list(range(len(x.shape) - len(sizes), len(x.shape)))
    mean = (x * x).sum(axes, keepdim=True) / math.prod(sizes)
    return _affine(x / (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).sqrt(), weight, None)


def _standardized(x: OnnxValue, axes: list[int], eps: Number) -> OnnxValue:
    """With mean 0 and variance 1 along some dimensions."""
    count = math.prod(x.shape[axis] for axis in axes)
    centered = x - x.sum(axes, keepdim=True) / count
    return centered / ((centered * centered).sum(axes, keepdim=True) / count + eps).sqrt()


def _affine(x: OnnxValue, weight: OnnxValue | None, bias: OnnxValue | None) -> OnnxValue:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _softmax(call: OnnxCall, x: OnnxValue, dim: int, _: bool) -> OnnxValue:
    axes = _dims(x, dim)
    powers = (x - x.amax(axes, keepdim=True)).exp()
    return powers / powers.sum(axes, keepdim=True)


def _log_softmax(call: OnnxCall, x: OnnxValue, dim: int, _: bool) -> OnnxValue:
    axes = _dims(x, dim)
    shifted = x - x.amax(axes, keepdim=True)
    return shifted - shifted.exp().sum(axes, keepdim=True).log()


def _attention(
    call: OnnxCall,
    query: OnnxValue,
    key: OnnxValue,
    value: OnnxValue,
    mask: OnnxValue | None,
    _: Number,
    is_causal: bool,
    scale: Number | None,
    grouped: bool,
) -> OnnxValue:
    if is_causal or grouped:
        raise InputError("expected attention that is neither causal nor grouped")
    rank, size = len(query.shape), query.shape[-1]
    swapped = key.permute(*range(rank - 2), rank - 1, rank - 2)
    scores = (query * (size**-0.5 if scale is None else scale)) @ swapped
    if mask is not None:
        scores = scores.where(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = _softmax(call, scores.of_shape((*query.shape[:-1], key.shape[-2])), -1, False)
    return weights @ value


# --- windows


def _windows(x: OnnxValue, positions: Sequence[Tensor], fill: Number = 0.0) -> OnnxValue:
    """The elements of every window, (batch, windows, elements of a window, channels).

    Args:
        x: (batch, channels, *sizes).
        positions: for each of the sizes, where the elements of windows are, (windows, elements); -1 if outside.
        fill: what is outside.
    """
    area = math.prod(x.shape[2:])
    index, inside = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    for table, size in zip(positions, x.shape[2:], strict=True):
        index = (index[:, None, :, None] * size + table[:, None]).flatten(2).flatten(0, 1)
        inside = (inside[:, None, :, None] & (table[:, None] >= 0)).flatten(2).flatten(0, 1)
    rows = _rows(x)
    if not inside.all():
        rows = rows.pad((0, 0, 0), (0, 1, 0), fill)
    return rows.index_select(1, index.where(inside, area))


def _rows(x: OnnxValue) -> OnnxValue:
    """Pixels in rows and channels last: (batch, pixels, channels)."""
    return x.reshape(-1, x.shape[1], math.prod(x.shape[2:])).permute(0, 2, 1)


def _positions(out: int, kernel: int, size: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Where the elements of windows are along one dimension, (out, kernel); -1 if outside."""
    position = torch.arange(out)[:, None] * stride - padding + torch.arange(kernel) * dilation
    return position.where((position >= 0) & (position < size), -1)


def _transposed_positions(out: int, kernel: int, size: int, stride: int, padding: int, dilation: int) -> Tensor:
    """The same for a transposed convolution: the inputs that reach an output."""
    reach = torch.arange(out)[:, None] + padding - torch.arange(kernel) * dilation
    position = reach.div(stride, rounding_mode="floor")
    return position.where((reach % stride == 0) & (position >= 0) & (position < size), -1)


def _adaptive_positions(out: int, size: int) -> Tensor:
    """The same for adaptive pooling, whose windows differ in size."""
    start = torch.arange(out) * size // out
    end = -(-(torch.arange(out) + 1) * size // out)
    position = start[:, None] + torch.arange(int((end - start).max()))
    return position.where(position < end[:, None], -1)


def _pool_positions(
    call: OnnxCall,
    x: OnnxValue,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Tensor]:
    rank = len(x.shape) - 2
    kernel, stride, padding, dilation = (per_dim(v, rank) for v in (kernel, stride or kernel, padding, dilation))
    settings = zip(call.shape[2:], kernel, x.shape[2:], stride, padding, dilation, strict=True)
    return [_positions(*values) for values in settings]


def per_dim(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def _max_of_windows(call: OnnxCall, x: OnnxValue, positions: Sequence[Tensor]) -> tuple[OnnxValue | None, ...]:
    windows = _windows(x, positions, -math.inf)
    return windows.amax([2]).permute(0, 2, 1).reshape(*call.shape), None


def _mean_of_windows(call: OnnxCall, x: OnnxValue, positions: Sequence[Tensor], count: Tensor) -> OnnxValue:
    """Args: count: that sums are divided by, for each window or for all."""
    return (_windows(x, positions).sum([2]).permute(0, 2, 1) / count).reshape(*call.shape)


def _sizes_of_windows(positions: Sequence[Tensor]) -> Tensor:
    count = torch.ones(1, dtype=torch.int64)
    for table in positions:
        count = (count[:, None] * (table >= 0).sum(1)).flatten()
    return count


def _max_pool(
    call: OnnxCall,
    x: OnnxValue,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _: bool,
) -> tuple[OnnxValue | None, ...]:
    return _max_of_windows(call, x, _pool_positions(call, x, kernel, stride, padding, dilation))


def _avg_pool(
    call: OnnxCall,
    x: OnnxValue,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    _: bool,
    count_include_pad: bool,
    divisor: int | None = None,
) -> OnnxValue:
    positions = _pool_positions(call, x, kernel, stride, padding, [1])
    if divisor:
        count = torch.tensor(divisor)
    elif count_include_pad:  # padding counts, but not what ceil_mode adds beyond it
        rank = len(x.shape) - 2
        pads = per_dim(padding, rank)
        padded = x.of_shape((*x.shape[:2], *(size + 2 * p for size, p in zip(x.shape[2:], pads, strict=True))))
        count = _sizes_of_windows(_pool_positions(call, padded, kernel, stride, [0] * rank, [1]))
    else:
        count = _sizes_of_windows(positions)
    return _mean_of_windows(call, x, positions, count)


def _adaptive_avg_pool(call: OnnxCall, x: OnnxValue, _: Sequence[int]) -> OnnxValue:
    positions = [_adaptive_positions(*sizes) for sizes in zip(call.shape[2:], x.shape[2:], strict=True)]
    return _mean_of_windows(call, x, positions, _sizes_of_windows(positions))


def _adaptive_max_pool(call: OnnxCall, x: OnnxValue, _: Sequence[int]) -> tuple[OnnxValue | None, ...]:
    positions = [_adaptive_positions(*sizes) for sizes in zip(call.shape[2:], x.shape[2:], strict=True)]
    return _max_of_windows(call, x, positions)


# --- reductions


def _sum(call: OnnxCall, x: OnnxValue, dims: Sequence[int] | None, keepdim: bool, _: torch.dtype | None) -> OnnxValue:
    return x.to(call.dtype).sum(_dims(x, dims), keepdim)


def _mean(call: OnnxCall, x: OnnxValue, dims: Sequence[int] | None, keepdim: bool, _: torch.dtype | None) -> OnnxValue:
    axes = _dims(x, dims)
    return x.to(call.dtype).sum(axes, keepdim) / math.prod(x.shape[axis] for axis in axes)


def _var(
    call: OnnxCall, x: OnnxValue, dims: Sequence[int] | None, correction: Number | None, keepdim: bool
) -> OnnxValue:
    axes = _dims(x, dims)
    count = math.prod(x.shape[axis] for axis in axes)
    centered = x - x.sum(axes, keepdim=True) / count
    return (centered * centered).sum(axes, keepdim) / (count - (1 if correction is None else correction))


def _dims(x: OnnxValue, dims: Sequence[int] | int | None) -> list[int]:
    """Dimensions without signs; those of single inputs only."""
    listed = [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))
    axes = [dim % len(x.shape) for dim in listed]
    if any(x.shape[axis] < 0 for axis in axes):
        raise InputError("it combines the inputs of a batch")
    return axes


def _cumsum(call: OnnxCall, x: OnnxValue, dim: int, _: torch.dtype | None) -> OnnxValue:
    return x.to(call.dtype).cumsum(_dims(x, dim)[0])


def _norm(
    call: OnnxCall, x: OnnxValue, order: Number, dims: Sequence[int] | None, keepdim: bool, _: torch.dtype | None
) -> OnnxValue:
    if order != 2:
        raise InputError(f"expected the l2 norm, got order {order}")
    return x.to(call.dtype).norm(_dims(x, dims), keepdim)


def _sorted(call: OnnxCall, x: OnnxValue, dim: int, descending: bool) -> tuple[OnnxValue | None, ...]:
    (axis,) = _dims(x, dim)
    return x.topk(x.shape[axis], axis, descending)[0], None


def _topk(call: OnnxCall, x: OnnxValue, k: int, dim: int, largest: bool, _: bool) -> tuple[OnnxValue | None, ...]:
    return x.topk(k, _dims(x, dim)[0], largest)[0], None


# --- elements in another order


def _index(call: OnnxCall, x: OnnxValue, indices: Sequence[OnnxValue | None]) -> OnnxValue:
    """One index at any dimension, or one for each of the first dimensions."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in given):
        raise InputError("expected indices, got a mask")
    if len(dims) == 1:
        return x.index_select(dims[0], given[0])
    if dims != list(range(len(dims))):
        raise InputError("expected indices of the first dimensions")
    position = given[0]
    for size, index in zip(x.shape[1:], given[1:], strict=False):
        position = position * size + index
    return x.reshape(-1, *x.shape[len(dims) :]).index_select(0, position)


def _pad(
    call: OnnxCall, x: OnnxValue, widths: Sequence[int], mode: str = "constant", value: Number | None = None
) -> OnnxValue:
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]  # the last dimension comes first
    first = len(x.shape) - len(pairs)
    if mode == "constant":
        lows, highs = ([0] * first + [pair[side] for pair in pairs] for side in (0, 1))
        return x.pad(lows, highs, value or 0.0)
    for dim, (before, after) in enumerate(pairs, first):
        x = x.index_select(dim, _padded_positions(x.shape[dim], before, after, mode)).of_shape(x.shape)
    return x


def _padded_positions(size: int, before: int, after: int, mode: str) -> Tensor:
    position = torch.arange(-before, size + after)
    match mode:
        case "circular":
            return position % size
        case "replicate":
            return position.clamp(0, size - 1)
        case "reflect":
            return (size - 1) - ((size - 1) - position.abs()).abs()
    raise InputError(f"expected constant, circular, replicate or reflect, got {mode!r}")


def _slice(call: OnnxCall, x: OnnxValue, dim: int, start: int | None, end: int | None, step: int) -> OnnxValue:
    limits = {} if end is None else {"end": end}
    return x.slice(dim % len(x.shape), start or 0, step=step, **limits)


def _split(call: OnnxCall, x: OnnxValue, sizes: Sequence[int], dim: int) -> tuple[OnnxValue | None, ...]:
    (axis,) = _dims(x, dim)
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(x.slice(axis, start, end) for start, end in itertools.pairwise(ends))


def _select(call: OnnxCall, x: OnnxValue, dim: int, index: int) -> OnnxValue:
    return x.index_select(dim % len(x.shape), torch.tensor(index))


def _flip(call: OnnxCall, x: OnnxValue, dims: Sequence[int]) -> OnnxValue:
    for axis in _dims(x, dims):
        x = x.index_select(axis, torch.arange(x.shape[axis]).flip(0)).of_shape(x.shape)
    return x


def _cat(call: OnnxCall, tensors: Sequence[OnnxValue], dim: int) -> OnnxValue:
    return tensors[0].writer.concatenate([value.to(call.dtype) for value in tensors], dim % len(call.shape))


def _permute(call: OnnxCall, x: OnnxValue, dims: Sequence[int]) -> OnnxValue:
    return x.permute(*(dim % len(x.shape) for dim in dims))


def _expand(call: OnnxCall, x: OnnxValue, *_: Any) -> OnnxValue:
    return x.expand(x.writer.integers([max(size, 1) for size in call.shape]))  # 1 leaves the batch as it is


def _as_strided(call: OnnxCall, x: OnnxValue, _: Any, strides: Sequence[int], offset: int | None) -> OnnxValue:
    """What global pooling of channels-last tensors does to (batch, channels, 1, 1): nothing."""
    if offset or x.shape != call.shape or math.prod(x.shape[2:]) != 1 or list(strides[:2]) != [x.shape[1], 1]:
        raise InputError("expected strides that do not change the tensor")
    return x


def _unfold(call: OnnxCall, x: OnnxValue, dim: int, size: int, step: int) -> OnnxValue:
    (axis,) = _dims(x, dim)
    rank, index = len(x.shape), torch.arange(x.shape[axis]).unfold(0, size, step)
    return x.index_select(axis, index).permute(*(d for d in range(rank + 1) if d != axis + 1), axis + 1)


def _interpolate(operation: Callable[..., Tensor]) -> Callable[..., OnnxValue]:
    """Weighted sums of a few pixels; the weights are what PyTorch makes of single pixels."""

    def form(call: OnnxCall, x: OnnxValue, *settings: Any) -> OnnxValue:
        sizes, area = x.shape[2:], math.prod(x.shape[2:])
        pixels = torch.eye(area, dtype=torch.float64).view(1, area, *sizes)
        weights = operation(pixels, *settings).reshape(area, -1)
        taps = int((weights != 0).sum(0).max())
        weights, index = weights.topk(taps, dim=0)  # none are negative
        windows = _rows(x).index_select(1, index.T)
        return (windows * weights.T[..., None]).sum([2]).permute(0, 2, 1).reshape(*call.shape)

    return form


def _im2col(
    call: OnnxCall,
    x: OnnxValue,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> OnnxValue:
    settings = list(zip(kernel, x.shape[2:], stride, padding, dilation, strict=True))
    outs = [(size + 2 * pad - step * (width - 1) - 1) // jump + 1 for width, size, jump, pad, step in settings]
    windows = _windows(x, [_positions(out, *values) for out, values in zip(outs, settings, strict=True)])
    return windows.permute(0, 3, 2, 1).reshape(*call.shape)


# --- piecewise linear functions


def _binary(function: Callable[[Any, Any], OnnxValue]) -> Callable[..., OnnxValue]:
    """A function of two operands, one of which may be a number, in the type of the result."""
    return lambda call, a, b: function(_typed(a, call), _typed(b, call))


def _typed(operand: Operand, call: OnnxCall) -> Operand:
    return operand.to(call.dtype) if isinstance(operand, OnnxValue) else operand


def _add(call: OnnxCall, a: Operand, b: Operand, alpha: Number = 1) -> OnnxValue:
    a, b = _typed(a, call), _typed(b, call)
    result = a + (b if alpha == 1 else b * alpha)
    assert isinstance(result, OnnxValue)  # capture folds sums of numbers
    return result


def _sub(call: OnnxCall, a: Operand, b: Operand, alpha: Number = 1) -> OnnxValue:
    return _add(call, a, -_typed(b, call), alpha)


def _div(call: OnnxCall, a: Operand, b: Operand, *rounding: Any) -> OnnxValue:
    if any(rounding):
        raise InputError(f"expected a division without rounding, got {rounding[0]}")
    return _binary(lambda a, b: a / b)(call, a, b)


def _pow(call: OnnxCall, base: Operand, exponent: Operand) -> OnnxValue:
    if not isinstance(base, OnnxValue) or isinstance(exponent, OnnxValue):
        raise InputError("expected a tensor to the power of a number")
    return base * base if exponent == 2 else base.apply("Pow", exponent)


def _where(call: OnnxCall, condition: OnnxValue, a: OnnxValue, b: OnnxValue) -> OnnxValue:
    return a.to(call.dtype).where(condition, b)


def _leaky_relu(call: OnnxCall, x: OnnxValue, slope: Operand) -> OnnxValue:
    return x.where(x > 0, x * slope)


# --- smooth functions, for float64 values


def _log1p(t: OnnxValue) -> OnnxValue:
    """Accurate for small t (Higham, 2002, problem 1.5); t >= 0."""
    u = 1 + t
    return t.where(u.eq(1.0), t * u.log() / (u - 1).maximum(torch.finfo(t.dtype).tiny))


def _expm1(x: OnnxValue) -> OnnxValue:
    """For x <= 0, without cancellation."""
    return (0.5 * x).tanh() * (x.exp() + 1)


def _softplus(x: OnnxValue, beta: Number = 1.0, threshold: Number = math.inf) -> OnnxValue:
    scaled = x if beta == 1 else x * beta
    result = scaled.relu() + _log1p((-scaled.abs()).exp())
    result = result if beta == 1 else result / beta
    return result if math.isinf(threshold) else x.where(scaled > threshold, result)


def _sigmoid(x: OnnxValue) -> OnnxValue:
    return 1 / (1 + (-x).exp())


def _elu(x: OnnxValue, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0) -> OnnxValue:
    return (x * scale).where(x > 0, _expm1(x.minimum(0.0) * input_scale) * (alpha * scale))


def _celu(x: OnnxValue, alpha: Number = 1.0) -> OnnxValue:
    return x.where(x > 0, _expm1(x.minimum(0.0) / alpha) * alpha)


def gelu(x: OnnxValue, approximate: str = "none") -> OnnxValue:
    if approximate == "tanh":
        return 0.5 * x * (1 + ((x + 0.044715 * (x * x * x)) * math.sqrt(2 / math.pi)).tanh())
    return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))


# Rational approximations of the Cephes library (Moshier, 1989), highest power first; errors are below 4e-16, relative.
_ERF = (
    (9.60497373987051638749, 90.0260197203842689217, 2232.00534594684319226, 7003.32514112805075473,
     55592.3013010394962768),
    (1.0, 33.5617141647503099647, 521.357949780152679795, 4594.32382970980127987, 22629.0000613890934246,
     49267.3942608635921086),
)  # fmt: skip
_ERFC = (
    (2.46196981473530512524e-10, 0.564189564831068821977, 7.46321056442269912687, 48.6371970985681366614,
     196.520832956077098242, 526.445194995477358631, 934.528527171957607540, 1027.55188689515710272,
     557.535335369399327526),
    (1.0, 13.2281951154744992508, 86.7072140885989742329, 354.937778887819891062, 975.708501743205489753,
     1823.90916687909736289, 2246.33760818710981792, 1656.66309194161350182, 557.535340817727675546),
)  # fmt: skip
_ATAN = (
    (-0.8750608600031904122785, -16.15753718733365076637, -75.00855792314704667340, -122.8866684490136173410,
     -64.85021904942025371773),
    (1.0, 24.85846490142306297962, 165.0270098316988542046, 432.8810604912902668951, 485.3903996359136964868,
     194.5506571482613964425),
)  # fmt: skip


def _rational(x: OnnxValue, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> OnnxValue:
    numerator, denominator = (_polynomial(x, powers) for powers in coefficients)
    return numerator / denominator


def _polynomial(x: OnnxValue, coefficients: Sequence[float]) -> OnnxValue:
    result = x.lift(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _erf(x: OnnxValue) -> OnnxValue:
    inner = x.clamp(-1.0, 1.0)
    small = inner * _rational(inner * inner, _ERF)
    size = x.abs().clamp(1.0, 6.0)  # erf is 1 from there on
    large = 1 - (-(size * size)).exp() * _rational(size, _ERFC)
    return small.where(x.abs() <= 1, large.where(x > 0, -large))


def _atan(x: OnnxValue) -> OnnxValue:
    size = x.abs()
    far, near = size > 1 + math.sqrt(2), size <= 0.66
    reduced = size.where(near, ((size - 1) / (size + 1)).where(size <= 1 + math.sqrt(2), -1 / size.maximum(0.5)))
    square = reduced * reduced
    angle = reduced + reduced * (square * _rational(square, _ATAN))
    result = angle + x.lift(math.pi / 2).where(far, x.lift(0.0).where(near, math.pi / 4))
    return result.where(x > 0, -result)


def _glu(call: OnnxCall, x: OnnxValue, dim: int) -> OnnxValue:
    (axis,) = _dims(x, dim)
    half = x.shape[axis] // 2
    return x.slice(axis, 0, half) * _sigmoid(x.slice(axis, half))


def _smooth(function: Callable[..., OnnxValue]) -> Callable[..., OnnxValue]:
    """Compute a function of one tensor in float64."""
    return lambda call, x, *settings: function(x.to(torch.float64), *settings).to(call.dtype)


SMOOTH: dict[str, Callable[..., OnnxValue]] = {
    "atan": _atan,
    "celu": _celu,
    "cos": lambda x: x.apply("Cos"),
    "elu": _elu,
    "erf": _erf,
    "gelu": gelu,
    "hardswish": lambda x: x * (x + 3).clamp(0.0, 6.0) / 6,
    "log_sigmoid": lambda x: -_softplus(-x),
    "mish": lambda x: x * _softplus(x).tanh(),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "sin": lambda x: x.apply("Sin"),
    "softplus": _softplus,
    "tanh": lambda x: x.tanh(),
}

# Overloads (default, Tensor, Scalar, ...) share a row.  A form gets all arguments in the order of the schema.
FORMS: dict[str, Form] = {
    **dict.fromkeys(
        ["squeeze", "unsqueeze", "view"],
        lambda call, x, *_: x.reshape(*call.shape),
    ),
    **dict.fromkeys(["_to_copy", "alias", "clone", "detach"], lambda call, x, *_: x.to(call.dtype)),
    **dict.fromkeys(["bmm", "matmul", "mm"], lambda call, a, b: a @ b),
    **dict.fromkeys(["constant_pad_nd", "pad"], _pad),
    **dict.fromkeys(["reflection_pad1d", "reflection_pad2d"], lambda call, x, pad: _pad(call, x, pad, "reflect")),
    **dict.fromkeys(["replication_pad1d", "replication_pad2d"], lambda call, x, pad: _pad(call, x, pad, "replicate")),
    **{name: _smooth(function) for name, function in SMOOTH.items()},
    "_adaptive_avg_pool2d": _adaptive_avg_pool,
    "_log_softmax": _log_softmax,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_prelu_kernel": _leaky_relu,
    "_softmax": _softmax,
    "abs": lambda call, x: x.abs(),
    "adaptive_max_pool2d": _adaptive_max_pool,
    "add": _add,
    "addmm": _addmm,
    "amax": lambda call, x, dims, keepdim: x.amax(_dims(x, dims), keepdim),
    "amin": lambda call, x, dims, keepdim: x.amin(_dims(x, dims), keepdim),
    "argmin": lambda call, x, dim, keepdim: x.argmin(_dims(x, dim)[0], keepdim),
    "as_strided": _as_strided,
    "avg_pool2d": _avg_pool,
    "cat": _cat,
    "clamp": lambda call, x, low=None, high=None: x.clamp(low, high),
    "convolution": _convolution,
    "cumsum": _cumsum,
    "div": _div,
    "exp": lambda call, x: x.exp(),
    "expand": _expand,
    "flip": _flip,
    "full_like": lambda call, x, fill, *_: _repeat_row(x, torch.full((1, *call.shape[1:]), fill, dtype=call.dtype)),
    "ge": lambda call, a, b: a >= b,
    "glu": _glu,
    "gt": lambda call, a, b: a > b,
    "hardsigmoid": lambda call, x: (x + 3).clamp(0.0, 6.0) / 6,
    "hardtanh": lambda call, x, low, high: x.clamp(low, high),
    "im2col": _im2col,
    "index": _index,
    "index_select": lambda call, x, dim, index: x.index_select(dim % len(x.shape), index),
    "le": lambda call, a, b: a <= b,
    "leaky_relu": _leaky_relu,
    "linalg_vector_norm": _norm,
    "linear": _linear,
    "log": lambda call, x: x.log(),
    "lt": lambda call, a, b: a < b,
    "max": lambda call, x, dim, keepdim: (x.amax(_dims(x, dim), keepdim), None),
    "max_pool2d_with_indices": _max_pool,
    "maximum": _binary(lambda a, b: a.maximum(b)),
    "mean": _mean,
    "min": lambda call, x, dim, keepdim: (x.amin(_dims(x, dim), keepdim), None),
    "minimum": _binary(lambda a, b: a.minimum(b)),
    "mul": _binary(lambda a, b: a * b),
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "neg": lambda call, x: -x,
    "permute": _permute,
    "pow": _pow,
    "reciprocal": lambda call, x: 1 / x,
    "relu": lambda call, x: x.relu(),
    "repeat": lambda call, x, repeats: x.repeat(repeats),
    "rms_norm": _rms_norm,
    "rsqrt": lambda call, x: 1 / x.sqrt(),
    "scaled_dot_product_attention": _attention,
    "select": _select,
    "slice": _slice,
    "sort": _sorted,
    "split_with_sizes": _split,
    "sqrt": lambda call, x: x.sqrt(),
    "sub": _sub,
    "sum": _sum,
    "threshold": lambda call, x, threshold, value: x.where(x > threshold, value),
    "topk": _topk,
    "unfold": _unfold,
    "upsample_bilinear2d": _interpolate(torch.ops.aten.upsample_bilinear2d),
    "upsample_nearest2d": _interpolate(torch.ops.aten.upsample_nearest2d),
    "var": _var,
    "where": _where,
}
