"""Proof files: the certificates of some inputs, with all that an independent checker needs to prove them again.

A file has the format of safetensors.  Its arrays are the constants of the captured graph, the inputs, their classes and
radii, and the multipliers of Centroid Nets.  Its header has the graph as a list of operations, and the norms of the
layers.  ``atoll.checker`` reads it with NumPy and SciPy only.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, fx

from atoll.errors import InputError
from atoll.graph.capture import CapturedModel
from atoll.graph.nodes import bind_arguments, locate, operation_name

FORMAT = 1
DIGEST = "digest"
BLANK = "0" * 64  # stands for the digest while it is computed
_DTYPES = (torch.float32, torch.float64, torch.int64)


def graph_entries(model: CapturedModel) -> tuple[list[dict[str, Any]], int, dict[str, Tensor]]:
    """The operations of a captured graph as plain data, the place of the output among them, and the constants.

    >>> from atoll.graph import capture
    >>> entries, output, constants = graph_entries(capture(torch.nn.Linear(2, 3), (2,)))
    >>> [entry["operation"] for entry in entries], output, list(constants)
    (['input', 'aten.linear.default'], 1, ['constant_0', 'constant_1'])
    """
    entries: list[dict[str, Any]] = []
    places: dict[fx.Node, int] = {}
    constants: dict[str, Tensor] = {}
    output = 0
    for node in model.graph_module.graph.nodes:
        if node.op == "output":
            output = places[node.all_input_nodes[0]]
        elif node.op == "get_attr":
            constants[node.target] = _checked(node.target, model.graph_module.get_buffer(node.target))
        elif not _is_batch_size(node):
            operation = "input" if node.op == "placeholder" else operation_name(node)
            args = {} if node.op == "placeholder" else bind_arguments(node)
            plain = {name: _plain(value, places) for name, value in args.items()}
            places[node] = len(entries)
            entries.append({"name": node.name, "operation": operation, "args": plain, "line": locate(node)})
    return entries, output, constants


def _is_batch_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int and node.args[1] == 0


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise InputError(f"proof: expected constants in float32, float64 or int64, got {tensor.dtype} ({name})")
    return tensor.detach().cpu().contiguous()


def _plain(value: Any, places: dict[fx.Node, int]) -> Any:
    """An argument as JSON; the batch size becomes -1."""
    if isinstance(value, fx.Node):
        if _is_batch_size(value):
            return -1
        return {"constant": value.target} if value.op == "get_attr" else {"node": places[value]}
    if isinstance(value, list | tuple):
        return [_plain(item, places) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"proof: expected finite arguments of operations, got {value}")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def encode(header: dict[str, Any], arrays: dict[str, Tensor]) -> bytes:
    """The bytes of a file, with a digest of everything else.

    >>> len(encode({}, {"radius": torch.zeros(1)})) > 64
    True
    """
    text = json.dumps(header, allow_nan=False)
    raw = save(arrays, metadata={"proof": text, DIGEST: BLANK})
    before, _, after = raw.partition(BLANK.encode())
    return before + hashlib.sha256(raw).hexdigest().encode() + after
