"""The base of all classifiers: inputs in [0, 1], normalization inside, ``features`` then ``head``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_range
from atoll.registry import Registry
from atoll.threat import Bounds

Option = TypeVar("Option")
InputRange = Literal["[0,1]", "[-1,1]", "centered"]
Initialization = Literal["default", "orthogonal"]

# What the network sees is (x - mean) / std; eps always means pixels in [0, 1].
INPUT_RANGES: dict[str, tuple[float, float]] = {
    "[0,1]": (0.0, 1.0),
    "[-1,1]": (0.5, 0.5),
    "centered": (0.47, 0.25),
}


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes W z + b with its own weight: an nn.Linear whose pass nobody has changed.

    >>> is_linear(nn.Linear(2, 2)), is_linear(nn.Bilinear(2, 2, 2))
    (True, False)
    """
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not hooked


class Normalize(nn.Module):
    """``(x - mean) / std`` per channel, as a layer of the network.

    >>> Normalize(mean=[0.5], std=[0.5])(torch.ones(1, 1, 2, 2)).unique()
    tensor([1.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not persistent: they are part of the architecture, so a checkpoint cannot silently change them.
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        # Decided once: the identity costs nothing, and asking a buffer in every forward would stall a GPU.
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
    """Base of all models: ``logits = head(features(x))``.

    Subclasses build ``self.body`` (normalized inputs to penultimate features) and ``self.head`` (features to
    logits, linear unless the model says otherwise).  Training and certificates call ``features`` and ``head``, the rest
    calls the model, so a subclass must not have a ``forward`` of its own.

    Args:
        input_shape: shape of one input, ``(channels, height, width)`` or ``(features,)``.
        num_classes: number of logits.
        input_range: the range the network itself works in; inputs are always given in ``bounds``.
        bounds: the valid range of inputs, None if there is none.
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
                f"{type(self).__name__}: a Classifier computes head(features(x)); put what forward adds into body or"
                " head, or derive from nn.Module"
            )
        if not input_shape or min(input_shape) < 1:
            raise InputError(f"input_shape: expected positive sizes, got {tuple(input_shape)}")
        check_range("[2, inf)", num_classes=num_classes)
        self.input_shape = tuple(input_shape)
        self.num_classes = num_classes
        self.bounds = bounds
        mean, std = choose(INPUT_RANGES, input_range, "input_range")
        channels = self.input_shape[0]
        self.normalize = Normalize([mean] * channels, [std] * channels)

    def features(self, x: Tensor) -> Tensor:
        """Penultimate features, ``(batch, features)``."""
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
    """The ``(channels, height, width)`` of an image model's input, checked."""
    shape = tuple(input_shape)
    if len(shape) != 3 or shape[0] < 1 or any(side % multiple_of or side < at_least for side in shape[1:]):
        sides = [f"divisible by {multiple_of}"] * (multiple_of > 1) + [f"of at least {at_least}"] * (at_least > 1)
        condition = " with sides " + " and ".join(sides) if sides else ""
        raise InputError(f"{model}: expected an image shape (channels, height, width){condition}, got {shape}")
    channels, height, width = shape
    return channels, height, width


def choose(table: Mapping[str, Option] | Mapping[int, Option], key: str | int, name: str) -> Option:
    """The entry of an option's table, or an error that lists the valid names.

    >>> choose({"relu": nn.ReLU}, "relu", "activation").__name__
    'ReLU'
    """
    for known, entry in table.items():
        if known == key:
            return entry
    raise InputError(f"{name}: expected one of {', '.join(map(str, table))}, got {key!r}")


def initialize(model: nn.Module, kind: Initialization) -> None:
    """Start dense layers and convolutions from orthogonal matrices (a kernel as one matrix) and zero biases.

    Networks that are trained on the product of their layers' norms start where all singular values are equal.

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
