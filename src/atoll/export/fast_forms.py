"""Forms for float32 networks without certificates: the operators that runtimes and accelerators compute fastest.

All other operations are written as in `atoll.export.forms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from atoll.export.forms import FORMS, SMOOTH, Form, OnnxCall, Values, gelu, per_dim
from atoll.export.writer import OnnxValue


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
    operands = [x, weight] if bias is None else [x, weight, bias]
    attributes: dict[str, Any] = {"strides": stride, "dilations": dilation, "pads": [*padding, *padding]}
    if not transposed:
        return x.writer.node("Conv", operands, call.dtype, group=groups, **attributes)
    attributes["output_padding"] = output_padding
    return x.writer.node("ConvTranspose", operands, call.dtype, group=groups, **attributes)


def _max_pool(
    call: OnnxCall,
    x: OnnxValue,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Values:
    if ceil_mode:  # runtimes differ in the windows at the end
        return FORMS["max_pool2d_with_indices"](call, x, kernel, stride, padding, dilation, ceil_mode)
    rank = len(x.shape) - 2
    kernel, stride, padding, dilation = (per_dim(v, rank) for v in (kernel, stride or kernel, padding, dilation))
    attributes: dict[str, Any] = {"strides": stride, "dilations": dilation, "pads": [*padding, *padding]}
    return x.writer.node("MaxPool", [x], call.dtype, kernel_shape=kernel, **attributes), None


def _in_own_precision(function: Callable[..., OnnxValue]) -> Callable[..., OnnxValue]:
    return lambda call, x, *settings: function(x, *settings)


def _gelu(x: OnnxValue, approximate: str = "none") -> OnnxValue:
    if approximate == "tanh":
        return gelu(x, approximate)
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).apply("Erf"))


_FAST: dict[str, Callable[..., OnnxValue]] = {
    **SMOOTH,
    "erf": lambda x: x.apply("Erf"),
    "gelu": _gelu,
    "sigmoid": lambda x: x.apply("Sigmoid"),
    "silu": lambda x: x * x.apply("Sigmoid"),
}

FAST_FORMS: dict[str, Form] = {
    **FORMS,
    **{name: _in_own_precision(function) for name, function in _FAST.items()},
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
}
