"""Weights that are perturbed for a while and then exactly what they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def weight_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters with more than one dimension: not biases, not the scales of normalisation."""
    return [p for p in module.parameters() if p.dim() > 1 and p.requires_grad]


@contextmanager
def restored(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Whatever happens to the parameters inside, they come out bit by bit as they went in.

    Saved and copied back, not subtracted: adding and subtracting the same number drifts in floating point.
    """
    saved = [p.detach().clone() for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Batch-norm statistics after a pass that is not a step of training are as before it."""
    saved: list[tuple[Tensor, Tensor]] = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
