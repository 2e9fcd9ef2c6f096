"""Fused optimizers, which update all weights with one kernel instead of several operations per weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from atoll.errors import InputError, check_range


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
    if fused != optimizer.defaults.get("fused"):
        optimizer = _rebuild(optimizer, fused)
    optimizer.load_state_dict(dict(state))
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
