"""The base class of classifiers: inputs in [0, 1], normalization inside, ``features`` and ``head``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_count
from atoll.registry import Registry
from atoll.threat import Bounds

Option = TypeVar("Option")
InputRange = Literal["[0,1]", "[-1,1]", "centered"]
Initialization = Literal["default", "orthogonal"]

# Mean and std of the normalization (x - mean) / std; eps always refers to pixels in [0, 1].
INPUT_RANGES: dict[str, tuple[float, float]] = {
    "[0,1]": (0.0, 1.0),
    "[-1,1]": (0.5, 0.5),
    "centered": (0.47, 0.25),
}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear with an unmodified forward pass, without hooks.

    >>> is_linear(nn.Linear(2, 2)), is_linear(nn.Bilinear(2, 2, 2))
    (True, False)
    """
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not hooked


class Normalize(nn.Module):
    """Normalizes inputs per channel, ``(x - mean) / std``, as a layer of the network.

    >>> Normalize(mean=[0.5], std=[0.5])(torch.ones(1, 1, 2, 2)).unique()
    tensor([1.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not persistent, because they are part of the architecture and a checkpoint must not silently change them.
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        # Decided once, because reading a buffer in every forward pass would stall a GPU.
        self.identity = not any(mean) and all(s == 1 for s in std)

    def forward(self, x: Tensor) -> Tensor:
        if self.identity:
            return x
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(shape)) / self.std.view(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


MODELS = Registry("model", "models", "atoll.models.base.Classifier", "atoll.models")


class Classifier(nn.Module):
    """Base class of all models: ``logits = head(features(x))``.

    Subclasses define ``self.body`` (normalized inputs to penultimate features) and ``self.head`` (features to logits,
    usually linear).  Training and certification call ``features`` and ``head``, other code calls the model, so a
    subclass must not override ``forward``.

    Args:
        input_shape: shape of one input, ``(channels, height, width)`` or ``(features,)``.
        num_classes: number of logits.
        input_range: range of inputs to the network after normalization; inputs to the model are always in ``bounds``.
        bounds: valid range of inputs, or None.
    """

    registry: ClassVar[Registry] = MODELS

    body: nn.Module
    head: nn.Module

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        input_range: InputRange = "[0,1]",
        bounds: Bounds | None = (0.0, 1.0),
    ) -> None:
        super().__init__()
        if type(self).forward is not Classifier.forward:
            raise InputError(
                f"{type(self).__name__}: a Classifier must not override forward, which computes head(features(x));"
                " change body or head instead, or derive from nn.Module"
            )
        if not input_shape or min(input_shape) < 1:
            raise InputError(f"input_shape: expected positive sizes, got {tuple(input_shape)}")
        check_count(2, num_classes=num_classes)
        self.input_shape = tuple(input_shape)
        self.num_classes = num_classes
        self.bounds = bounds
        mean, std = choose(INPUT_RANGES, input_range, "input_range")
        channels = self.input_shape[0]
        self.normalize = Normalize([mean] * channels, [std] * channels)

    def features(self, x: Tensor) -> Tensor:
        """Return the penultimate features, ``(batch, features)``."""
        z: Tensor = self.body(self.normalize(x))
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def expect_image(
    input_shape: Sequence[int], model: str, multiple_of: int = 1, at_least: int = 1
) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``; raises an InputError if the shape is not that of a suitable image."""
    shape = tuple(input_shape)
    if len(shape) != 3 or shape[0] < 1 or any(side % multiple_of or side < at_least for side in shape[1:]):
        sides = [f"divisible by {multiple_of}"] * (multiple_of > 1) + [f"of at least {at_least}"] * (at_least > 1)
        condition = " with sides " + " and ".join(sides) if sides else ""
        raise InputError(f"{model}: expected an image shape (channels, height, width){condition}, got {shape}")
    channels, height, width = shape
    return channels, height, width


def choose(table: Mapping[str, Option] | Mapping[int, Option], key: str | int, name: str) -> Option:
    """Return an entry of a table; raises an InputError that lists the valid names if there is none.

    >>> choose({"relu": nn.ReLU}, "relu", "activation").__name__
    'ReLU'
    """
    for known, entry in table.items():
        if known == key:
            return entry
    raise InputError(f"{name}: expected one of {', '.join(map(str, table))}, got {key!r}")


def initialize(model: nn.Module, kind: Initialization) -> None:
    """Initialize dense layers and convolutions (``default`` or ``orthogonal``).

    ``orthogonal`` sets weights to orthogonal matrices (a kernel counts as one matrix) and biases to zero.  All singular
    values are then equal, which helps networks trained with a bound on the product of layer norms.

    >>> layer = nn.Linear(3, 2)
    >>> initialize(layer, "orthogonal")
    >>> (layer.weight @ layer.weight.T).detach().round(decimals=5).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """
    for module in model.modules() if kind == "orthogonal" else ():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
