"""The code and the settings of a module as text: what distinguishes two models that cannot be captured.

Also decides whether a graph that was captured once still belongs to a module with other weights.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.graph.digest import tensors_digest

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = {*vars(nn.Module()), "training"}  # parameters, buffers, modules, hooks: described on their own
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Description:
    """Text about a module; `complete` is false if it holds an object whose contents cannot be described."""

    lines: tuple[str, ...]
    complete: bool


def describe(module: nn.Module) -> Description:
    """Classes with source, settings, hooks and overrides of all modules, and the names and shapes of their tensors.

    >>> describe(nn.LeakyReLU(0.1)) == describe(nn.LeakyReLU(0.1))
    True
    >>> describe(nn.LeakyReLU(0.1)) == describe(nn.LeakyReLU(0.2))
    False
    """
    writer = _Writer(module)
    lines = tuple(writer.lines())
    return Description(lines, writer.complete)


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names, also non-persistent buffers and shared parameters."""
    return {
        **dict(nn.Module.named_parameters(module, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(module, remove_duplicate=False)),
    }


class _Writer:
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names = {m: name for name, m in root.named_modules()}
        self.complete = True

    def lines(self) -> Iterator[str]:
        first: dict[int, str] = {}  # shared tensors and modules show as the first name they have
        for name, module in self.root.named_modules(remove_duplicate=False):
            shared = first.setdefault(id(module), name)
            yield f"module {name} {shared} {self.value(type(module), 0)}"
            if shared == name:
                yield from self.module_lines(name, module)
        for name, tensor in all_tensors(self.root).items():
            shape = "lazy" if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
            yield f"tensor {name} {first.setdefault(id(tensor), name)} {tensor.dtype} {shape}"

    def module_lines(self, name: str, module: nn.Module) -> Iterator[str]:
        for key in sorted(vars(module).keys() - _INTERNAL):
            yield f"attribute {name} {key} {self.value(vars(module)[key], 0)}"
        for key in _HOOKS:
            with_kwargs = getattr(module, f"{key}_with_kwargs", {})
            for identifier, hook in getattr(module, key, {}).items():
                yield f"{key} {name} {identifier in with_kwargs} {self.value(hook, 0)}"

    def value(self, value: Any, depth: int) -> str:
        """A text that is equal for equal values, in any process."""
        if isinstance(value, _PLAIN):
            return repr(value)
        try:
            for kinds, write in self.writers().items():
                if depth < _DEPTH and isinstance(value, kinds):
                    return write(value, depth + 1)
        except Exception:  # a tensor without bytes, an object that cannot be compared: described by its repr
            pass
        self.complete = False
        return f"{type(value).__qualname__} {safe_repr(value)}"

    def writers(self) -> dict[Any, Callable[[Any, int], str]]:
        return {
            (list, tuple): self.sequence,
            (dict, types.MappingProxyType): self.mapping,
            (set, frozenset): lambda value, depth: self.sequence(sorted(value, key=repr), depth),
            Tensor: lambda value, depth: f"tensor {tensors_digest(value)}",
            np.ndarray: lambda value, depth: f"array {value.dtype} {value.shape} {value.tobytes().hex()}",
            nn.Module: self.module,
            type: lambda value, depth: class_source(value),
            types.FunctionType: self.function,
            types.MethodType: lambda value, depth: f"method {self.sequence([value.__func__, value.__self__], depth)}",
            functools.partial: lambda value, depth: self.sequence([value.func, value.args, value.keywords], depth),
            types.BuiltinFunctionType: lambda value, depth: f"{value.__module__}.{value.__qualname__}",
        }

    def sequence(self, values: Any, depth: int) -> str:
        return "[" + ", ".join(self.value(v, depth) for v in values) + "]"

    def mapping(self, values: Any, depth: int) -> str:
        return "{" + ", ".join(f"{self.value(key, depth)}: {self.value(v, depth)}" for key, v in values.items()) + "}"

    def module(self, module: nn.Module, depth: int) -> str:
        if module not in self.names:  # not a submodule, so its weights and settings are not described
            self.complete = False
        return f"module {self.names.get(module, type(module).__qualname__)}"

    def function(self, function: types.FunctionType, depth: int) -> str:
        parts = [_function_source(function), self.sequence(function.__defaults__ or (), depth)]
        for cell in function.__closure__ or ():
            try:
                parts.append(self.value(cell.cell_contents, depth))
            except ValueError:  # an empty cell
                parts.append("empty")
        return " ".join(parts)


def safe_repr(value: Any) -> str:
    """The repr without memory addresses; a repr that raises counts as empty."""
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:
        return ""


@functools.lru_cache(maxsize=512)
def class_source(kind: type) -> str:
    """Name and source of a class and of its bases, without those of PyTorch and the standard library."""
    texts = []
    for base in kind.__mro__:
        texts.append(f"class {base.__module__}.{base.__qualname__}")
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing"):
            texts.append(_class_text(base))
    return "\n".join(texts)


def _class_text(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        members = [f"{k} {_function_source(v)}" for k, v in vars(kind).items() if isinstance(v, types.FunctionType)]
        return "\n".join(members)


def _function_source(function: types.FunctionType) -> str:
    """Source of a function; with the byte code if the source is missing or one line holds several functions."""
    name = f"def {function.__module__}.{function.__qualname__}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return f"{name} {_byte_code(function.__code__)}"
    return f"{name} {source}" + (_byte_code(function.__code__) if function.__name__ == "<lambda>" else "")


def _byte_code(code: types.CodeType) -> str:
    constants = [_byte_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
