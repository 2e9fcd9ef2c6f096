"""Digests of tensors and of the function that a graph computes.

The digest of a graph is a Merkle tree: the hash of a node covers its operation, its arguments and the hashes of its
inputs; the leaves are the input and the raw bytes of the tensors.  The digest is independent of the names of modules
and nodes, the order of independent operations, devices, memory layouts, and unused weights.  The graph is hashed before
constants are folded, because the last bit of a folded constant may depend on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from atoll.errors import CaptureError
from atoll.graph.nodes import bind_arguments, live_nodes, operation_name

_VERSION = "atoll graph 1"
_COPIES = {"aten.alias.default", "aten.clone.default", "aten.lift_fresh_copy.default"}  # do not change values
_PLACEMENT = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}  # arguments that do not change values


def tensors_digest(*tensors: Tensor | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors, or of mappings from names to tensors: dtype, shape and bytes in row-major order.

    Strides, devices and the order of a mapping do not matter.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> tensors_digest(x) == tensors_digest(x.t().contiguous().t())
    True
    >>> tensors_digest(x) == tensors_digest(x.double()) or tensors_digest(x) == tensors_digest(x.view(3, 2))
    False
    >>> tensors_digest({"a": x, "b": x[:0]}) == tensors_digest({"b": x[:0], "a": x})
    True
    """
    hasher = hashlib.sha256()
    for entry in tensors:
        if isinstance(entry, Tensor):
            _update(hasher, "", entry)
        else:
            hasher.update(f"mapping {len(entry)}\n".encode())
            for name in sorted(entry):
                _update(hasher, name, entry[name])
    return hasher.hexdigest()


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names, including non-persistent buffers and shared parameters."""
    return {
        **dict(nn.Module.named_parameters(module, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(module, remove_duplicate=False)),
    }


def graph_digest(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the function that a graph computes.

    Args:
        graph: a functional graph of ATen operations.  Placeholders that are not in ``tensors`` are inputs.
        tensors: weights, buffers and constants by placeholder name.
    """
    hashes: dict[fx.Node, str] = {}
    for node in live_nodes(graph):
        hashes[node] = _node_digest(node, hashes, tensors)
    return hashes[graph.output_node()]


def _update(hasher: Any, name: str, tensor: Tensor) -> None:
    hasher.update(f"{len(name)} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().resolve_conj().resolve_neg().reshape(-1)
    hasher.update(flat.contiguous().view(torch.uint8).numpy())  # as bytes, because NumPy has no bfloat16


def _node_digest(node: fx.Node, hashes: Mapping[fx.Node, str], tensors: Mapping[str, Tensor]) -> str:
    if node.op == "placeholder" and node.name in tensors:
        text = f"tensor {tensors_digest(tensors[node.name])}"
    elif node.op == "placeholder":
        value = node.meta["val"]
        text = f"input {value.dtype} {tuple(value.shape[1:])}"
    elif node.op == "output":
        text = f"{_VERSION} output {_encode(node.args, hashes)}"
    elif node.op == "call_function":
        if str(node.target) in _COPIES:
            return hashes[node.all_input_nodes[0]]
        text = f"{operation_name(node)} {_encode(_given_arguments(node), hashes)}"
    else:
        raise CaptureError(f"cannot compute the digest of a node of kind {node.op} ({node.target})")
    return hashlib.sha256(text.encode()).hexdigest()


def _given_arguments(node: fx.Node) -> dict[str, Any]:
    """Return arguments by name without defaults, because a newer PyTorch may add arguments."""
    schema = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    defaults = {a.name: _plain(a.default_value) for a in schema if a.has_default_value()}
    return {
        name: value
        for name, value in bind_arguments(node).items()
        if name not in _PLACEMENT and not (name in defaults and _plain(value) == defaults[name])
    }


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _encode(value: Any, hashes: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return hashes[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_encode(v, hashes) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_encode(value[k], hashes)}" for k in sorted(value)) + "}"
    if isinstance(value, slice):
        return f"slice {_encode([value.start, value.stop, value.step], hashes)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    raise CaptureError(f"cannot compute the digest of an argument of type {type(value).__name__}")
