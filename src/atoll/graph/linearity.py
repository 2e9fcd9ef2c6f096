r"""Detect the parameters in which the logits are piecewise linear, from the captured graph.

If the logits g are piecewise linear in a parameter w, then :math:`\partial^2 g / \partial w^2 = 0`, and for any loss of
the logits :math:`\nabla^2_w\, \ell(g(w)) = J_w^T\, \nabla^2_g \ell\, J_w`: the Gauss-Newton and Hessian blocks of w are
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from atoll.graph.capture import exported_program
from atoll.graph.digest import all_tensors
from atoll.graph.nodes import bind_arguments, live_nodes, locate, operation_name


@dataclass(frozen=True)
class LinearIn:
    """The arguments in which an operation is piecewise linear.

    Args:
        terms: arguments in which it is jointly piecewise linear.
        factors: arguments in which it is linear one at a time, with the others fixed.
    """

    terms: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()


_ONE = LinearIn(("self",))
_TWO = LinearIn(("self", "other"))
_AFFINE = LinearIn(("bias",), ("input", "weight"))

# Overloads (default, Tensor, Scalar, ...) share an entry.  An operation is not linear in arguments that are not listed.
LINEAR_OPERATIONS: dict[str, LinearIn] = {
    **dict.fromkeys(
        [
            "_adaptive_avg_pool2d", "_to_copy", "abs", "adaptive_max_pool2d", "alias", "amax", "amin", "as_strided",
            "avg_pool2d", "clamp", "clone", "constant_pad_nd", "cumsum", "diagonal", "expand", "flip", "gather",
            "hardtanh", "im2col", "index", "index_select", "leaky_relu", "max", "max_pool2d_with_indices", "mean",
            "median", "min", "neg", "pad", "permute", "reflection_pad1d", "reflection_pad2d", "relu", "repeat",
            "replication_pad1d", "replication_pad2d", "select", "slice", "sort", "split_with_sizes", "squeeze",
            "sum", "threshold", "topk", "unfold", "unsqueeze", "view",
        ],
        _ONE,
    ),
    **dict.fromkeys(["add", "maximum", "minimum", "sub"], _TWO),
    # Piecewise constant.
    **dict.fromkeys(["argmax", "argmin", "ceil", "floor", "logical_not", "round", "sign"], _ONE),
    **dict.fromkeys(["eq", "ge", "gt", "le", "logical_and", "logical_or", "lt", "ne"], _TWO),
    **dict.fromkeys(["matmul", "mul"], LinearIn(factors=("self", "other"))),
    **dict.fromkeys(["bmm", "mm"], LinearIn(factors=("self", "mat2"))),
    **dict.fromkeys(["upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d"], LinearIn(("self", "input"))),
    "_native_batch_norm_legit_no_training": _AFFINE,
    "_prelu_kernel": LinearIn(factors=("self", "weight")),
    "cat": LinearIn(("tensors",)),
    "addmm": LinearIn(("self",), ("mat1", "mat2")),
    "convolution": _AFFINE,
    "div": _ONE,
    "linear": _AFFINE,
    "native_group_norm": LinearIn(("bias",), ("weight",)),
    "native_layer_norm": LinearIn(("bias",), ("weight",)),
    "rms_norm": LinearIn(factors=("weight",)),
    "scaled_dot_product_attention": LinearIn(("value",)),
    "where": LinearIn(("condition", "self", "other")),
}  # fmt: skip


def nonlinear_parameters(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the parameters in which the logits may not be piecewise linear, each with the reason.

    Operations that are not in ``LINEAR_OPERATIONS`` count as nonlinear, so the logits are certainly piecewise linear in
    all other parameters.

    Args:
        module: maps a batch of inputs to logits, in evaluation mode.
        shape: shape of one input, without the batch dimension.
        dtype: data type of the inputs; that of the parameters if None.

    Raises:
        CaptureError: the model cannot be captured.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> sorted(nonlinear_parameters(net.eval(), (4,)))
    ['0.bias', '0.weight', '2.bias', '2.weight']
    >>> layer = nn.Linear(4, 4)
    >>> nonlinear_parameters(nn.Sequential(layer, nn.ReLU(), layer).eval(), (4,))["0.weight"]
    'linear: 0.weight is in more than one factor (module 2, Linear)'
    """
    program, targets = exported_program(module, shape, dtype)
    own = {id(parameter): name for name, parameter in module.named_parameters()}  # tied parameters by first name
    tensors = {target: id(tensor) for target, tensor in all_tensors(module).items()}
    names = {node: own[tensors[target]] for node, target in targets.items() if tensors[target] in own}
    linear: dict[fx.Node, frozenset[str]] = {}  # parameters that a node depends on
    reasons: dict[str, str] = {}
    for node in live_nodes(program.graph):
        if node.op == "placeholder":
            linear[node] = frozenset([names[node.name]]) if node.name in names else frozenset()
            continue
        if isinstance(node.meta.get("val"), int | torch.SymInt):  # a size, which is independent of values
            linear[node] = frozenset()
            continue
        linear[node] = frozenset().union(*(linear[source] for source in node.all_input_nodes))
        for name in sorted(linear[node] - reasons.keys()):
            if reason := _reason(node, name, linear):
                reasons[name] = reason
    return reasons


def _reason(node: fx.Node, name: str, linear: dict[fx.Node, frozenset[str]]) -> str:
    """Return why an operation is not piecewise linear in a parameter, although its arguments are, or ""."""
    if node.op == "output" or getattr(node.target, "__name__", "") == "getitem":
        return ""
    operation = operation_name(node).removeprefix("aten.").partition(".")[0]
    rule = LINEAR_OPERATIONS.get(operation, LinearIn())
    dependent = {key for key, value in bind_arguments(node).items() if name in _parameters(value, linear)}
    where = f" ({line})" if (line := locate(node)) else ""
    if dependent - {*rule.terms, *rule.factors}:
        return f"{operation} is not piecewise linear in {name}{where}"
    if len(dependent & {*rule.factors}) > 1:
        return f"{operation}: {name} is in more than one factor{where}"
    return ""


def _parameters(value: Any, linear: dict[fx.Node, frozenset[str]]) -> frozenset[str]:
    if isinstance(value, fx.Node):
        return linear[value]
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_parameters(item, linear) for item in value))
    return frozenset()
