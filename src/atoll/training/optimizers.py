"""Fused optimizers, which update all weights with one kernel instead of several operations per weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from atoll.errors import InputError, check_range, shorten


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise an InputError for an optimizer that cannot train a network step by step.

    >>> import torch
    >>> check_optimizer(torch.optim.LBFGS([torch.zeros(2, requires_grad=True)]))
    Traceback (most recent call last):
    atoll.errors.InputError: optimizer: LBFGS evaluates the loss several times per step; use SGD or AdamW
    """
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(f"optimizer: {name} evaluates the loss several times per step; use SGD or AdamW")
    if isinstance(optimizer, SparseAdam):
        raise InputError(f"optimizer: {name} requires sparse gradients, which networks do not have; use SGD or AdamW")
    for group in optimizer.param_groups:
        check_range("[0, inf)", lr=group.get("lr"))


def check_factory(factory: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
    """Raise an InputError unless a factory makes a working optimizer for weight matrices and biases.

    It takes one step with tiny parameters, which checks all arguments.
    """
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = factory(parameters)
        check_optimizer(optimizer)
        optimizer.step()
    except InputError:
        raise
    except ArithmeticError:
        raise InputError("optimizer: its first step overflows or divides by zero; choose other arguments") from None
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"optimizer: {' '.join(str(error).split())}") from None


_DEVICES = ("cpu", "cuda")  # devices with fused kernels for all optimizers that have the option


def fuse(optimizer: Optimizer) -> Optimizer:
    """Return the fused version of a new optimizer, or the optimizer itself if there is none.

    PyTorch optimizers with the option ``fused`` use it, unless ``fused``, ``foreach``, ``capturable`` or
    ``differentiable`` is set, or a parameter is not a floating-point tensor on a CPU or GPU.

    >>> import torch
    >>> fuse(torch.optim.Adam([torch.zeros(2, requires_grad=True)])).defaults["fused"]
    True
    """
    return _rebuild(optimizer, True) if _can_be_fused(optimizer) else optimizer


def resume_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer with a saved state and the implementation that saved it, for bit-identical results.

    Checkpoints of version 0.1 come from optimizers that were not fused.
    """
    fused = state["param_groups"][0].get("fused")
    if not (fused is None or isinstance(fused, bool)):
        raise ValueError(f"fused: expected true, false or null, got {shorten(fused)}")
    if fused != optimizer.defaults.get("fused"):
        optimizer = _rebuild(optimizer, fused)
    optimizer.load_state_dict(dict(state))
    if type(optimizer).__module__.startswith("torch.optim."):  # others may have any state
        _check_state(optimizer)
    return optimizer


def _can_be_fused(optimizer: Optimizer) -> bool:
    if not type(optimizer).__module__.startswith("torch.optim.") or "fused" not in optimizer.defaults:
        return False
    for group in optimizer.param_groups:
        choices = [group.get(name) for name in ("fused", "foreach", "capturable", "differentiable")]
        if choices[0] is not None or any(choices):
            return False
        if not all(p.is_floating_point() and p.device.type in _DEVICES for p in group["params"]):
            return False
    return True


def _rebuild(optimizer: Optimizer, fused: bool | None) -> Optimizer:
    """Construct a new optimizer with the same parameters and options, because ``fused`` must be set at construction."""
    names = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
    options = {name: optimizer.defaults[name] for name in names}
    groups = [{**group, "fused": fused} for group in optimizer.param_groups]
    return type(optimizer)(groups, **options | {"fused": fused})


def _check_state(optimizer: Optimizer) -> None:
    """Raise a ValueError for a state that this optimizer does not have; otherwise, a step would fail in a kernel."""
    for group in optimizer.param_groups:
        for name, default in optimizer.defaults.items():
            if not _is_like(group.get(name), default):
                raise ValueError(f"{name}: expected a value like {default!r}, got {shorten(group.get(name))}")
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            factor = name in ("row_var", "col_var")  # of Adafactor
            fits = isinstance(value, Tensor) and (factor or value.numel() == 1 or value.shape == parameter.shape)
            if not (fits or value is None or (name == "step" and isinstance(value, int | float))):
                raise ValueError(f"{name}: expected a tensor like the weights, got {shorten(value)}")


def _is_like(value: object, default: object) -> bool:
    """Whether a value has the type of a default.

    >>> _is_like(1, 0.5), _is_like([0.9, 1], (0.9, 0.999)), _is_like("1", 0.5), _is_like(True, None)
    (True, True, False, True)
    """
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(default) and all(map(_is_like, value, default))
    if isinstance(default, int | float | None):
        return value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return type(value) is type(default)
