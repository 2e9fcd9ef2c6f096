"""Nothing is reported on sound models and data, however unusual they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from atoll.data import Digits, FashionMNISTSmall
from atoll.health import check_data, scan_data
from atoll.models import SmallConvNet
from atoll.models.timm_adapter import import_timm
from health.health_cases import (
    GRAY,
    Net,
    Stored,
    Tokens,
    Wrapped,
    centroids,
    check,
    color,
    color_net,
    conv_net,
    dark,
    few_of_most,
    gray,
    gray_net,
    many_classes,
    mlp,
    noisy,
    part,
    seeded,
    train,
    video,
)
from models.timm_support import HAS_TIMM

DARK = ((0.02, 0.02, 0.02), (0.02, 0.02, 0.02))


@cache
def imbalanced() -> Stored:
    return part(color(), few_of_most)


@cache
def two_classes() -> Stored:
    return part(gray(), lambda labels: labels < 2, classes=2)


def tiny(count: int) -> Callable[[], Stored]:
    return lambda: part(gray(), lambda labels: labels >= 0, test=count)


def without_biases() -> nn.Module:
    """A network whose logits and gradients are 0 for a black image."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48, bias=False), nn.ReLU(), nn.Linear(48, 10, bias=False))


# Model, data, and an accuracy that it exceeds.
SOUND: dict[str, tuple[Callable[[], nn.Module], Callable[[], Stored], float]] = {
    "linear": (lambda: centroids(gray()), gray, 0.8),
    "MLP": (seeded(lambda: mlp(64, nn.GELU), gray), gray, 0.9),
    "convolutional": (gray_net, gray, 0.9),
    "batch norm, color": (color_net, color, 0.9),
    "transformer": (seeded(lambda: Net(Tokens(3, 4, 16), nn.Linear(32, 10)), color, steps=80, lr=5e-3), color, 0.7),
    "robust": (seeded(lambda: mlp(64, nn.ReLU), gray, steps=100, eps=0.15), gray, 0.85),
    "60 % accurate": (seeded(lambda: mlp(64, nn.ReLU), noisy, lr=3e-3), noisy, 0.5),
    "float64": (seeded(lambda: mlp(64, nn.Tanh).double(), gray), gray, 0.9),
    "bfloat16": (lambda: copy.deepcopy(gray_net()).bfloat16(), gray, 0.9),
    "log-softmax": (lambda: Wrapped(gray_net(), after=lambda z: z.log_softmax(1)), gray, 0.9),
    "clamped inputs": (lambda: Wrapped(gray_net(), lambda x: x.clamp(0, 1)), gray, 0.9),
    "no biases": (seeded(without_biases, gray), gray, 0.9),
    "of Atoll": (seeded(lambda: SmallConvNet((1, 8, 8), 10, widths=(8, 8), hidden=16), gray), gray, 0.9),
    "two classes": (seeded(lambda: mlp(64, nn.ReLU, 2), two_classes, steps=40, lr=3e-3), two_classes, 0.95),
    "imbalanced classes": (seeded(lambda: conv_net(3, 16, GRAY, norm=True), imbalanced, steps=60), imbalanced, 0.9),
    "500 classes": (lambda: centroids(many_classes()), many_classes, 0.9),
    "dark images": (seeded(lambda: conv_net(3, 16, DARK, norm=True), dark, steps=80), dark, 0.9),
    "frames of a video": (lambda: centroids(video()), video, 0.9),
    "10 test images": (gray_net, tiny(10), 0.7),
    "1 test image": (gray_net, tiny(1), 0.0),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_models(name: str) -> None:
    make, data, least = SOUND[name]
    accuracy, findings = check(make(), data())
    assert findings == []
    assert accuracy.value > least


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TIMM, reason="needs timm")
@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_sound_models_of_timm(name: str) -> None:
    create = import_timm().create_model
    data = FashionMNISTSmall()

    def build() -> nn.Module:
        return Net(create(name, num_classes=10, in_chans=1))

    net = seeded(build, lambda: data, steps=120, lr=3e-3)()
    accuracy, findings = check(net, data)
    assert findings == []
    assert accuracy.value > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_networks(seed: int) -> None:
    """Networks with any activation, normalization and accuracy: only accuracy at chance may be reported."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    data = pick(gray, color, noisy)()
    channels, side, _ = data.shape
    activation = pick(nn.ReLU, nn.GELU, nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.SiLU)
    width = pick(8, 32)
    layers = [
        nn.Conv2d(channels, width, 3, 2, 1, bias=bool(pick(0, 1))),
        activation(),
        nn.Conv2d(width, width, 3, 2, 1),
    ]
    layers += [nn.BatchNorm2d(width)] if pick(0, 1) else []
    layers += [
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * (side // 8) ** 2, 10, bias=bool(pick(0, 1))),
    ]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = train(Net(*layers), data, steps=pick(0, 60, 120, 240), lr=pick(1e-3, 3e-3, 1e-2))
    _, findings = check(net.to(pick(torch.float32, torch.float64)), data)
    assert {finding.kind for finding in findings} <= {"chance", "constant"}


@pytest.mark.parametrize("data", [Digits(), FashionMNISTSmall()], ids=repr)
def test_sound_data(data: Stored) -> None:
    scan = scan_data(data)
    assert check_data(scan, data.classes) == []
    assert scan.compared == {"test": len(data.test), "training": len(data.train) + len(data.validation)}
