"""ONNX files as PyTorch modules, which can be captured and stored like any other.

The reader executes nothing from the file: operators come from the table in `atoll.adopt.onnx_operators`, and the rest
is data.  Files whose batch size is a constant work for any batch size if every Reshape allows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.adopt.onnx_operators import DTYPES, KNOWN, MAX_KNOWN, OPERATORS, NodeContext, Numbers, Operator, Value
from atoll.errors import InputError
from atoll.export.model import expect_onnx
from atoll.graph.capture import silent_torch
from atoll.graph.stored import register_tensor

OLDEST_OPSET = 9
MAX_BYTES = 2**33  # of all tensors together
MAX_NODES = 100_000
MAX_RESULT = 2**30  # bytes of any value for one input, or for a batch of a fixed size
MAX_ATTEMPTS = 1000  # to find the axes of the batch size
_DOMAINS = ("", "ai.onnx")
_ATTRIBUTES = (1, 2, 3, 4, 6, 7)  # types: number, string, tensor, list of numbers
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # not decided without values
_CLOSE = 1e-3  # difference between batch sizes, in parts of the largest value
_STATISTICS = {"BatchNormalization": (3, 4), "QuantizeLinear": (1,), "DequantizeLinear": (1,)}  # inputs, not weights


def read_onnx(path: Path | str, *, output: str | None = None) -> OnnxModel:
    """Read an ONNX file as a PyTorch module.

    Floating-point initializers become parameters.  Scalars and settings, such as the bounds of a Clip, become numbers
    in the graph, and all other constants become buffers.  Quantized files have zero gradients, because QuantizeLinear
    rounds.

    Args:
        path: of the file.  Data in other files must be in the same folder.
        output: name of the output to compute.  By default the only one, or among several outputs the only
            floating-point matrix.

    Raises:
        InputError: the file is damaged or unsafe, has several inputs or outputs, a batch size that cannot change, or
            an operator that is not supported.

    >>> import tempfile
    >>> from atoll.export import export_model
    >>> net, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), torch.rand(5, 1, 8, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = export_model(net, x, f"{folder}/net.onnx")
    ...     model = read_onnx(f"{folder}/net.onnx")
    >>> model.input_shape, torch.allclose(model(x), net(x), atol=1e-6)
    ((1, 8, 8), True)
    """
    expect_onnx()
    path = Path(path)
    try:
        graph = _Reader(path, output).read()
        model = OnnxModel(graph)
        _try(model)
    except InputError as error:
        text = "".join(letter if letter.isprintable() else "?" for letter in str(error))
        raise InputError(f"cannot read {path.name}: {text}") from error.__cause__
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"cannot read {path.name}: it is damaged ({type(error).__name__})") from error
    return model


@dataclass
class Node:
    """One operator of a file.

    Attributes:
        name: for messages.
        operator: its name in ONNX.
        entry: its entry in the table of operators.
        inputs, outputs: names of values; "" for those that are missing.
        attributes: by name.
        varies: for every input, whether it depends on the input of the file.
        expired: names of values that no later node uses.
        batch_axis: the axis of a Reshape that contains the batch size as a constant.
    """

    name: str
    operator: str
    entry: Operator
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    varies: tuple[bool, ...] = ()
    expired: list[str] = field(default_factory=list)
    batch_axis: int | None = None


@dataclass
class OnnxGraph:
    """The checked contents of a file.

    Attributes:
        nodes: those that the output depends on, in order.
        weights: tensors by name, which become parameters if they are in ``learned`` and buffers otherwise.
        settings: constants that are used as numbers, by name.
        learned: names of floating-point initializers.
        opset: version of the operators.
        input, output: their names.
        shape: of the input without the batch; None for sizes that are not known, or instead of an unknown shape.
        dtype: of the input.
        fixed_batch: batch size in the file; None if it may change.
    """

    nodes: list[Node]
    weights: dict[str, Tensor]
    settings: dict[str, Numbers]
    learned: set[str]
    opset: int
    input: str
    output: str
    shape: tuple[int | None, ...] | None
    dtype: torch.dtype
    fixed_batch: int | None


class OnnxModel(nn.Module):
    """A module that computes the output of an ONNX file.

    Args:
        graph: from a file; see `read_onnx`.

    Attributes:
        input_shape: shape of one input, without the batch; None for sizes that are not known, or if nothing is known.
        input_dtype: data type of the input.
        output_name: the output of the file that is computed.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self.input_shape, self.input_dtype, self.output_name = graph.shape, graph.dtype, graph.output
        self.fixed_batch, self._opset, self._input = graph.fixed_batch, graph.opset, graph.input
        self.nodes, self._settings = graph.nodes, graph.settings
        self._paths: dict[str, str] = {}  # of parameters and buffers, by name in the file
        taken = set(dir(self))
        for name, tensor in graph.weights.items():
            self._paths[name] = path = _valid_path(name, taken)
            register_tensor(self, path, nn.Parameter(tensor) if name in graph.learned else tensor)

    def forward(self, x: Tensor) -> Tensor:
        values = self.start(x)
        for node in self.nodes:
            self.run(node, values, x)
            for name in node.expired:
                values.pop(name, None)
        return _as_tensor(values[self.output_name])

    def start(self, x: Tensor) -> dict[str, Value]:
        """Return the values before the first node: the input."""
        return {self._input: x}

    def run(self, node: Node, values: dict[str, Value], x: Tensor) -> None:
        """Compute the outputs of a node and add them to the values."""
        context = NodeContext(
            self._opset, x.device, len(node.outputs), node.varies, self.fixed_batch, x.shape[0], node.batch_axis
        )
        try:
            entry, inputs = self._arguments(node, values, x.device)
            attributes = {**node.attributes, **({"context": context} if entry.needs_context else {})}
            results = entry.function(*inputs, **attributes)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise InputError(f"{reason} (node {node.name!r}, {node.operator})") from error
        parts = results if isinstance(results, tuple) else (results,)
        values.update({name: value for name, value in zip(node.outputs, parts, strict=False) if name})

    def _arguments(self, node: Node, values: dict[str, Value], device: torch.device) -> tuple[Operator, list[Any]]:
        """Return the function of a node, and its inputs in the form that the function expects."""
        numbers = [self._number(name, values) for name in node.inputs]
        if node.operator in KNOWN and all(
            n is not None or not name for n, name in zip(numbers, node.inputs, strict=True)
        ):
            return KNOWN[node.operator], numbers
        kinds = [node.entry.kind(i) for i in range(len(node.inputs))]
        if not any(isinstance(values.get(name), Tensor) for name in node.inputs):
            kinds = ["Tensor" if kind == "Operand" else kind for kind in kinds]  # an operator needs at least one tensor
        return node.entry, [
            self._argument(name, kind, values, device) for name, kind in zip(node.inputs, kinds, strict=True)
        ]

    def _argument(self, name: str, kind: str, values: dict[str, Value], device: torch.device) -> Any:
        if not name:
            return None
        number = self._number(name, values)
        if kind == "Numbers":
            number = self._settings.get(name, number)
            if number is None:
                raise InputError(f"the value {name!r} must be a constant, but it depends on the input")
            return number
        if number is not None and (kind == "Value" or (kind == "Operand" and number.array.ndim == 0)):
            return number if kind == "Value" else number.item()
        if name in self._paths:
            owner, _, leaf = self._paths[name].rpartition(".")
            return getattr(self.get_submodule(owner), leaf)
        return values[name] if number is None else number.tensor(device)

    def _number(self, name: str, values: dict[str, Value]) -> Numbers | None:
        """Return a value if it is known without the input; weights are not, because they may change."""
        value = values.get(name, self._settings.get(name))
        is_weight = name in self._paths and isinstance(value, Numbers) and value.dtype.is_floating_point
        return value if isinstance(value, Numbers) and not is_weight else None


def _valid_path(name: str, taken: set[str]) -> str:
    """Return a dotted path for a tensor that is not the beginning of another one, and add it to those that are taken.

    >>> taken = set()
    >>> [_valid_path(name, taken) for name in ("a.weight", "a", "a.weight", "/b/Conv:0")]
    ['a.weight', 'a_1', 'a.weight_1', 'b_Conv_0']
    """
    parts = [re.sub(r"\W+", "_", part, flags=re.ASCII).strip("_")[:80] for part in name.split(".")]
    parts = [part for part in parts if part][:20] or ["tensor"]
    path, number = ".".join(parts), 0
    while path in taken or any(f"{prefix} leaf" in taken for prefix in _prefixes(path)):
        number += 1
        path = ".".join([*parts[:-1], f"{parts[-1]}_{number}"])
    taken.update([path, f"{path} leaf", *_prefixes(path)])
    return path


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


# --- the first run


@torch.no_grad()
def _try(model: OnnxModel) -> None:
    """Run the model once, if the shape of its input is known, and make it accept any batch size."""
    shape = None if model.input_shape is None else tuple(size for size in model.input_shape if size is not None)
    if model.input_shape is None or shape is None or len(shape) < len(model.input_shape):
        if model.fixed_batch is not None:
            raise InputError(f"the file has a fixed batch size of {model.fixed_batch} and an input of unknown shape")
        return
    check_memory(model, shape)
    if model.fixed_batch is not None:
        _free_batch(model, model.fixed_batch, shape)
    else:
        model(torch.zeros(1, *shape, dtype=model.input_dtype))


class _LargestResult(TorchDispatchMode):
    """Records the size of the largest result of an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.bytes = max(self.bytes, result.numel() * result.element_size())
        return results


def check_memory(model: OnnxModel, shape: tuple[int, ...]) -> None:
    """Raise an InputError if the model needs too much memory for one input, without allocating it.

    Args:
        model: from `read_onnx`, which checks files that state the shape of their input.
        shape: shape of one input, without the batch.
    """
    largest, batch = _LargestResult(), model.fixed_batch or 1
    failure = None
    with torch.no_grad(), silent_torch(), FakeTensorMode(allow_non_fake_inputs=True), largest:
        try:
            model(torch.zeros(batch, *shape, dtype=model.input_dtype))
        except InputError as error:
            failure = error
    if largest.bytes > MAX_RESULT:
        raise InputError(f"it computes a value of {largest.bytes:,} bytes for an input of shape {[batch, *shape]}")
    if failure is not None and not isinstance(failure.__cause__, _NEEDS_VALUES):
        raise failure


# --- any batch size


def _free_batch(model: OnnxModel, size: int, shape: tuple[int, ...]) -> None:
    """Find the axes of constant shapes that contain the batch size, and check that rows do not influence each other.

    Two batches are computed alone and together.  Every Reshape must contain the results of both.  If several of its
    axes are possible, the first one with which the rest of the file works is chosen.
    """
    refusal = f"the file has a fixed batch size of {size}"
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, size, *shape, generator=generator, dtype=torch.float64).to(model.input_dtype)
    model(first)  # raises an error if the file is not valid
    inputs = [first, second / 2, torch.cat([first, second / 2])]
    runs = [model.start(x) for x in inputs]
    choices: list[tuple[int, list[dict[str, Value]], list[int | None]]] = []  # for which there are other axes
    axes: list[int | None] = []  # to try for the next Reshape
    position = attempts = 0
    while True:
        try:
            for node in model.nodes[position:]:
                if node.operator == "Reshape" and node.varies[0]:
                    axes = axes or _batch_axes(model, node, inputs, runs)
                    node.batch_axis, *others = axes
                    axes = []
                    if others:
                        choices.append((position, [dict(values) for values in runs], others))
                for x, values in zip(inputs, runs, strict=True):
                    model.run(node, values, x)
                    for name in node.expired:
                        values.pop(name, None)
                position += 1
            logits = [_as_tensor(values[model.output_name]) for values in runs]
            if logits[2].shape[0] != 2 * size or not _is_close(logits[2], torch.cat(logits[:2]), 1.0):
                raise InputError("its outputs depend on the other inputs of a batch")
            return
        except InputError as error:
            attempts += 1
            if not choices or attempts > MAX_ATTEMPTS:
                raise InputError(f"{refusal}: {error}") from error
            position, runs, axes = choices.pop()


def _batch_axes(model: OnnxModel, node: Node, inputs: list[Tensor], runs: list[dict[str, Value]]) -> list[int | None]:
    """Return the axes of a Reshape that may contain the batch size, the likely ones first; None for no constant."""
    name = node.outputs[0]
    node.batch_axis = None
    for x, values in zip(inputs[:2], runs, strict=False):
        model.run(node, values, x)
    parts = [_as_tensor(values[name]) for values in runs[:2]]
    options: list[tuple[bool, bool, int, int | None]] = []
    for choice in (None, *range(parts[0].dim())):
        node.batch_axis = choice
        try:
            model.run(node, runs[2], inputs[2])
        except InputError:
            continue
        joint = _as_tensor(runs[2][name])
        for axis, length in enumerate(parts[0].shape):
            blocks = _blocks(joint, parts, axis)
            if blocks:
                options.append((length != len(inputs[0]), blocks > 1, len(options), choice))
    if not options:
        raise InputError(f"no axis of a shape contains it (node {node.name!r}, {node.operator})")
    return list(dict.fromkeys(choice for *_, choice in sorted(options, key=lambda option: option[:3])))


def _blocks(joint: Tensor, parts: list[Tensor], axis: int) -> int:
    """Return into how many blocks an axis is divided so that blocks of the two parts alternate; 0 if they do not."""
    sizes = list(parts[0].shape)
    length = sizes[axis]
    if list(joint.shape) != [*sizes[:axis], 2 * length, *sizes[axis + 1 :]]:
        return 0
    for count in range(1, length + 1):
        if length % count == 0:
            divided = [*sizes[:axis], count, length // count, *sizes[axis + 1 :]]
            blocks = [part.reshape(divided) for part in parts]
            if _is_close(joint, torch.cat(blocks, axis + 1).flatten(axis, axis + 1), 0.99):
                return count
    return 0


def _is_close(values: Tensor, expected: Tensor, share: float) -> bool:
    """Whether at least a share of the values are those expected."""
    values, expected = values.double(), expected.double()
    scale = max(expected.nan_to_num(0, 0, 0).abs().max().item(), 1e-30)
    equal = torch.isclose(values, expected, rtol=0, atol=_CLOSE * scale, equal_nan=True)
    return equal.double().mean().item() >= share


def _as_tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)  # a value that depends on the input
    return value


# --- reading


class _Reader:
    """Checks a file and collects what its output needs.  Nothing large is allocated before its size is checked."""

    def __init__(self, path: Path, output: str | None) -> None:
        self.path, self.wanted = path, output
        self.model = _inline_functions(_parse(path))
        self.opset = _opset(self.model)
        self.graph = self.model.graph
        if max(len(self.graph.node), len(self.graph.initializer)) > MAX_NODES:
            raise InputError(f"it has more than {MAX_NODES:,} nodes or tensors")
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        self.initializers = set(self.tensors)
        if len(self.tensors) < len(self.graph.initializer):
            raise InputError("two of its tensors have the same name")
        self.protos = []
        for proto in self.graph.node:
            if proto.op_type == "Constant" and proto.domain in _DOMAINS and len(proto.output) == 1:
                self.tensors[proto.output[0]] = _constant(proto)
            else:
                self.protos.append(proto)
        self._check_sizes()

    def read(self) -> OnnxGraph:
        input_name, shape, dtype = self._input()
        output_name = self._output()
        protos = self._live(input_name, output_name)
        nodes = [self._node(proto) for proto in protos]
        _follow(nodes, input_name, output_name)
        weights, settings = self._constants(nodes)
        batch = shape[0] if shape else None
        rest = None if shape is None else shape[1:]
        learned = {name for name in weights if name in self.initializers and weights[name].is_floating_point()}
        for node in nodes:
            learned -= {node.inputs[i] for i in _STATISTICS.get(node.operator, ()) if i < len(node.inputs)}
        return OnnxGraph(nodes, weights, settings, learned, self.opset, input_name, output_name, rest, dtype, batch)

    def _check_sizes(self) -> None:
        if self.graph.sparse_initializer:
            raise InputError("it has sparse tensors, which are not supported")
        total = sum(_tensor_bytes(tensor) for tensor in self.tensors.values())
        if total > MAX_BYTES:
            raise InputError(f"its tensors have {total:,} bytes, more than {MAX_BYTES:,}")

    def _input(self) -> tuple[str, tuple[int | None, ...] | None, torch.dtype]:
        inputs = [value for value in self.graph.input if value.name not in self.initializers]
        if len(inputs) != 1:
            names = ", ".join(value.name for value in inputs)
            raise InputError(f"expected one input, got {len(inputs)} ({names})")
        kind = inputs[0].type.tensor_type
        dtype = DTYPES.get(kind.elem_type)
        if dtype is None or not dtype.is_floating_point:
            raise InputError(f"the input {inputs[0].name!r} is not floating-point")
        shape = tuple(dim.dim_value or None for dim in kind.shape.dim) if kind.HasField("shape") else None
        if shape == () or any(size is not None and size < 0 for size in shape or ()):
            raise InputError(f"the input {inputs[0].name!r} has no valid shape")
        return inputs[0].name, shape, dtype

    def _output(self) -> str:
        outputs = {value.name: value.type.tensor_type for value in self.graph.output}
        names = ", ".join(outputs)
        if self.wanted is not None:
            if self.wanted not in outputs:
                raise InputError(f"it has no output {self.wanted!r}, but {names}")
            return self.wanted
        dtypes = {name: DTYPES.get(kind.elem_type, torch.float32) for name, kind in outputs.items()}
        floating = [name for name, dtype in dtypes.items() if dtype.is_floating_point]
        matrices = [name for name in floating if len(outputs[name].shape.dim) == 2]
        choice = floating if len(outputs) == 1 else matrices
        if not floating:
            raise InputError(f"no output is floating-point ({names}); expected logits")
        if len(choice) != 1:
            raise InputError(f"it has {len(outputs)} outputs ({names}); choose one by its name")
        return str(choice[0])

    def _live(self, input_name: str, output_name: str) -> list[Any]:
        """Return the nodes that the output depends on, after checking their order."""
        defined = {input_name, *self.tensors}
        for proto in self.protos:
            missing = [name for name in proto.input if name and name not in defined]
            if missing:
                raise InputError(f"{missing[0]!r} is used before it is computed (node {_title(proto)!r})")
            outputs = {name for name in proto.output if name}
            if outputs & defined:
                raise InputError(f"{min(outputs & defined)!r} is computed twice (node {_title(proto)!r})")
            defined |= outputs
        needed, live = {output_name}, []
        for proto in reversed(self.protos):
            if needed.intersection(proto.output):
                needed.update(name for name in proto.input if name)
                live.append(proto)
        if input_name not in needed or not live:
            raise InputError(f"the output {output_name!r} does not depend on the input")
        if len(live) > MAX_NODES:
            raise InputError(f"it has {len(live):,} nodes, more than {MAX_NODES:,}")
        return live[::-1]

    def _node(self, proto: Any) -> Node:
        title = _title(proto)
        if any(attribute.type in (5, 10) for attribute in proto.attribute):  # graphs
            raise InputError(f"node {title!r} ({proto.op_type}) branches or loops, which is not supported")
        entry = OPERATORS.get(proto.op_type) if proto.domain in _DOMAINS else None
        if entry is None:
            name = f"{proto.domain}.{proto.op_type}".lstrip(".")
            raise InputError(f"the operator {name} is not supported (node {title!r})")
        inputs = list(proto.input)
        while inputs and not inputs[-1]:
            inputs.pop()
        given = len(inputs) - inputs[: entry.required].count("")
        if given < entry.required or (len(inputs) > len(entry.kinds) and not entry.repeats) or not inputs:
            raise InputError(f"{len(inputs)} inputs of {proto.op_type} are not supported (node {title!r})")
        attributes = _attributes(proto, entry, self.opset)
        return Node(title, proto.op_type, entry, inputs, list(proto.output), attributes)

    def _constants(self, nodes: list[Node]) -> tuple[dict[str, Tensor], dict[str, Numbers]]:
        """Read the constants that nodes use: as tensors, as numbers, or both."""
        uses: dict[str, set[str]] = {}
        for node in nodes:
            for position, name in enumerate(node.inputs):
                if name in self.tensors:
                    uses.setdefault(name, set()).add(node.entry.kind(position))
        weights, settings = {}, {}
        for name, kinds in uses.items():
            tensor = _read_tensor(self.tensors[name], self.path.parent)
            is_scalar = tensor.dim() == 0 or (tensor.numel() == 1 and name not in self.initializers)
            is_known = not tensor.is_floating_point() or is_scalar or "Numbers" in kinds
            if is_known and tensor.numel() <= MAX_KNOWN:
                settings[name] = Numbers(tensor.tolist() if tensor.numel() else np.empty(tensor.shape), tensor.dtype)
            if kinds != {"Numbers"} and not is_scalar:
                weights[name] = tensor
        return weights, settings


def _title(proto: Any) -> str:
    return str(proto.name or next(iter(proto.output), ""))[:200]


def _follow(nodes: list[Node], input_name: str, output_name: str) -> None:
    """Note which inputs of nodes depend on the input, and after which node a value is not used any more."""
    varying = {input_name}
    last: dict[str, Node] = {}
    for node in nodes:
        node.varies = tuple(name in varying for name in node.inputs)
        if any(node.varies) and node.operator not in ("Shape", "Size"):
            varying.update(node.outputs)
        last.update(dict.fromkeys([*node.inputs, *node.outputs], node))
    for name, node in last.items():
        if name != output_name:
            node.expired.append(name)
    if output_name not in varying:
        raise InputError(f"the output {output_name!r} does not depend on the input")
    used = {name for node in nodes for name in node.inputs} | {output_name}
    for node in nodes:
        count = node.entry.outputs
        if count is not None and used.intersection(node.outputs[count:]):
            raise InputError(f"output {count + 1} of {node.operator} is not supported (node {node.name!r})")


def _parse(path: Path) -> Any:
    import onnx

    try:
        if not path.is_file():
            raise InputError("it is not a file" if path.exists() else "there is no such file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"it is larger than {MAX_BYTES:,} bytes")
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise InputError(str(error.strerror)) from error
    except InputError:
        raise
    except Exception as error:  # of protobuf
        raise InputError("it is not an ONNX file, or it is damaged") from error
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise InputError("it is not an ONNX file, or it is damaged")
    return model


def _opset(model: Any) -> int:
    import onnx

    newest = onnx.defs.onnx_opset_version()
    versions = [entry.version for entry in model.opset_import if entry.domain in _DOMAINS]
    if len(versions) != 1 or not OLDEST_OPSET <= versions[0] <= newest:
        got = ", ".join(map(str, versions)) or "none"
        raise InputError(f"expected an opset from {OLDEST_OPSET} to {newest}, got {got}")
    return int(versions[0])


def _inline_functions(model: Any) -> Any:
    """Replace calls of functions that the file defines with their nodes."""
    if not model.functions:
        return model
    from onnx.inliner import inline_local_functions

    bodies = {(f.domain, f.name, f.overload): f.node for f in model.functions}
    if len(bodies) < len(model.functions):
        raise InputError("it defines a function twice")
    sizes: dict[Any, int] = {}

    def size(nodes: Any, depth: int) -> int:
        if depth > 100:
            raise InputError("its functions call each other without end")
        count = 0
        for node in _all_nodes(nodes):
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and key not in sizes:
                sizes[key] = size(bodies[key], depth + 1)
            count += sizes.get(key, 1)
        return count

    if size(model.graph.node, 0) > MAX_NODES:
        raise InputError(f"its functions expand to more than {MAX_NODES:,} nodes")
    try:
        return inline_local_functions(model)
    except Exception as error:
        raise InputError("its functions cannot be inlined") from error


def _all_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)


def _attributes(proto: Any, entry: Operator, opset: int) -> dict[str, Any]:
    import onnx

    place = f"{proto.op_type} (node {_title(proto)!r})"
    try:
        schema = onnx.defs.get_schema(proto.op_type, opset, "").attributes
    except onnx.defs.SchemaError:
        schema = {}  # an operator of ONNX Runtime, or newer than the opset
    values = {}
    for attribute in proto.attribute:
        if attribute.name not in entry.attributes or attribute.ref_attr_name or attribute.type not in _ATTRIBUTES:
            raise InputError(f"the attribute {attribute.name!r} of {place} is not supported")
        if attribute.name in schema and attribute.type != int(cast(Any, schema[attribute.name].type).value):
            raise InputError(f"the attribute {attribute.name!r} of {place} has the wrong type")
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        elif isinstance(value, onnx.TensorProto):
            if _tensor_bytes(value) > MAX_KNOWN:
                raise InputError(f"the attribute {attribute.name!r} of {place} is too large")
            value = Numbers(_read_tensor(value, None).tolist(), DTYPES[value.data_type])
        values[attribute.name] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    missing = [name for name, about in schema.items() if about.required and name not in values]
    if missing:
        raise InputError(f"the attribute {missing[0]!r} of {place} is missing")
    return values


# --- tensors


def _constant(proto: Any) -> Any:
    """Return the value of a Constant node."""
    import onnx

    attribute = proto.attribute[0] if len(proto.attribute) == 1 else onnx.AttributeProto()
    if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
        return attribute.t
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in dtypes or attribute.type not in _ATTRIBUTES:
        raise InputError(f"the constant {proto.output[0]!r} is not supported")
    value = onnx.helper.get_attribute_value(attribute)
    return onnx.numpy_helper.from_array(np.array(value, dtype=dtypes[attribute.name]), proto.output[0])


def _tensor_bytes(tensor: Any) -> int:
    """Return the size of a tensor in bytes, after checking that its data has this size."""
    import onnx

    dtype = DTYPES.get(tensor.data_type)
    if dtype is None or any(size < 0 for size in tensor.dims):
        raise InputError(f"the shape or data type of the tensor {tensor.name!r} is not supported")
    count = int(math.prod(tensor.dims))
    size = count * dtype.itemsize
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return size
    if tensor.HasField("raw_data"):
        is_complete = len(tensor.raw_data) == size
    else:
        is_complete = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))) == count
    if not is_complete:
        raise InputError(f"the tensor {tensor.name!r} of shape {list(tensor.dims)} has too little or too much data")
    return size


def _read_tensor(tensor: Any, folder: Path | None) -> Tensor:
    import onnx

    dtype = DTYPES[tensor.data_type]
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if folder is None:
            raise InputError(f"the tensor {tensor.name!r} must be in the file itself")
        content = _external_data(tensor, folder, _tensor_bytes(tensor))
        tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=content)
    array = onnx.numpy_helper.to_array(tensor)
    if dtype == torch.bfloat16:
        array = array.astype(np.float32)
    return torch.tensor(array).to(dtype)


def _external_data(tensor: Any, folder: Path, size: int) -> bytes:
    """Read the data of a tensor from another file, which must be in the folder."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    folder = folder.resolve()
    try:
        path = (folder / location).resolve()
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
        is_inside = (
            path.is_relative_to(folder) and ".." not in Path(location).parts and not Path(location).is_absolute()
        )
        if not location or not is_inside:
            raise InputError(f"the data of the tensor {tensor.name!r} is outside the folder of the file")
        if not path.is_file() or offset < 0 or length != size or offset + size > path.stat().st_size:
            raise InputError(
                f"{location[:200]}, the file with the data of the tensor {tensor.name!r}, is missing or damaged"
            )
        with path.open("rb") as file:
            file.seek(offset)
            content: bytes = file.read(size)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the data of the tensor {tensor.name!r} cannot be read") from error
    if len(content) != size:
        raise InputError(f"the data of the tensor {tensor.name!r} cannot be read")
    return content
