"""Models from elsewhere: what happens between images in [0, 1] and the model, and between its outputs and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_range

Channels = Literal["rgb", "bgr"]
Outputs = Literal["logits", "probabilities"]
TINY = 1e-30  # added to probabilities before the logarithm


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How a foreign model expects its inputs and what it returns.

    Args:
        mean: subtracted from each channel, after scaling to ``range``.
        std: by which each channel is divided.
        range: lowest and highest input, such as (0, 255).
        channels: order of the color channels.
        outputs: ``logits``, or ``probabilities`` if the model ends with a softmax.
        labels: for each class of the data, the number of the model's output; None if they are in the same order.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    range: tuple[float, float] = (0.0, 1.0)
    channels: Channels = "rgb"
    outputs: Outputs = "logits"
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_range("(-inf, inf)", **{f"mean[{i}]": value for i, value in enumerate(self.mean)})
        check_range("(0, inf)", **{f"std[{i}]": value for i, value in enumerate(self.std)})
        low, high = self.range
        check_range("(-inf, inf)", low=low, high=high)
        if low >= high:
            raise InputError(f"range: expected the lowest value first, got {low:g}, {high:g}")


class Adapted(nn.Module):
    """A foreign model as a function from images in [0, 1] to logits in the order of the data's classes.

    Args:
        model: the foreign model.
        conventions: what it expects and returns.
        channels: number of channels of the images.

    >>> model = Adapted(nn.Flatten(), Conventions(mean=(0.5,), std=(0.5,), labels=(1, 0)), 1)
    >>> model(torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[ 1., -1.]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, conventions: Conventions, channels: int) -> None:
        super().__init__()
        self.model, self.conventions = model, conventions
        scale, shift = scale_and_shift(conventions, channels)
        self.register_buffer("scale", scale.float(), persistent=False)
        self.register_buffer("shift", shift.float(), persistent=False)
        self.identity = bool((self.scale == 1).all() and (self.shift == 0).all())
        if conventions.channels == "bgr" and channels != 3:
            raise InputError(f"channels: expected images with three channels for bgr, got {channels}")

    def forward(self, x: Tensor) -> Tensor:
        if self.conventions.channels == "bgr":
            x = x.flip(1)
        precision = x.dtype
        if not self.identity:
            shape = (1, -1, *[1] * (x.dim() - 2))
            x = x * self.scale.view(shape) + self.shift.view(shape)
        outputs = self.model(x.to(self._precision or precision))
        if not isinstance(outputs, Tensor):
            raise InputError(f"model: expected a tensor of logits, got {type(outputs).__name__}")
        logits = outputs.flatten(1).to(precision)
        if self.conventions.outputs == "probabilities":
            logits = (logits + TINY).log()
        if self.conventions.labels is not None:
            logits = logits[:, list(self.conventions.labels)]
        return logits

    @property
    def _precision(self) -> torch.dtype | None:
        """Data type of the weights, which may be float64 or float16."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)


class Reinterpreted(nn.Module):
    """A model that was adapted with some conventions, with inputs as if it had been adapted with others.

    Args:
        model: the adapted model.
        before: its conventions.
        after: other conventions of the inputs.
        channels: number of channels of the images.

    >>> model = Adapted(nn.Flatten(), Conventions(), 1)
    >>> other = Reinterpreted(model, Conventions(), Conventions(range=(0, 255)), 1)
    >>> other(torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[  0., 255.]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, before: Conventions, after: Conventions, channels: int) -> None:
        super().__init__()
        self.model = model
        (scale, shift), (target, offset) = (scale_and_shift(each, channels) for each in (before, after))
        self.register_buffer("scale", (target / scale).float(), persistent=False)
        self.register_buffer("shift", ((offset - shift) / scale).float(), persistent=False)
        self.flips = [each.channels == "bgr" for each in (after, before)]

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        x = x.flip(1) if self.flips[0] else x
        x = x * self.scale.view(shape) + self.shift.view(shape)
        logits: Tensor = self.model(x.flip(1) if self.flips[1] else x)
        return logits


def scale_and_shift(conventions: Conventions, channels: int) -> tuple[Tensor, Tensor]:
    """One multiplication and one addition per channel: ``(low + (high - low) x - mean) / std``."""
    low, high = conventions.range
    mean, std = (_per_channel(name, getattr(conventions, name), channels) for name in ("mean", "std"))
    return (high - low) / std, (low - mean) / std


def _per_channel(name: str, values: Sequence[float], channels: int) -> Tensor:
    if len(values) not in (1, channels):
        raise InputError(f"{name}: expected one number or one per channel ({channels}), got {len(values)}")
    return torch.tensor(values, dtype=torch.float64).expand(channels)
