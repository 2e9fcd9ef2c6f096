"""A digest for any model: of its graph if it can be captured, otherwise of its code and weights."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import AtollError, InputError
from atoll.graph.capture import capture
from atoll.graph.digest import all_tensors, tensors_digest

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INTERNAL = {*vars(nn.Module()), "training"}  # parameters, buffers, modules and hooks are handled separately
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_DEPTH = 8


@dataclass(frozen=True)
class Digest:
    """Identifies the function of a model.

    Attributes:
        value: 64 hexadecimal digits.
        method: "graph" or "code".  A digest of code does not cover helper functions that the classes call.
        torch: the PyTorch version; another version may decompose operations differently.
        reason: why the model could not be captured, "" if it was captured.
    """

    value: str
    method: Literal["graph", "code"]
    torch: str
    reason: str = ""


def function_digest(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Digest:
    """Return a digest of a model's graph and weights if it can be captured, otherwise of its code and weights.

    >>> function_digest(nn.Linear(4, 3), (4,)).method
    'graph'
    >>> noisy = type("Noisy", (nn.Linear,), {"forward": lambda self, x: x + torch.randn_like(x)})(4, 4)
    >>> function_digest(noisy, (4,)).method
    'code'
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected an nn.Module, got {type(module).__name__}")
    try:
        return Digest(capture(module, shape, dtype=dtype).digest, "graph", str(torch.__version__))
    except AtollError as error:
        reason = str(error)
    except Exception as error:
        reason = f"cannot capture the model: {type(error).__name__}: {error}"
    hasher = hashlib.sha256(b"atoll code 1\n")
    for line in _Writer(module).lines():
        hasher.update(f"{len(line)} {line}\n".encode(errors="backslashreplace"))
    return Digest(hasher.hexdigest(), "code", str(torch.__version__), reason)


class _Writer:
    """Writes code, attributes, hooks and tensors of a module as text that is reproducible across processes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names = {module: name for name, module in root.named_modules()}

    def lines(self) -> Iterator[str]:
        yield _safe_repr(self.root)
        for name, module in self.root.named_modules(remove_duplicate=False):
            yield f"module {name} {self.names[module]} {self.text(type(module))}"
            for key in sorted(vars(module).keys() - _INTERNAL):
                yield f"attribute {name} {key} {self.text(vars(module)[key])}"
            for key in _HOOKS:
                yield f"{key} {name} {self.sequence(getattr(module, key).values(), 0)}"
        for name, tensor in all_tensors(self.root).items():
            yield f"tensor {name} {self.text(tensor)}"

    def text(self, value: Any, depth: int = 0) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        try:
            if depth < _DEPTH:
                return self.structure(value, depth + 1)
        except Exception:  # such as a tensor without storage, or objects that cannot be sorted
            pass
        return f"{type(value).__qualname__} {_safe_repr(value)}"

    def structure(self, value: Any, depth: int) -> str:
        match value:
            case list() | tuple():
                return self.sequence(value, depth)
            case dict() | types.MappingProxyType():
                return self.sequence(value.items(), depth)
            case set() | frozenset():
                return self.sequence(sorted(value, key=repr), depth)
            case Tensor():
                return f"tensor {tensors_digest(value)}"
            case np.ndarray():
                return f"array {value.dtype} {value.shape} {value.tobytes().hex()}"
            case nn.Module():
                return f"module {self.names[value]}"
            case type():
                return _class_source(value)
            case types.FunctionType():
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                return f"{_function_source(value)} {self.sequence([value.__defaults__, cells], depth)}"
            case types.MethodType():
                return self.sequence([value.__func__, value.__self__], depth)
            case functools.partial():
                return self.sequence([value.func, value.args, value.keywords], depth)
        raise TypeError

    def sequence(self, values: Iterable[Any], depth: int) -> str:
        return "[" + ", ".join(self.text(value, depth) for value in values) + "]"


def _safe_repr(value: Any) -> str:
    """Return the repr without memory addresses, or "" if it raises."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:
        return ""


@functools.lru_cache(maxsize=512)
def _class_source(kind: type) -> str:
    """Return name and source of a class and its bases, without the source of PyTorch and the standard library."""
    texts = []
    for base in kind.__mro__:
        texts.append(f"class {base.__module__}.{base.__qualname__}")
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing"):
            try:
                texts.append(inspect.getsource(base))
            except (OSError, TypeError):
                functions = [v for v in vars(base).values() if isinstance(v, types.FunctionType)]
                texts += map(_function_source, functions)
    return "\n".join(texts)


def _function_source(function: types.FunctionType) -> str:
    """Return the source of a function; its bytecode if there is no source, and both for lambdas."""
    name, code = f"def {function.__module__}.{function.__qualname__}", _byte_code(function.__code__)
    try:
        return f"{name} {inspect.getsource(function)} {code if function.__name__ == '<lambda>' else ''}"
    except (OSError, TypeError):
        return f"{name} {code}"


def _byte_code(code: types.CodeType) -> str:
    constants = [_byte_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
