"""Whether logits are piecewise linear in each parameter: then a layer's Hessian is its Gauss-Newton matrix."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

# Operations that are linear, or linear in pieces, in all their inputs together.
_LINEAR = frozenset([
    "AccumulateGrad", "Add", "Sub", "Neg", "Sum", "Mean", "Cat", "Stack", "View", "UnsafeView", "Reshape",
    "ReshapeAlias", "Alias", "Permute", "Transpose", "T", "Expand", "Squeeze", "Unsqueeze", "Select", "Slice", "Split",
    "SplitWithSizes", "Unbind", "Narrow", "Index", "IndexSelect", "Gather", "Repeat", "Clone", "ToCopy", "AsStrided",
    "Flip", "Roll", "ConstantPadNd", "ReflectionPad2D", "ReplicationPad2D", "AvgPool1D", "AvgPool2D",
    "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "MaxPool1DWithIndices", "MaxPool2DWithIndices", "AdaptiveMaxPool2D",
    "UpsampleNearest2D", "Relu", "LeakyRelu", "Hardtanh", "Threshold", "Abs", "Maximum", "Minimum", "Amax", "Max",
    "Clamp", "ClampMin", "ClampMax", "Where", "_SortPairs",
])  # fmt: skip
# Operations that are linear in each of their inputs while the others are held.
_MULTILINEAR = frozenset([
    "Mul", "Mm", "Mv", "Dot", "Bmm", "Addmm", "Addmv", "Baddbmm", "Linear", "Convolution", "NativeBatchNorm",
    "CudnnBatchNorm",
])  # fmt: skip


def nonlinearity(logits: Tensor) -> str | None:
    r"""The operation because of which the logits may not be piecewise linear in each parameter; None if they are.

    Walks the graph of a forward pass, so it sees functions as well as modules.  If the logits g are piecewise linear in
    a parameter w, then :math:`\partial^2 g / \partial w^2 = 0` and for any loss of the logits

    .. math:: \nabla^2_w\, \ell(g(w)) = J_w^T\, \nabla^2_g \ell\, J_w.

    Products are linear in a parameter as long as it does not stand on both sides, as in attention or in a layer
    that is used twice.

    >>> import torch
    >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> x = torch.ones(1, 2)
    >>> print(nonlinearity(layers[1](layers[0](x).relu())), nonlinearity(layers[1](layers[0](x).tanh())))
    None Tanh
    >>> nonlinearity(layers[0](layers[0](x).relu()))
    'Addmm'
    """
    below: dict[Any, frozenset[int]] = {}  # the parameters that a node depends on
    stack = [logits.grad_fn]
    while stack:
        node = stack[-1]
        sources = [source for source, _ in node.next_functions if source is not None] if node is not None else []
        waiting = [source for source in sources if source not in below]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        if node is None or node in below:
            continue
        name = re.sub(r"^.*::|Backward\d*$", "", node.name())
        parts = [below[source] for source in sources]
        together = frozenset().union(*parts)
        if name in _MULTILINEAR:
            if sum(map(len, parts)) > len(together):
                return name
        elif name == "Div":  # by a constant
            if node.next_functions[1][0] is not None:
                return name
        elif name not in _LINEAR:
            return name
        below[node] = together | {id(node)} if name == "AccumulateGrad" else together
    return None
