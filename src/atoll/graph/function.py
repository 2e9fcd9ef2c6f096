"""A digest for any model: of its graph if it can be captured, of its code and weights otherwise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.errors import AtollError, InputError
from atoll.graph.capture import Structure, capture
from atoll.graph.digest import tensors_digest
from atoll.graph.source import all_tensors, describe, safe_repr


@dataclass(frozen=True)
class Digest:
    """Identifies the function of a model.

    Attributes:
        value: 64 hexadecimal digits.
        method: "graph" or "code". A digest of code says nothing about helper functions that the classes call.
        torch: the version of PyTorch; another version may decompose operations differently.
        reason: why the model was not captured, "" if it was.
    """

    value: str
    method: Literal["graph", "code"]
    torch: str
    reason: str = ""


def function_digest(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    structures: list[Structure] | None = None,
) -> Digest:
    """Digest of a model's graph and weights if it can be captured, of its code and weights otherwise.

    Args:
        module: the model.
        shape: of one input.
        dtype: of the inputs.
        structures: graphs captured before.  A model that differs from one of them only in the values of its weights is
            not captured again; the graph of a new model is added.

    >>> function_digest(nn.Linear(4, 3), (4,)).method
    'graph'
    >>> noisy = type("Noisy", (nn.Linear,), {"forward": lambda self, x: x + torch.randn_like(x)})(4, 4)
    >>> function_digest(noisy, (4,)).method
    'code'
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected an nn.Module, got {type(module).__name__}")
    structures = [] if structures is None else structures
    try:
        for structure in structures:
            if (structure.shape, structure.dtype) == (shape, dtype) and structure.matches(module):
                return Digest(structure.digest(module), "graph", torch.__version__)
        captured = capture(module, shape, dtype=dtype)
        structures.append(captured.structure)
        return Digest(captured.digest, "graph", torch.__version__)
    except AtollError as error:
        reason = str(error)
    except Exception as error:
        reason = f"cannot capture the model: {type(error).__name__}: {error}"
    return Digest(_code_digest(module), "code", torch.__version__, reason)


def _code_digest(module: nn.Module) -> str:
    """SHA-256 of source, settings, hooks and overrides, and of all parameters and buffers."""
    hasher = hashlib.sha256(b"atoll code 1\n")
    for line in (safe_repr(module), *describe(module).lines, *map(_tensor_line, all_tensors(module).items())):
        hasher.update(f"{len(line)} {line}\n".encode(errors="backslashreplace"))
    return hasher.hexdigest()


def _tensor_line(entry: tuple[str, Tensor]) -> str:
    name, tensor = entry
    try:
        return f"{name} {tensors_digest(tensor)}"
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # meta, lazy or exotic tensors have no bytes
        return f"{name} {type(tensor).__name__}"
