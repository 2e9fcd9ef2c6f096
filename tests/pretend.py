"""A pretend accelerator: tensors on a separate device that compute on the CPU.

Like a GPU, it refuses operations that mix its tensors with those of the CPU.  It also counts operations and waits:
operations whose result the Python program cannot get without waiting for the device.  Views and allocations do not
count, because a GPU launches nothing for them.

>>> with accelerator() as counts:
...     x = torch.ones(3, device=DEVICE)
...     total = float(x.sum())
>>> x.device, total, counts.waits
(device(type='privateuseone', index=0), 3.0, 1)

The device has the name that PyTorch reserves for those it does not know.  PyTorch itself takes the tensors for meta
tensors, whose gradients the calling thread computes.  A registered device would start threads, after which no forked
process could compute gradients.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from atoll.training import optimizers

capture = importlib.import_module("atoll.graph.capture")  # the package has a function of this name
NAME = "privateuseone"
DEVICE = torch.device(NAME, 0)
META = torch.device("meta")

# Operations whose result, or its shape, the program reads.
READS = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Besides pointwise operations, those that accept a number on the CPU.
TAKES_NUMBERS = {"where", "fill_", "masked_fill", "masked_fill_", "index_put_", "copy_"}

# What PyTorch computes in half precision, and what it computes in full precision, if autocast is on.
HALF = {
    F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
}  # fmt: skip
FULL = {
    F.cross_entropy, F.kl_div, F.layer_norm, F.log_softmax, F.softmax, F.softplus, Tensor.exp, Tensor.log,
    Tensor.log_softmax, Tensor.norm, Tensor.pow, Tensor.softmax, torch.exp, torch.log, torch.linalg.vector_norm,
}  # fmt: skip


@dataclass
class Counts:
    """Operations on the device and waits for it, each by the name of the operation."""

    by_operation: Counter[str] = field(default_factory=Counter)
    by_wait: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> int:
        return self.by_operation.total()

    @property
    def waits(self) -> int:
        return self.by_wait.total()


_counts = Counts()
_export_on_cpu = capture._export
_half: torch.dtype | None = None  # the precision of autocast, if it is on


def on_device(device: object) -> bool:
    """Whether an argument is the pretend device."""
    if isinstance(device, str):
        return device.partition(":")[0] == NAME
    return isinstance(device, torch.device) and device.type in (NAME, "meta")


class PretendTensor(Tensor):
    """A tensor on the pretend device; ``values`` is where it computes."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> PretendTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=META,
        )
        tensor.values = values
        return tensor

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_meta(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"PretendTensor({self.values})"

    def __deepcopy__(self, memo: dict[int, object]) -> PretendTensor:
        if id(self) not in memo:
            clone = PretendTensor(self.values.clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                clone = torch.nn.Parameter(clone, self.requires_grad)
            memo[id(self)] = clone
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function of PyTorch that works below the dispatcher."""
    first = args[0] if args else None
    if isinstance(first, PretendTensor):
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
        if func is Tensor.tolist:
            _counts.by_wait["tolist"] += 1
            return first.values.tolist()
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(first.values)
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": first.dtype, **kwargs}).to(META)
        if func in (
            Tensor.__getitem__,
            Tensor.__setitem__,
        ):  # PyTorch creates the indices of lists below the dispatcher
            args = (first, _index(args[1]), *args[2:])
        if func == Tensor.data.__set__:
            func(*args, **kwargs)
            first.values = args[1].values
            return None
    if func is torch.device:
        return func(*args, **kwargs)
    args = tuple(META if on_device(arg) else arg for arg in args)
    kwargs = {name: META if on_device(value) else value for name, value in kwargs.items()}
    generator, device = kwargs.get("generator"), kwargs.get("device")
    here = isinstance(first, PretendTensor) if device is None else device == META
    if generator is not None and on_device(generator.device) != here:
        raise RuntimeError(f"{func.__name__}: expected a generator on the device of the tensor, got {generator.device}")
    if func in (torch.tensor, torch.as_tensor) and device == META:
        options = {name: value for name, value in kwargs.items() if name not in ("device", "requires_grad")}
        tensor = func(*args, **options).to(META)
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor
    if _half is not None and (func in HALF or func in FULL):
        args, kwargs = _cast((args, kwargs), _half if func in HALF else torch.float32)
    return func(*args, **kwargs)


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(value: object) -> object:
        half = isinstance(value, PretendTensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if half else value

    return tree_map(cast, tree)


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation on the CPU, if a GPU would not refuse it."""
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    pretend = [value for value in tensors if isinstance(value, PretendTensor)]
    others = [value for value in tensors if not isinstance(value, PretendTensor)]
    device = kwargs.get("device")
    if not pretend and not on_device(device):
        return func(*args, **kwargs)
    assert not any(value.is_meta for value in others), f"PyTorch created a tensor for {func} that has no values"

    name = func.name().partition("::")[2].partition(".")[0]
    _refuse_mixtures(func, name, args, pretend, others)
    if not _launches_nothing(func, name):
        _counts.by_operation[name] += 1
    if _waits(name, args, kwargs, pretend, others):
        _counts.by_wait[name] += 1

    result = func(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
    if name == "_to_copy" and device is not None and not on_device(device):
        return result

    def wrap(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        same = next((t for t in tensors if (t.values if isinstance(t, PretendTensor) else t) is value), None)
        return PretendTensor(value) if same is None else same

    return tree_map(wrap, result)


def _to_cpu(value: object) -> object:
    if isinstance(value, PretendTensor):
        return value.values
    return torch.device("cpu") if on_device(value) else value


def _refuse_mixtures(func: Any, name: str, args: Any, pretend: list[PretendTensor], others: list[Tensor]) -> None:
    """Raise an error if a GPU would refuse the operation because of tensors on the CPU."""
    if not pretend or not others or name in COPIES:
        return
    if name in INDEXING and isinstance(args[0], PretendTensor):
        others = [value for value in others if not any(value is index for index in args[1])]
    numbers = torch.Tag.pointwise in func.tags or name in TAKES_NUMBERS
    changed = func._schema.is_mutable and not isinstance(args[0], PretendTensor)
    if changed or any(value.dim() or not numbers for value in others):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {DEVICE} and cpu")


def _launches_nothing(func: Any, name: str) -> bool:
    """Whether an operation returns a view, or memory without values."""
    aliases = [output.alias_info for output in func._schema.returns]
    return name.startswith(("empty", "new_empty")) or any(alias and not alias.is_write for alias in aliases)


def _waits(name: str, args: Any, kwargs: Mapping[str, Any], pretend: list[PretendTensor], others: list[Tensor]) -> bool:
    """Whether the program waits for the device."""
    if name in READS:
        return "output_size" not in kwargs
    if name == "_to_copy":
        moved = on_device(kwargs.get("device")) != bool(pretend) and kwargs.get("device") is not None
        return moved and not (others and kwargs.get("non_blocking"))
    if name == "copy_":
        return bool(others) and not (kwargs.get("non_blocking") or args[2:] == (True,))
    if name in INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        fills = len(args) == 3 and args[2].numel() == 1 and len(masks) == 1
        return bool(masks and not fills) or any(not isinstance(i, PretendTensor) for i in args[1] if i is not None)
    return False


class _Functions(TorchFunctionMode):
    """Functions without a pretend tensor among their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Generator(torch.Generator):
    """A random generator of either device; both draw the same numbers."""

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        generator = super().__new__(cls, "cpu")
        generator.where = DEVICE if on_device(device) else torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.where


class Autocast(torch.autocast):
    """Mixed precision on either device."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **options: Any
    ) -> None:
        self.pretend, self.half = device_type == NAME, dtype if enabled else None
        super().__init__("cpu" if self.pretend else device_type, dtype, enabled and not self.pretend, **options)

    def __enter__(self) -> Any:
        global _half
        if not self.pretend:
            return super().__enter__()
        self.outer, _half = _half, self.half
        return self

    def __exit__(self, *error: Any) -> Any:
        global _half
        if not self.pretend:
            return super().__exit__(*error)
        _half = self.outer
        return None


def _export(model: torch.nn.Module, example: Tensor) -> Any:
    """Export a copy on the CPU, without the modes of this module, which would also see the tensors of torch.export."""
    if not isinstance(example, PretendTensor):
        return _export_on_cpu(model, example)
    model, example = copy.deepcopy(model).to("cpu"), example.values
    with _disable_current_modes(), _pop_mode_temporarily():
        return _export_on_cpu(model, example)


@contextmanager
def accelerator() -> Iterator[Counts]:
    """Provide the pretend device, and count its operations and waits."""
    global _counts, _export_on_cpu
    _counts, _export_on_cpu = Counts(), capture._export  # which another test may have replaced
    sys.modules[f"torch.{NAME}"] = ModuleType(NAME)  # which PyTorch imports before it creates a tensor there
    try:
        with (
            mock.patch.object(torch, "Generator", Generator),
            mock.patch.object(torch, "autocast", Autocast),
            mock.patch.object(capture, "_export", _export),
            mock.patch.object(optimizers, "_DEVICES", (*optimizers._DEVICES, NAME)),  # as GPUs have fused optimizers
            _Operations(),
            _Functions(),
        ):
            yield _counts
    finally:
        del sys.modules[f"torch.{NAME}"]
