"""Properties of nodes of a captured graph: arguments by name, source line, and whether the output depends on them."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n\s+(?P<code>[^\n]+))?')
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), str(Path(__file__).parent))


def live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the output depends on, in order of execution, without unused weights and assertions.

    >>> graph = fx.Graph()
    >>> x, unused = graph.placeholder("x"), graph.placeholder("unused")
    >>> _ = graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    >>> [node.name for node in live_nodes(graph)]
    ['x', 'relu_default', 'output']
    """
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes, [node])
    return [node for node in graph.nodes if node in live]


def bind_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by name, including defaults.

    >>> graph = fx.Graph()
    >>> node = graph.call_function(torch.ops.aten.leaky_relu.default, (graph.placeholder("x"),))
    >>> bind_arguments(node)
    {'self': x, 'negative_slope': 0.01}
    """
    if not isinstance(node.target, OpOverload):  # operator.getitem and arithmetic with the batch size
        return {**{str(i): value for i, value in enumerate(node.args)}, **node.kwargs}
    arguments = node.target._schema.arguments
    values = {a.name: a.default_value for a in arguments}
    values.update({a.name: value for a, value in zip(arguments, node.args, strict=False)})
    return values | dict(node.kwargs)


def operation_name(node: fx.Node) -> str:
    """Return the name of an ATen operation, or of a Python function such as getitem."""
    is_named = isinstance(node.target, str | OpOverload)
    return str(node.target if is_named else getattr(node.target, "__name__", node.target))


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the result depends on the random number generator; False for disabled dropout."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    values = bind_arguments(node)
    return not (values.get("train") is False or values.get("training") is False or values.get("dropout_p") == 0)


def locate(node: fx.Node) -> str:
    """Return the line of user code that a node comes from, else its module, or "" if neither is known."""
    frames = _FRAME.finditer(node.stack_trace or "")
    lines = [_line(f["file"], int(f["line"]), f["code"]) for f in frames if _is_user_file(f["file"])]
    if lines:
        return lines[-1]
    for path, kind in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        if path:
            name = kind if isinstance(kind, str) else kind.__name__
            return f"module {path}, {name.rpartition('.')[2]}"
    return ""


def locate_error(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an exception, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((_line(f.filename, f.lineno or 0) for f in reversed(frames) if _is_user_file(f.filename)), "")


def _is_user_file(file: str) -> bool:
    return not file.startswith("<") and not file.startswith("torch/") and not file.startswith(_LIBRARIES)


def _line(file: str, number: int, code: str | None = None) -> str:
    return f"{Path(file).name}, line {number}" + (f": {code.strip()}" if code else "")
