"""A Hessian belongs to a function: a point must get the same logits in every pass and in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import InputError

_TOLERANCE = 1e-4  # of the largest output: rounding differs by less from one batch size to another, dropout by far more


def check_deterministic(model: nn.Module, x: Tensor) -> None:
    """Refuse a model in training mode, and one whose output is random or depends on the other points of a batch.

    >>> check_deterministic(nn.Linear(2, 2).eval(), torch.zeros(3, 2))
    >>> check_deterministic(nn.BatchNorm1d(2, track_running_stats=False).eval(), torch.eye(2))
    Traceback (most recent call last):
    atoll.errors.InputError: model: BatchNorm1d gives a point another output in other company
    """
    for name, module in model.named_modules():
        if module.training:
            raise InputError(f"model: expected evaluation mode, but {_title(name, module)} is in training mode")
    with torch.no_grad():
        first = model(x)
        if not first.isfinite().all():
            raise InputError("model: expected finite logits, got NaN or infinity")
        half = (len(x) + 1) // 2
        others = torch.cat([x[:half], x[:1].expand_as(x[half:])])
        for inputs, same, fault in ((x, len(x), "in every pass"), (others, half, "in other company")):
            if not _close(first, model(inputs), same):
                raise InputError(f"model: {_culprit(model, x, inputs, same)} gives a point another output {fault}")


def _culprit(model: nn.Module, x: Tensor, inputs: Tensor, same: int) -> str:
    """The module that was the first to give the first points something else in two more passes."""
    for (name, module, before), (_, _, after) in zip(_outputs(model, x), _outputs(model, inputs), strict=True):
        if not _close(before, after, same):
            return _title(name, module)
    return _title("", model)


def _outputs(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """What every module gives, in the order in which they finish: the first that differs has had equal inputs."""
    found: list[tuple[str, nn.Module, Tensor]] = []

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.numel() and output.dim():
                found.append((name, module, output.clone()))

        return record

    hooks = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules()]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _close(a: Tensor, b: Tensor, rows: int) -> bool:
    return bool((a - b)[:rows].abs().max() <= _TOLERANCE * a.abs().max())


def _title(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
