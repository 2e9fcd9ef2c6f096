"""Proven Lipschitz constants of captured networks in l2, and what rounding does in a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from atoll.certify.bounds import Bound, Shape, Value
from atoll.certify.norms import BUDGET
from atoll.certify.propagation import LayerBound, Propagation
from atoll.certify.rules import RULES
from atoll.errors import InputError
from atoll.graph import CapturedModel, capture

OnLayer = Callable[[LayerBound], None]


@dataclass(frozen=True)
class Lipschitz:
    """A network's bound, the layers it is made of, and the largest norm of inputs for which nothing can overflow."""

    bound: Bound
    layers: tuple[LayerBound, ...]
    largest_input: float


def lipschitz(
    model: nn.Module,
    shape: Shape | None = None,
    *,
    budget: float = BUDGET,
    on_layer: OnLayer | None = None,
    node: fx.Node | None = None,
) -> Lipschitz:
    """A proven Lipschitz constant of the function that a model computes in evaluation mode.

    Args:
        model: a captured model, or one that can be captured, of operations that have a rule (``rules.RULES``).
        shape: of one input, if the model has no ``input_shape``.
        budget: operations that the proof of one layer may take; more makes bounds of large convolutions tighter.
        on_layer: called after each layer's proof.
        node: of a captured model, whose value is meant instead of the logits.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = net[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    >>> round(lipschitz(net, (2,)).bound.lipschitz, 2)
    4.0
    """
    propagation, value = propagate(captured(model, shape), budget=budget, on_layer=on_layer, node=node)
    bound = propagation.bound(value)
    return Lipschitz(bound, tuple(propagation.layers), propagation.largest_input)


def propagate(
    model: CapturedModel, *, budget: float = BUDGET, on_layer: OnLayer | None = None, node: fx.Node | None = None
) -> tuple[Propagation, Value]:
    """The logits, or the value of another node, as a function of the input."""
    check_arithmetic(model)
    propagation = Propagation(model, RULES, budget=budget, on_layer=on_layer)
    return propagation, propagation.run(node)


def captured(model: nn.Module, shape: Shape | None = None) -> CapturedModel:
    """The function that a model computes, in the precision of its parameters."""
    if isinstance(model, CapturedModel):
        return model
    shape = shape or getattr(model, "input_shape", None)
    if shape is None:
        raise InputError(f"shape: expected the shape of one input, because {type(model).__name__} has no input_shape")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InputError("certificates are for float32 and float64: certify outside of torch.autocast")
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    return capture(model, tuple(shape), dtype=dtype)


def check_arithmetic(model: CapturedModel) -> None:
    """Refuse devices and settings that round more than sums of products in the model's own precision."""
    device = next((b.device.type for b in model.buffers()), "cpu")
    settings: list[Any] = [getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv")]
    full = torch.get_float32_matmul_precision() == "highest" and all(
        getattr(setting, "fp32_precision", "ieee") in ("ieee", "none") for setting in settings
    )
    if model.dtype == torch.float32 and not (device == "cpu" and full):
        # TF32, bfloat16 inside and Winograd's algorithm round more.
        raise InputError(
            "model: certificates in float32 are for CPUs with float32_matmul_precision highest;"
            " run the network in float64 (model.double())"
        )
