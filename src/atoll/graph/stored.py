"""A graph as plain data: a list of operations in JSON and tensors by name, rebuilt without any foreign code.

`store_graph` turns a module into data, and `StoredGraph` is the module that runs it.  Only operations of the table
below are executed: ATen functions of tensors that neither change them nor read files, and arithmetic with sizes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from atoll.errors import CheckpointError, InputError
from atoll.graph.capture import LiveGraph, live_graph
from atoll.graph.digest import all_tensors
from atoll.graph.nodes import live_nodes, locate, operation_name

FORMAT = 1
MAX_NODES = 100_000
DEPTH = 8  # of nested lists in arguments
MAX_ELEMENTS = 2**33  # of a tensor
_PATH = re.compile(r"\w{1,100}(\.\w{1,100}){0,30}", re.ASCII)
_OPERATION = re.compile(r"aten\.(\w+)\.(\w+)", re.ASCII)
_PYTHON: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
        operator.neg, math.floor, math.ceil, torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min,
    )
}  # fmt: skip
_PRIVATE = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_log_softmax", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_prelu_kernel", "_softmax", "_to_copy", "_unsafe_view",
    "_weight_norm_interface",
}  # fmt: skip
_FACTORIES = {"arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"}  # functions without tensors
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last)}
_PLACES = {"device", "layout", "pin_memory", "non_blocking"}  # arguments that depend on the machine


def store_graph(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the graph of a module as plain data, and its weights by name.

    Args:
        module: maps a batch of inputs to logits.
        shape: shape of one input, without the batch dimension.
        dtype: data type of the inputs; that of the parameters if None.

    Raises:
        CaptureError: the module cannot be captured.
        InputError: the graph has an operation that cannot be stored.

    >>> data, tensors = store_graph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    >>> [node["operation"] for node in data["nodes"]], list(tensors)
    (['input', 'aten.linear.default', 'aten.relu.default'], ['0.weight', '0.bias'])
    """
    graph = live_graph(module, shape, dtype)
    writer = _Writer(graph, module)
    return writer.data(), writer.tensors


class _Writer:
    def __init__(self, graph: LiveGraph, module: nn.Module) -> None:
        self.graph, self.module = graph, module
        self.tensors: dict[str, Tensor] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.names: dict[int, str] = {}  # of tensors, so that shared ones are stored once
        self.places: dict[fx.Node, Any] = {}
        self.nodes: list[dict[str, Any]] = []

    def data(self) -> dict[str, Any]:
        weights = all_tensors(self.module)
        for node in live_nodes(self.graph.graph):
            if node.op == "output":
                (logits,) = node.all_input_nodes
                continue
            if node.name in self.graph.tensors:
                name = self.graph.tensors[node.name]
                self.add_tensor(node, name, weights[name])
            elif node.name in self.graph.constants:
                self.add_tensor(node, f"constant_{len(self.tensors)}", self.graph.constants[node.name])
            else:
                self.add_node(node)
        model = self.graph.model
        return {
            "format": FORMAT,
            "shape": list(model.shape),
            "dtype": str(model.dtype),
            "nodes": self.nodes,
            "output": self.places[logits]["node"],
            "tensors": self.about,
        }

    def add_tensor(self, node: fx.Node, name: str, tensor: Tensor) -> None:
        name = self.names.setdefault(id(tensor), name)
        self.places[node] = {"tensor": name}
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        self.about[name] = {"kind": kind, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        self.tensors[name] = tensor.detach()
        if not _PATH.fullmatch(name):
            raise InputError(f"cannot store the model: the name of a tensor, {name!r}, is not a path of identifiers")

    def add_node(self, node: fx.Node) -> None:
        entry: dict[str, Any] = {"operation": "input" if node.op == "placeholder" else operation_name(node)}
        if node.op != "placeholder":
            try:
                find_operation(entry["operation"])
                kwargs = {k: v for k, v in node.kwargs.items() if k not in _PLACES}
                entry |= {"args": self.plain(node.args), "kwargs": {k: self.plain(v) for k, v in kwargs.items()}}
            except CheckpointError as error:
                raise InputError(f"cannot store the model: {error} ({locate(node)})") from None
            if line := locate(node):
                entry["line"] = line
        self.places[node] = {"node": len(self.nodes)}
        self.nodes.append(entry)

    def plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.places[value]
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, torch.dtype | torch.memory_format):
            return {"dtype" if isinstance(value, torch.dtype) else "format": str(value)}
        if isinstance(value, float) and not math.isfinite(value):
            return {"number": str(value)}  # JSON has no infinity
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(f"an argument of type {type(value).__name__} has no plain form")


class StoredGraph(nn.Module):
    """The function that `store_graph` stored.

    Parameters and buffers have the names of the original module.  They are zero until ``load_state_dict``.

    Args:
        data: from `store_graph`, possibly read from a file that somebody else wrote.
        output: the node to return; the logits if None.

    Raises:
        CheckpointError: the data is not a valid graph.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> data, tensors = store_graph(net, (4,))
    >>> stored = StoredGraph(data)
    >>> _ = stored.load_state_dict(tensors)
    >>> x = torch.rand(5, 4)
    >>> torch.equal(stored(x), net(x))
    True
    """

    def __init__(self, data: Mapping[str, Any], output: int | None = None) -> None:
        super().__init__()
        try:
            reader = _Reader(data, output)
            places = {path: self._add(path, data["tensors"][path]) for path in reader.tensors}
        except (TypeError, KeyError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"the stored graph is damaged: {type(error).__name__}: {error}") from None
        self._program = [reader.program]  # in a list, because it is not a submodule: it has no tensors of its own
        self._places = {reader.tensors[path].name: places[path] for path in reader.order}

    def forward(self, x: Tensor) -> Tensor:
        tensors = {
            argument: getattr(self, name) if owner is self else owner(name)
            for argument, (owner, name) in self._places.items()
        }
        value: Tensor = self._program[0].forward(x, **tensors)
        return value

    def _add(self, path: str, about: Mapping[str, Any]) -> tuple[nn.Module, str]:
        """Register a tensor of zeros under a dotted path, and return its module and its name there."""
        if not _PATH.fullmatch(path):
            raise CheckpointError(f"the stored graph is damaged: {path!r} is not a name of a tensor")
        size = [_size(n) for n in about["shape"]]
        if math.prod(size) > MAX_ELEMENTS:
            raise CheckpointError(f"the stored graph has a tensor with more than {MAX_ELEMENTS:,} elements")
        zeros = torch.zeros(size, dtype=_DTYPES[about["dtype"]])
        return register_tensor(self, path, nn.Parameter(zeros) if about["kind"] == "parameter" else zeros)


class TensorGroup(nn.Module):
    """The tensors of a module of the original model.

    A stored graph calls the groups in the order in which it uses their tensors, so that hooks see the layers run.
    """

    def forward(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, name)
        return tensor


def register_tensor(root: nn.Module, path: str, tensor: Tensor) -> tuple[nn.Module, str]:
    """Register a parameter or buffer under a dotted path, and return its module and its name there.

    >>> root = nn.Module()
    >>> _ = register_tensor(root, "layer.0.weight", nn.Parameter(torch.zeros(2)))
    >>> list(root.state_dict())
    ['layer.0.weight']
    """
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in owner._modules:
            owner.add_module(parent, TensorGroup())
        owner = owner.get_submodule(parent)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor)
    return owner, name


class _Reader:
    """Checks stored data and builds a program from it: a function of the input and the tensors that it uses."""

    def __init__(self, data: Mapping[str, Any], output: int | None) -> None:
        if data["format"] != FORMAT:
            raise CheckpointError(f"the stored graph has format {data['format']!r}; this version reads {FORMAT}")
        entries = data["nodes"]
        if not isinstance(entries, list) or not 0 < len(entries) <= MAX_NODES or entries[0]["operation"] != "input":
            raise CheckpointError(f"the stored graph is damaged: expected 1 to {MAX_NODES:,} nodes, the input first")
        graph = fx.Graph()
        self.nodes = [graph.placeholder("x")]
        self.tensors = {path: graph.placeholder(f"tensor_{number}") for number, path in enumerate(data["tensors"])}
        device = graph.call_function(getattr, (self.nodes[0], "device"))
        for entry in entries[1:]:
            function, kwargs = find_operation(entry["operation"]), entry["kwargs"]
            if any(not name.isidentifier() or name in _PLACES for name in kwargs):
                raise CheckpointError(f"the stored graph is damaged: arguments {', '.join(map(repr, kwargs))}")
            args = tuple(self.value(value) for value in entry["args"])
            named = {name: self.value(value) for name, value in kwargs.items()}
            if isinstance(function, OpOverload) and not _takes_tensors(function):
                named["device"] = device
            self.nodes.append(graph.create_node("call_function", function, args, named))
        graph.output(self.nodes[_size(data["output"] if output is None else output)])
        graph.eliminate_dead_code()
        for path, node in list(self.tensors.items()):
            if not node.users:
                graph.erase_node(node)
                del self.tensors[path]
        position = {node: place for place, node in enumerate(graph.nodes)}
        first_use = {path: min(position[user] for user in node.users) for path, node in self.tensors.items()}
        self.order = sorted(first_use, key=first_use.__getitem__)
        self.program = fx.GraphModule({}, graph)

    def value(self, value: Any, depth: int = 0) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() if depth < DEPTH:
                return [self.value(item, depth + 1) for item in value]
            case {"node": int(number), **rest} if not rest and 0 <= number < len(self.nodes):
                return self.nodes[number]
            case {"tensor": str(path), **rest} if not rest:
                return self.tensors[path]
            case {"dtype": str(name), **rest} if not rest:
                return _DTYPES[name]
            case {"format": str(name), **rest} if not rest:
                return _FORMATS[name]
            case {"number": "inf" | "-inf" | "nan" as text, **rest} if not rest:
                return float(text)
        raise CheckpointError(f"the stored graph is damaged: {str(value)[:50]!r} is not an argument")


def find_operation(name: str) -> Callable[..., Any]:
    """Return the function of an operation that may be stored; raises a CheckpointError for all others.

    Operations must be functions of tensors that leave them unchanged, or create constants.

    >>> find_operation("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    >>> find_operation("aten.from_file.default")
    Traceback (most recent call last):
    atoll.errors.CheckpointError: the operation aten.from_file.default cannot be stored
    """
    if name in _PYTHON:
        return _PYTHON[name]
    match = _OPERATION.fullmatch(name)
    operation = getattr(getattr(torch.ops.aten, match[1], None), match[2], None) if match else None
    if isinstance(operation, OpOverload) and match:
        public = not match[1].startswith("_") or match[1] in _PRIVATE
        if not operation._schema.is_mutable and public and (_takes_tensors(operation) or match[1] in _FACTORIES):
            return operation
    raise CheckpointError(f"the operation {name} cannot be stored")


def _takes_tensors(operation: OpOverload) -> bool:
    return any("Tensor" in str(argument.type) for argument in operation._schema.arguments)


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"the stored graph is damaged: expected a size or a number of a node, got {value!r}")
    return value
