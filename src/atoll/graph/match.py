"""Find a known function at the end of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from atoll.graph.capture import CapturedModel


def find_input(model: CapturedModel, tail: CapturedModel) -> fx.Node | None:
    """Return the node of a model after which the graph is exactly ``tail``, or None if there is no such node.

    Operations, arguments and all constants must be bit-identical.

    >>> from torch import nn
    >>> from atoll.graph import capture
    >>> head = nn.Linear(3, 2)
    >>> model = capture(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), head), (4,))
    >>> find_input(model, capture(head, (3,)))
    relu
    >>> find_input(model, capture(nn.Linear(3, 2), (3,))) is None
    True
    """
    matcher = _Matcher(model.graph_module, tail.graph_module)
    return matcher.start if matcher.equal(_logits(model), _logits(tail)) else None


def _logits(model: CapturedModel) -> fx.Node:
    (logits,) = model.graph_module.graph.output_node().all_input_nodes
    return logits


class _Matcher:
    def __init__(self, module: fx.GraphModule, tail: fx.GraphModule) -> None:
        self.module, self.tail = module, tail
        self.start: fx.Node | None = None  # the node that corresponds to the input of the tail
        self.pairs: dict[fx.Node, fx.Node] = {}

    def equal(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, fx.Node):
            return isinstance(value, fx.Node) and self.equal_nodes(value, expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return same and all(self.equal(v, e) for v, e in zip(value, expected, strict=True))
        return type(value) is type(expected) and value == expected

    def equal_nodes(self, node: fx.Node, expected: fx.Node) -> bool:
        if expected not in self.pairs:
            if not self.matches(node, expected):
                return False
            self.pairs[expected] = node
        return self.pairs[expected] is node

    def matches(self, node: fx.Node, expected: fx.Node) -> bool:
        if expected.op == "placeholder":
            self.start = self.start or node
            return self.start is node
        if isinstance(expected.meta.get("val"), torch.SymInt):  # all values have the same batch size
            return isinstance(node.meta.get("val"), torch.SymInt) and node.target is expected.target
        if node.op != expected.op:
            return False
        if expected.op == "get_attr":
            one, two = getattr(self.module, str(node.target)), getattr(self.tail, str(expected.target))
            return _same_tensors(one, two)
        arguments = (node.args, tuple(sorted(node.kwargs.items())))
        others = (expected.args, tuple(sorted(expected.kwargs.items())))
        return node.target is expected.target and self.equal(arguments, others)


def _same_tensors(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one, two)
