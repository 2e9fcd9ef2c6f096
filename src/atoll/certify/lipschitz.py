"""Proven Lipschitz constants (l2) of captured networks, and bounds of the rounding error of a forward pass."""

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
    """The bound of a network, the bounds of its layers, and the largest norm of inputs that cannot overflow."""

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
    """Prove a Lipschitz constant of the function that a model computes in evaluation mode.

    Args:
        model: a captured model, or one that can be captured, whose operations all have a rule (``rules.RULES``).
        shape: shape of one input, if the model has no ``input_shape``.
        budget: largest number of operations for the proof of one layer; more gives tighter bounds for large
            convolutions.
        on_layer: called after the proof of each layer.
        node: node of a captured model to bound instead of the logits.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = net[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    >>> round(lipschitz(net, (2,)).bound.lipschitz, 2)
    4.0
    """
    propagation, value = propagate(ensure_captured(model, shape), budget=budget, on_layer=on_layer, node=node)
    bound = propagation.bound(value)
    return Lipschitz(bound, tuple(propagation.layers), propagation.largest_input)


def propagate(
    model: CapturedModel, *, budget: float = BUDGET, on_layer: OnLayer | None = None, node: fx.Node | None = None
) -> tuple[Propagation, Value]:
    """Return the logits, or the value of another node, as a function of the input."""
    check_arithmetic(model)
    propagation = Propagation(model, RULES, budget=budget, on_layer=on_layer)
    return propagation, propagation.run(node)


def ensure_captured(model: nn.Module, shape: Shape | None = None) -> CapturedModel:
    """Capture a model in the precision of its parameters, unless it is already captured."""
    if isinstance(model, CapturedModel):
        return model
    shape = shape or getattr(model, "input_shape", None)
    if shape is None:
        raise InputError(f"shape: {type(model).__name__} has no input_shape; pass the shape of one input")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InputError("certificates require float32 or float64; certify outside of torch.autocast")
    tensors = (t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    dtype = next(tensors, torch.get_default_dtype())
    return capture(model, tuple(shape), dtype=dtype)


def check_arithmetic(model: CapturedModel) -> None:
    """Raise an InputError for devices and settings that round more than sums of products in the model's precision."""
    device = next((b.device.type for b in model.buffers()), "cpu")
    settings: list[Any] = [getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv")]
    full = torch.get_float32_matmul_precision() == "highest" and all(
        getattr(setting, "fp32_precision", "ieee") in ("ieee", "none") for setting in settings
    )
    if model.dtype == torch.float32 and not (device == "cpu" and full):
        # TF32, bfloat16 and Winograd's algorithm round more.
        raise InputError(
            "model: certificates in float32 require a CPU and float32_matmul_precision highest;"
            " otherwise use float64 (model.double())"
        )
