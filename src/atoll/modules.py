"""Context managers for modules: evaluation mode, preserved parameters and buffers, pass counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, then restore the mode of every submodule, even if the modes were mixed."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def weight_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters with more than one dimension, which excludes biases and normalization scales."""
    return [p for p in module.parameters() if p.dim() > 1 and p.requires_grad]


@contextmanager
def preserve_parameters(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore bit-identical parameters on exit.

    They are copied back, because adding and then subtracting a perturbation would leave rounding errors.
    """
    saved = [(p, p.detach().clone()) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers on exit, such as batch-norm statistics after a pass that is not a training step."""
    places = [(part, name, b) for part in module.modules() for name, b in part.named_buffers(recurse=False)]
    with preserve_parameters(buffer for _, _, buffer in places):
        try:
            yield
        finally:
            for part, name, buffer in places:  # a pass may have replaced the tensor itself
                setattr(part, name, buffer)


@contextmanager
def move_parameters(parameters: Sequence[nn.Parameter], moves: Iterable[Tensor]) -> Iterator[None]:
    """Add ``moves`` to the parameters, one at a time to save memory, and restore the parameters on exit."""
    with preserve_parameters(parameters):
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        yield


@dataclass
class PassCounts:
    """Forward and backward passes, counted in rows so that the batch size does not matter."""

    forward: int = 0
    backward: int = 0


@contextmanager
def count_passes(model: nn.Module, counts: PassCounts) -> Iterator[None]:
    """Add the passes of a model inside the context to ``counts``.

    >>> counts = PassCounts()
    >>> with count_passes(model := nn.Linear(2, 2), counts):
    ...     model(torch.ones(3, 2)).sum().backward()
    >>> counts
    PassCounts(forward=3, backward=3)
    """

    def backward(gradient: Tensor) -> None:
        counts.backward += len(gradient)

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counts.forward += len(output)
        if output.requires_grad:
            output.register_hook(backward)  # type: ignore[no-untyped-call]

    handle = model.register_forward_hook(forward)
    try:
        yield
    finally:
        handle.remove()
