"""Other conventions of a foreign model: if one raises the accuracy, the model was adopted with wrong options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.models.adapted import Channels, Conventions, Reinterpreted

Channel = tuple[float, ...]
PUBLISHED: dict[int, tuple[tuple[Channel, Channel], ...]] = {
    1: (((0.1307,), (0.3081,)),),  # MNIST
    3: (
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
        ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # CIFAR-10
    ),
}
CAFFE = {"range": (0.0, 255.0), "mean": (103.939, 116.779, 123.68), "std": (1.0,), "channels": "bgr"}
SIZES = (28, 32, 64, 96, 128, 160, 224)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another way to feed a model.

    Args:
        kind: what would be wrong: ``range``, ``mean``, ``channels`` or ``size``.
        condition: completes the sentence "accuracy would be higher ...".
        option: options of ``atoll adopt``.
        model: maps images in [0, 1] to logits in this way.
    """

    kind: str
    condition: str
    option: str
    model: nn.Module


class Resized(nn.Module):
    """A model that gets smaller images."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True))
        return logits


def alternatives(model: nn.Module, conventions: Conventions, images: Tensor) -> Iterator[Alternative]:
    """Other conventions of the inputs that people use.

    Args:
        model: the adapted model.
        conventions: its conventions.
        images: some images, as floats.
    """
    channels = images.shape[1]
    for kind, condition, other in _conventions(conventions, images):
        if other != conventions:
            reinterpreted = Reinterpreted(model, conventions, other, channels).to(images.device)
            yield Alternative(kind, condition, options(conventions, other), reinterpreted)


def sizes(model: nn.Module, resize: int, size: int) -> Iterator[Alternative]:
    """Smaller images of the same photos, for models that accept any size.

    Args:
        model: the adapted model.
        resize: length of the shorter side of the photos.
        size: side of the part that is used.
    """
    for other in (each for each in SIZES if each < size):
        option = f"data.size={other} data.resize={max(round(resize * other / size), other)}"
        yield Alternative(
            "size", f"if the images are resized to {other} x {other} pixels", option, Resized(model, other)
        )


def _conventions(now: Conventions, images: Tensor) -> Iterator[tuple[str, str, Conventions]]:
    """Conventions, with what is wrong if they are right and a condition for the message."""
    plain = dataclasses.replace(now, range=(0.0, 1.0), mean=(0.0,), std=(1.0,))
    for low, high in ((0, 255), (-1, 1)):
        condition = f"if the model expects inputs in [{low}, {high}]"
        yield "range", condition, dataclasses.replace(plain, range=(float(low), float(high)))
    yield "mean", "without normalization", plain
    for mean, std in (*PUBLISHED.get(images.shape[1], ()), *_own(images)):
        condition = f"if the model expects inputs with mean {_text(mean)} and standard deviation {_text(std)}"
        yield "mean", condition, dataclasses.replace(plain, mean=mean, std=std)
    if images.shape[1] == 3:
        channels: Channels = "rgb" if now.channels == "bgr" else "bgr"
        condition = f"if the color channels are in the order {channels.upper()}"
        yield "channels", condition, dataclasses.replace(now, channels=channels)
        yield "range", "with the inputs of Caffe (BGR, 0 to 255)", dataclasses.replace(now, **CAFFE)  # type: ignore[arg-type]


def _own(images: Tensor) -> Iterator[tuple[Channel, Channel]]:
    """Mean and standard deviation of these images, which many models are trained with."""
    pixels = images.transpose(0, 1).flatten(1)
    mean, std = pixels.mean(1), pixels.std(1)
    if std.min() > 0.01:
        yield _round(mean), _round(std)


def _round(values: Tensor) -> Channel:
    return tuple(round(value, 3) for value in values.tolist())


def options(now: Conventions, other: Conventions) -> str:
    """The options of ``atoll adopt`` that change conventions.

    >>> options(Conventions(mean=(0.5,)), Conventions(range=(-1.0, 1.0)))
    '--mean 0 --range=-1,1'
    """
    words = []
    for field in dataclasses.fields(Conventions):
        value = getattr(other, field.name)
        if value != getattr(now, field.name):
            text = _text(value)
            words.append(f"--{field.name}{'=' if text.startswith('-') else ' '}{text}")
    return " ".join(words)


def _text(value: Any) -> str:
    return ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


@torch.no_grad()
def loss(logits: Tensor, labels: Tensor) -> float:
    """Cross-entropy, which decides between alternatives with the same accuracy; NaN is the worst."""
    value = float(F.cross_entropy(logits.double(), labels))
    return value if value == value else float("inf")
