"""Capture a model as a graph of ATen operations with frozen weights.

`torch.export` traces the forward pass, so the graph includes hooks, overridden methods, parametrizations, shared
modules and autocast regions.  It consists of core ATen operations and a few that are not decomposed (`_WHOLE`).
Subgraphs that depend only on weights are computed once and become constants.

Gradients follow the graph, which includes `detach` but not custom backward formulas (`torch.autograd.Function`)
and `torch.no_grad` regions.  Like `torch.export`, `capture` is not thread-safe.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, default_decompositions, export
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from atoll.errors import CaptureError, InputError
from atoll.graph.digest import all_tensors, graph_digest, tensors_digest
from atoll.graph.nodes import draws_random_numbers, live_nodes, locate, locate_error, operation_name

_BATCHES = (1, 3)  # batch sizes at which the captured model is compared with the module; the larger one is traced
_MAX_BATCH = 2**20
_ATEN = torch.ops.aten

# Not decomposed, because that would change the last bits of the result, lose the derivative, or hide an operation for
# which there is a rule.
_WHOLE = (
    "_prelu_kernel", "celu", "detach", "eye", "glu", "hardsigmoid", "hardswish", "im2col", "linear", "log_sigmoid",
    "matmul", "mish", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
    "rms_norm", "rrelu", "scaled_dot_product_attention", "silu", "softplus", "threshold", "upsample_bicubic2d.vec",
)  # fmt: skip


def capture(module: nn.Module, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> CapturedModel:
    """Capture the function that a module computes in evaluation mode.

    The module is not changed.  The captured model has the same outputs up to rounding, which is checked for two batch
    sizes, with and without gradients; `CapturedModel.exact` says whether they are bit-identical.

    Args:
        module: maps a batch of inputs to logits of shape (batch, classes).
        shape: shape of one input, without the batch dimension.
        dtype: data type of the inputs; the weights keep theirs.

    Raises:
        CaptureError: the forward pass draws random numbers, branches on data, changes buffers or its input, does not
            return logits, or cannot be exported.  The message names the operation and the line.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> model = capture(net, (4,))
    >>> x = torch.rand(5, 4)
    >>> torch.equal(model(x), net(x)), model.operations()
    (True, Counter({'aten.linear.default': 1, 'aten.relu.default': 1}))
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected an nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError("cannot capture the model: it is a TorchScript module; use the original module")
    if not dtype.is_floating_point:
        raise InputError(f"dtype: expected a floating-point type, got {dtype}")
    with torch.inference_mode(False), _evaluation(module):
        model = _trace(module, tuple(shape), dtype).model
        model.exact = _compare(model, module)
    return model


def exported_program(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> tuple[ExportedProgram, dict[str, str]]:
    """Return the graph before weights are folded, and the tensor names of its placeholders.

    Args:
        module: maps a batch of inputs to logits.
        shape: shape of one input, without the batch dimension.
        dtype: data type of the inputs; that of the parameters if None.
    """
    dtype = dtype or next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    with torch.inference_mode(False), _evaluation(module):
        program = _export(module, _example(module, tuple(shape), dtype, _BATCHES[-1]))
    return program, _tensor_inputs(program)[0]


@dataclass(frozen=True)
class LiveGraph:
    """A captured model together with the original graph, in which weights are placeholders.

    Attributes:
        model: the frozen graph.
        graph: the graph before folding, including the operations that compute weights.
        tensors: names of parameters and buffers, by placeholder.
        constants: other tensors, by placeholder.
        sources: nodes of ``graph`` by the name of the corresponding node of ``model``.
    """

    model: CapturedModel
    graph: fx.Graph
    tensors: dict[str, str]
    constants: dict[str, Tensor]
    sources: dict[str, fx.Node]

    @cached_property
    def weight_nodes(self) -> set[fx.Node]:
        """The nodes of ``graph`` that depend only on weights."""
        nodes: set[fx.Node] = set()
        for node in self.graph.nodes:
            is_weight = node.name in self.tensors or node.name in self.constants
            if is_weight if node.op == "placeholder" else all(n in nodes for n in node.all_input_nodes):
                nodes.add(node)
        return nodes


def live_graph(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> LiveGraph:
    """Capture a module and keep the graph in which its weights are inputs, so that they may change later.

    Args:
        module: maps a batch of inputs to logits.
        shape: shape of one input, without the batch dimension.
        dtype: data type of the inputs; that of the parameters if None.
    """
    dtype = dtype or next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    with torch.inference_mode(False), _evaluation(module):
        return _trace(module, tuple(shape), dtype)


class CapturedModel(nn.Module):
    """A frozen graph of ATen operations from inputs to logits, independent of the module it was captured from.

    Attributes:
        graph_module: generated code; `graph_module.graph` has the nodes, with source lines (`locate`) and shapes.
        digest: identifies the function: the graph before folding and all weights it uses.
        shape, dtype: shape and data type of one input.
        exact: whether the outputs were bit-identical to those of the module at capture, not only up to rounding.
    """

    def __init__(self, graph_module: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype, digest: str) -> None:
        super().__init__()
        self.graph_module, self.shape, self.dtype, self.digest = graph_module, shape, dtype, digest
        self.exact = False
        self.eval()
        self._captured_state = self._state()

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape or x.dtype != self.dtype:
            sizes = ", ".join(["batch", *map(str, self.shape)])
            raise InputError(f"x: expected shape ({sizes}) and {self.dtype}, got {tuple(x.shape)} and {x.dtype}")
        with torch.autocast(x.device.type, enabled=False):  # the graph already contains the casts
            logits: Tensor = self.graph_module.forward(x.contiguous())  # independent of the strides of the input
            return logits

    def __call__(self, x: Tensor) -> Tensor:
        """Run only the graph, without hooks and without a ``forward`` set on the instance."""
        return CapturedModel.forward(self, x)

    def check_unchanged(self) -> None:
        """Raise an InputError if a constant was replaced or changed in place since the capture."""
        if self._state() != self._captured_state:
            raise InputError("the captured model was modified; capture the module again")

    def __getstate__(self) -> dict[str, Any]:
        self.check_unchanged()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._captured_state = self._state()

    def _state(self) -> list[tuple[str, int, int, int]]:
        return [(name, id(b), b._version, b.data_ptr()) for name, b in self.named_buffers()]

    def with_value(self, node: fx.Node) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function that computes the value of a node and the logits, with the same constants."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        logits = graph.graph_copy(self.graph_module.graph, copies)
        graph.output((copies[node], logits))
        module = fx.GraphModule(self.graph_module, graph)

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(x.device.type, enabled=False):
                outputs: tuple[Tensor, Tensor] = module.forward(x.contiguous())
                return outputs

        return run

    def operations(self) -> Counter[str]:
        """Count how often each operation occurs."""
        nodes = self.graph_module.graph.nodes
        return Counter(operation_name(node) for node in nodes if node.op == "call_function")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError("a captured model is frozen; load the weights into the module and capture it again")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if any(fn(b[:0] if b.dim() else b).dtype != b.dtype for b in self.buffers()):
            raise InputError("a captured model cannot change its precision; convert the module and capture it again")
        self.check_unchanged()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._captured_state = self._state()
        return self


def _trace(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> LiveGraph:
    """Export a module in evaluation mode, reject it if it is not a pure function, and freeze the weights."""
    program = _export(module, _example(module, shape, dtype, _BATCHES[-1]))
    _refuse_outputs(program)
    names, constants = _tensor_inputs(program)
    nodes = live_nodes(program.graph)
    for node in nodes:
        if draws_random_numbers(node):
            raise _refusal(f"{operation_name(node)} draws random numbers", locate(node))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise _refusal(f"{node.target} branches or loops on data", locate(node))
    weights = all_tensors(module)
    tensors = {**{node: weights[name].detach() for node, name in names.items()}, **constants}
    folder = _Folder(tensors, names)
    try:
        graph_module = folder.fold(nodes)
    except Exception as error:
        raise CaptureError(f"cannot fold the weights of the model: {_first_line(error)}") from error
    model = CapturedModel(graph_module, shape, dtype, graph_digest(program.graph, tensors))
    sources: dict[str, fx.Node] = {}
    for source, copy in folder.copies.items():
        if isinstance(copy, fx.Node):
            sources.setdefault(copy.name, source)
    return LiveGraph(model, program.graph, names, constants, sources)


# --- export


def _export(module: nn.Module, example: Tensor) -> ExportedProgram:
    batch = Dim("batch", min=1, max=_MAX_BATCH)
    try:
        with _export_settings(), torch.enable_grad():
            program = export(module, (example,), dynamic_shapes=({0: batch},), strict=False)
            for node in program.graph.nodes:
                if node.target is _ATEN.view.default:  # decompositions may change strides, which view does not allow
                    node.target = _ATEN.reshape.default
            decomposed: ExportedProgram = program.run_decompositions(_decompositions())
            return decomposed
    except Exception as error:
        raise _export_refusal(error) from error


def _decompositions() -> dict[Any, Callable[..., Any]]:
    table: Any = default_decompositions()
    for name in _WHOLE:
        packet, _, overload = name.partition(".")
        if hasattr(_ATEN, packet):
            table.pop(getattr(getattr(_ATEN, packet), overload or "default"), None)
    table[_ATEN.copy.default] = lambda target, source, non_blocking=False: source.to(target.dtype).expand(target.shape)
    for empty in (_ATEN.empty.memory_format, _ATEN.empty_permuted.default, _ATEN.empty_strided.default):
        table[empty] = _zeros
    return table  # type: ignore[no-any-return]  # not a dict, but used as one


def _zeros(size: Any, *_: Any, dtype: torch.dtype | None = None, device: Any = None, **__: Any) -> Tensor:
    """Replace uninitialized memory, whose values would differ between calls, with zeros."""
    return torch.full(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


@contextlib.contextmanager
def silent_torch() -> Iterator[None]:
    """Silence the warnings and messages of operations on traced tensors."""
    known = logging.root.manager.loggerDict.values()  # includes placeholders, which are not loggers
    loggers = [x for x in known if isinstance(x, logging.Logger) and x.name.startswith("torch.") and not x.disabled]
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:  # torch.export ignores logging.disable
                logger.disabled = True
            yield
        finally:
            for logger in loggers:
                logger.disabled = False


@contextlib.contextmanager
def _export_settings() -> Iterator[None]:
    """Silence torch.export, and trace nn.TransformerEncoderLayer as separate operations."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with silent_torch():
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _tensor_inputs(program: ExportedProgram) -> tuple[dict[str, str], dict[str, Tensor]]:
    names: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            names[spec.arg.name] = str(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = program.constants[str(spec.target)].detach().clone()
        elif spec.kind != InputKind.USER_INPUT:
            raise _refusal(f"it reads {spec.target}, which is not a tensor")
    return names, constants


# --- refusals


def _refusal(reason: str, line: str = "") -> CaptureError:
    return CaptureError(f"cannot capture the model: {reason}" + (f" ({line})" if line else ""))


def _refuse_outputs(program: ExportedProgram) -> None:
    specs = program.graph_signature.output_specs
    for spec in specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            mutates_input = spec.kind == OutputKind.USER_INPUT_MUTATION
            raise _refusal(f"the forward pass changes {'its input in place' if mutates_input else spec.target}")
    if len(specs) != 1 or not isinstance(specs[0].arg, TensorArgument):
        got = f"{len(specs)} outputs" if len(specs) != 1 else "an output that is not a tensor"
        raise _refusal(f"expected one tensor of logits, got {got}")


def _export_refusal(error: Exception) -> CaptureError:
    text, line = str(error), locate_error(error)
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return _refusal("the forward pass branches on computed values", line)
    if "Constraints violated" in text:
        return _refusal("the forward pass depends on the batch size", line)
    if "found a fake tensor" in text:
        return _refusal("the forward pass uses `.data` or another operation that cannot be traced")
    return _refusal(_first_line(error), line)


def _first_line(error: Exception) -> str:
    lines = (line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)


# --- folding


class _Folder:
    """Copies a graph and replaces every value that does not depend on the input with a constant."""

    def __init__(self, tensors: dict[str, Tensor], names: dict[str, str]) -> None:
        self.tensors, self.names = tensors, names
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[fx.Node, Any] = {}  # values of nodes that depend only on weights
        self.copies: dict[fx.Node, Any] = {}  # nodes in the new graph

    def fold(self, nodes: list[fx.Node]) -> fx.GraphModule:
        for node in nodes:
            self.add(node)
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)

    def add(self, node: fx.Node) -> None:
        if node.op == "output":
            (logits,) = node.all_input_nodes
            self.graph.output(self.copy(logits))
        elif node.op == "placeholder" and node.name in self.tensors:
            self.values[node] = self.tensors[node.name]
        elif node.op == "placeholder":
            self.copies[node] = self.graph.placeholder("x")
            self.copies[node].meta = dict(node.meta)
        elif all(n in self.values for n in node.all_input_nodes):
            with torch.no_grad():
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
                self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif _is_copy(node):
            self.copies[node] = self.copy(node.all_input_nodes[0])
        else:
            self.copies[node] = self.graph.node_copy(node, self.copy)

    def copy(self, node: fx.Node) -> Any:
        if node not in self.copies:
            value = self.values[node]
            self.copies[node] = self.constant(node, value) if isinstance(value, Tensor) else value
        return self.copies[node]

    def constant(self, node: fx.Node, value: Tensor) -> fx.Node:
        name = f"constant_{len(list(self.root.buffers()))}"
        value = value.detach().clone()  # preserves strides, so that the same kernels run
        self.root.register_buffer(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the attribute exists, but the graph has no module yet
            result = self.graph.get_attr(name)
        result.meta = {**node.meta, "val": value, "tensor_name": self.names.get(node.name, "")}
        return result


def _is_copy(node: fx.Node) -> bool:
    """Whether a node only copies its input, which is redundant in a graph without in-place operations."""
    if node.target is not _ATEN.clone.default:
        return node.target is _ATEN.alias.default
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    return isinstance(source, Tensor) and isinstance(result, Tensor) and source.stride() == result.stride()


# --- the module: examples, modes, comparison


def _example(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, batch: int) -> Tensor:
    device = next((t.device for t in all_tensors(module).values()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(batch)
    return torch.rand(batch, *shape, generator=generator, dtype=torch.float64).to(device, dtype)


@contextlib.contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, then restore modes, attributes, tensors and generators; raise if tensors changed."""
    tensors = all_tensors(module)
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
        raise _refusal("it has lazy parameters; call it once on an input to initialize them")
    modules = list(dict.fromkeys(module.modules()))
    copies = [tensor.detach().clone() for tensor in tensors.values()]
    state = [part for m in modules for part in (vars(m), m._parameters, m._buffers, m._modules)]
    caches = [value for m in modules for value in vars(m).values() if type(value) in (dict, list, set)]
    saved = [(contents, contents.copy()) for contents in (*state, *caches)]
    training = [m for m in modules if m.training]
    devices = {t.device.index for t in tensors.values() if t.is_cuda}
    with torch.random.fork_rng(devices=devices):
        try:
            if training:
                module.eval()
            yield
        finally:
            if training:
                module.train(module in training)
            for contents, before in saved:
                contents.clear()
                (contents.extend if isinstance(contents, list) else contents.update)(before)
            changes = _restore_tensors(tensors, copies)
    if changes:
        raise _refusal(f"the forward pass changes {', '.join(changes)}")


def _restore_tensors(tensors: dict[str, Tensor], copies: list[Tensor]) -> list[str]:
    """Undo changes to tensors and return the names of the changed ones."""
    changes = []
    with torch.no_grad():
        for (name, tensor), before in zip(tensors.items(), copies, strict=True):
            # Compare digests as well, because NaN is not equal to NaN.
            if not torch.equal(tensor, before) and tensors_digest(tensor) != tensors_digest(before):
                tensor.copy_(before)
                changes.append(name)
    return changes


def _compare(model: CapturedModel, module: nn.Module) -> bool:
    """Raise if the outputs of the capture and the module differ; return whether they are bit-identical."""
    exact = True
    for batch, grad in itertools.product(_BATCHES, (False, True)):
        x = _example(module, model.shape, model.dtype, batch).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            expected, logits = _outputs(module, x), model(x)
        if not _close(logits.detach(), expected.detach()):
            raise _refusal(
                f"its outputs differ from the captured graph for a batch of {batch} {'with' if grad else 'without'}"
                " gradients; the forward pass must not depend on the batch size, the gradient mode, Python state or"
                " random numbers"
            )
        exact = exact and torch.equal(logits, expected)
    return exact


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of a module after checking them."""
    before = x.detach().clone()
    try:
        logits = module(x)
    except Exception as error:
        raise _refusal(f"it fails for a batch of {len(x)}: {_first_line(error)}", locate_error(error)) from error
    if not isinstance(logits, Tensor):
        raise _refusal(f"expected a tensor of logits, got {type(logits).__name__}")
    if logits.dim() != 2 or len(logits) != len(x) or not logits.is_floating_point():
        raise _refusal(f"expected logits of shape (batch, classes), got {tuple(logits.shape)} and {logits.dtype}")
    if not torch.equal(x, before):
        raise _refusal("the forward pass changes its input in place")
    return logits


def _close(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal up to rounding, relative to the largest logit."""
    if logits.shape != expected.shape or logits.dtype != expected.dtype:
        return False
    eps = torch.finfo(expected.dtype).eps
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    return torch.allclose(logits, expected, rtol=0, atol=min(1000 * eps, eps**0.5) * scale, equal_nan=True)
