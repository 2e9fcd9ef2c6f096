"""Write ONNX graphs with the operators and method names of PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.graph import tensors_digest

OPSET = 18
_IR_VERSION = 8  # the format of files when this opset appeared, so that older runtimes read them
_MAX_BYTES = 2**31 - 2**20  # protobuf refuses 2 GB; the rest is for the graph
_LARGEST = torch.iinfo(torch.int64).max

Number = float | int


class Writer:
    """An ONNX graph that grows node by node; equal constants are stored once.

    Args:
        exact: compute in exactly the precision of the graph, as certificates assume (see `constant`).  Otherwise
            operations may use the operators that runtimes compute fastest.

    >>> writer = Writer()
    >>> x = writer.input("x", torch.float32, (-1, 2))
    >>> y = (x + torch.tensor([1.0, 0.0])).relu()
    >>> [operator for operator, *_ in writer.nodes]
    ['Add', 'Relu']
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self.nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []  # operator, inputs, outputs, attributes
        self.constants: dict[str, Tensor] = {}
        self.inputs: list[OnnxValue] = []
        self._names: dict[str, str] = {}  # of constants, by digest
        self._lookups: dict[str, str] = {}  # results of lookups, by name of the table

    def input(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> OnnxValue:
        """Declare an input; -1 in its shape is the batch dimension."""
        value = OnnxValue(self, name, dtype, shape)
        self.inputs.append(value)
        return value

    def node(
        self, operator: str, inputs: Sequence[OnnxValue], dtype: torch.dtype, *, outputs: int = 1, **attributes: Any
    ) -> OnnxValue:
        """Append a node; returns the first of its outputs."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append((operator, [value.name for value in inputs], names, attributes))
        return OnnxValue(self, names[0], dtype)

    def constant(self, tensor: Tensor) -> OnnxValue:
        """A constant of the tensor's type.

        ONNX Runtime's optimizer rounds constants of one element to float32, even if they are float64: it drops a
        product with 1 + 1e-9 (``NoopElimination``), and moves factors next to a product of matrices into an attribute
        (``MatMulScaleFusion``).  So these constants are looked up at run time, by an index that depends on the input,
        if the graph has to be exact.
        """
        tensor = tensor.detach().cpu().contiguous()
        is_rounded = self.exact and tensor.is_floating_point() and tensor.numel() == 1
        name = self._lookup(tensor) if is_rounded else self._store(tensor)
        return OnnxValue(self, name, tensor.dtype, tuple(tensor.shape), tensor)

    def _store(self, tensor: Tensor) -> str:
        name = self._names.setdefault(tensors_digest(tensor), f"c{len(self._names)}")
        self.constants[name] = tensor
        return name

    def _lookup(self, tensor: Tensor) -> str:
        table = self._store(torch.stack([tensor, tensor]))
        if table not in self._lookups:
            rows = OnnxValue(self, table, tensor.dtype)
            self._lookups[table] = self.node("Gather", [rows, self._either_row], tensor.dtype, axis=0).name
        return self._lookups[table]

    @cached_property
    def _either_row(self) -> OnnxValue:
        """0 or 1, which no optimizer can tell."""
        (x, *_) = self.inputs
        total = self.node("ReduceSum", [x], x.dtype, keepdims=0)
        zero = self.node("Sub", [total, total], x.dtype)
        return self.node("Equal", [total, zero], torch.bool).to(torch.int64)

    def integers(self, values: Sequence[int]) -> OnnxValue:
        """A constant vector, such as a shape or axes."""
        return self.constant(torch.tensor(list(values), dtype=torch.int64))

    def concatenate(self, values: Sequence[OnnxValue], dim: int) -> OnnxValue:
        """Values after one another, along a dimension."""
        return self.node("Concat", values, values[0].dtype, axis=dim)

    def to_bytes(self, properties: Mapping[str, str] | None = None, /, **outputs: OnnxValue) -> bytes:
        """The file, with properties as its metadata; its outputs have the names of the arguments."""
        from onnx import helper, numpy_helper

        nodes = [helper.make_node(op, inputs, results, **attrs) for op, inputs, results, attrs in self.nodes]
        nodes += [helper.make_node("Identity", [value.name], [name]) for name, value in outputs.items()]
        inputs = [_value_info(value.name, value) for value in self.inputs]
        results = [_value_info(name, value) for name, value in outputs.items()]
        used = {name for node in nodes for name in node.input}
        tensors = {name: tensor for name, tensor in self.constants.items() if name in used}
        if (size := sum(tensor.nbytes for tensor in tensors.values())) > _MAX_BYTES:
            raise InputError(f"onnx: expected weights of at most 2 GB, the limit of the format, got {size:,} bytes")
        constants = [numpy_helper.from_array(np.asarray(tensor), name) for name, tensor in tensors.items()]
        graph = helper.make_graph(nodes, "atoll", inputs, results, constants)
        if properties and "Image.BitmapPixelFormat" in properties:  # the tensor that ONNX's own keys are about
            graph.input[0].type.denotation = "IMAGE"
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=_IR_VERSION,
            producer_name="atoll",
            producer_version=version("atoll"),
        )
        helper.set_model_props(model, dict(properties or {}))
        content: bytes = model.SerializeToString()
        return content


def _value_info(name: str, value: OnnxValue) -> Any:
    from onnx import helper

    shape = [size if size >= 0 else "batch" for size in value.shape]
    return helper.make_tensor_value_info(name, _onnx_type(value.dtype), shape)


def _onnx_type(dtype: torch.dtype) -> int:
    from onnx import TensorProto

    types = {
        torch.float32: TensorProto.FLOAT,
        torch.float64: TensorProto.DOUBLE,
        torch.int64: TensorProto.INT64,
        torch.int32: TensorProto.INT32,
        torch.bool: TensorProto.BOOL,
    }
    if dtype not in types:
        raise InputError(f"onnx: expected float32, float64, int32, int64 or bool, got {dtype}")
    return int(types[dtype])


@dataclass(frozen=True, eq=False)
class OnnxValue:
    """A tensor of the file, with the methods of a `Tensor`.

    Numbers in expressions become constants of the value's type: attributes of ONNX nodes would be float32.

    Args:
        writer: of the graph.
        name: in the graph.
        dtype: of the elements.
        shape: -1 for the batch dimension; only known for inputs, constants and results of captured operations.
        tensor: of a constant.
    """

    writer: Writer = field(repr=False)
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    tensor: Tensor | None = field(default=None, repr=False)

    def of_shape(self, shape: tuple[int, ...]) -> OnnxValue:
        """The same value, of a known shape."""
        return dataclasses.replace(self, shape=shape)

    def lift(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        """An operand as a value of this type."""
        if isinstance(other, OnnxValue):
            return other.to(self.dtype)
        return self.writer.constant(torch.as_tensor(other, dtype=self.dtype))

    def apply(self, operator: str, *others: OnnxValue | Tensor | Number, **attributes: Any) -> OnnxValue:
        """An operator whose operands and result have this type."""
        return self.writer.node(operator, [self, *map(self.lift, others)], self.dtype, **attributes)

    def _compare(self, operator: str, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.writer.node(operator, [self, self.lift(other)], torch.bool)

    def _with_integers(self, operator: str, *vectors: Sequence[int], **attributes: Any) -> OnnxValue:
        return self.writer.node(operator, [self, *map(self.writer.integers, vectors)], self.dtype, **attributes)

    # --- arithmetic

    def __add__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Add", other)

    def __sub__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Sub", other)

    def __mul__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Mul", other)

    def __truediv__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Div", other)

    def __matmul__(self, other: OnnxValue | Tensor) -> OnnxValue:
        return self.apply("MatMul", other)

    def __radd__(self, other: Number) -> OnnxValue:
        return self.lift(other) + self

    def __rsub__(self, other: Number) -> OnnxValue:
        return self.lift(other) - self

    def __rmul__(self, other: Number) -> OnnxValue:
        return self.lift(other) * self

    def __rtruediv__(self, other: Number) -> OnnxValue:
        return self.lift(other) / self

    def __neg__(self) -> OnnxValue:
        return self.apply("Neg")

    def __gt__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self._compare("Greater", other)

    def __ge__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self._compare("GreaterOrEqual", other)

    def __lt__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self._compare("Less", other)

    def __le__(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self._compare("LessOrEqual", other)

    def eq(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self._compare("Equal", other)

    def __and__(self, other: OnnxValue) -> OnnxValue:
        return self._compare("And", other)

    def maximum(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Max", other)

    def minimum(self, other: OnnxValue | Tensor | Number) -> OnnxValue:
        return self.apply("Min", other)

    def clamp(self, low: OnnxValue | Number | None, high: OnnxValue | Number | None) -> OnnxValue:
        value = self if low is None else self.maximum(low)
        return value if high is None else value.minimum(high)

    def relu(self) -> OnnxValue:
        return self.apply("Relu")

    def abs(self) -> OnnxValue:
        return self.apply("Abs")

    def exp(self) -> OnnxValue:
        return self.apply("Exp")

    def log(self) -> OnnxValue:
        return self.apply("Log")

    def sqrt(self) -> OnnxValue:
        return self.apply("Sqrt")

    def tanh(self) -> OnnxValue:
        return self.apply("Tanh")

    def where(self, condition: OnnxValue, other: OnnxValue | Tensor | Number) -> OnnxValue:
        """This value if the condition is true, the other one if not."""
        return self.writer.node("Where", [condition, self, self.lift(other)], self.dtype)

    def to(self, dtype: torch.dtype) -> OnnxValue:
        if dtype == self.dtype:
            return self
        if self.tensor is not None:
            return self.writer.constant(self.tensor.to(dtype))
        return self.writer.node("Cast", [self], dtype, to=_onnx_type(dtype)).of_shape(self.shape)

    # --- reductions

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> OnnxValue:
        return self._with_integers("ReduceSum", dims, keepdims=int(keepdim))

    def amax(self, dims: Sequence[int], keepdim: bool = False) -> OnnxValue:
        return self._with_integers("ReduceMax", dims, keepdims=int(keepdim))

    def amin(self, dims: Sequence[int], keepdim: bool = False) -> OnnxValue:
        return self._with_integers("ReduceMin", dims, keepdims=int(keepdim))

    def cumsum(self, dim: int) -> OnnxValue:
        return self.writer.node("CumSum", [self, self.writer.constant(torch.tensor(dim))], self.dtype)

    def norm(self, dims: Sequence[int], keepdim: bool = False) -> OnnxValue:
        return (self * self).sum(dims, keepdim).sqrt()

    def argmax(self, dim: int, keepdim: bool = False) -> OnnxValue:
        return self.writer.node("ArgMax", [self], torch.int64, axis=dim, keepdims=int(keepdim))

    def argmin(self, dim: int, keepdim: bool = False) -> OnnxValue:
        return self.writer.node("ArgMin", [self], torch.int64, axis=dim, keepdims=int(keepdim))

    # --- elements in another order

    def reshape(self, *shape: int) -> OnnxValue:
        """At most one size is -1."""
        return self._with_integers("Reshape", shape)

    def permute(self, *dims: int) -> OnnxValue:
        return self.writer.node("Transpose", [self], self.dtype, perm=list(dims))

    def unsqueeze(self, dim: int) -> OnnxValue:
        return self._with_integers("Unsqueeze", [dim])

    def squeeze(self, dims: Sequence[int]) -> OnnxValue:
        return self._with_integers("Squeeze", dims)

    def slice(self, dim: int, start: int = 0, end: int = _LARGEST, step: int = 1) -> OnnxValue:
        return self._with_integers("Slice", [start], [end], [dim], [step])

    def pad(self, before: Sequence[int], after: Sequence[int], value: Number = 0.0) -> OnnxValue:
        """Numbers of elements to add per dimension; negative ones remove elements."""
        widths = self.writer.integers([*before, *after])
        return self.writer.node("Pad", [self, widths, self.lift(value)], self.dtype)

    def index_select(self, dim: int, index: OnnxValue | Tensor) -> OnnxValue:
        """Slices along a dimension; an index of several dimensions takes its place."""
        index = index if isinstance(index, OnnxValue) else self.writer.constant(index)
        return self.writer.node("Gather", [self, index], self.dtype, axis=dim)

    def gather(self, dim: int, index: OnnxValue) -> OnnxValue:
        return self.writer.node("GatherElements", [self, index], self.dtype, axis=dim)

    def topk(self, k: int, dim: int, largest: bool = True) -> tuple[OnnxValue, OnnxValue]:
        """The largest or smallest elements in order, and their indices."""
        count = self.writer.integers([k])
        values = self.writer.node("TopK", [self, count], self.dtype, outputs=2, axis=dim, largest=int(largest))
        return values, OnnxValue(self.writer, self.writer.nodes[-1][2][1], torch.int64)

    def size(self, dim: int) -> OnnxValue:
        """The size of a dimension, as a vector of one element."""
        return self.writer.node("Shape", [self], torch.int64, start=dim, end=dim + 1)

    def expand(self, shape: OnnxValue) -> OnnxValue:
        """Broadcast to a shape that may be computed."""
        return self.writer.node("Expand", [self, shape], self.dtype)

    def repeat(self, repeats: Sequence[int]) -> OnnxValue:
        return self._with_integers("Tile", repeats)
