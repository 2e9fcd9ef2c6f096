"""A stand-in for timm that covers the logic of the adapter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn

HAS_TIMM = importlib.util.find_spec("timm") is not None


class FakeNet(nn.Module):
    """As much of a timm model as the adapter touches: features, a nested classifier, a fixed image size."""

    default_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}  # noqa: RUF012

    def __init__(self, in_chans: int, num_classes: int, img_size: int = 8, classifier: str = "linear") -> None:
        super().__init__()
        self.img_size = img_size
        self.conv = nn.Conv2d(in_chans, 4, 3, 2)
        self.top = nn.Module()
        self.top.fc = {
            "linear": nn.Linear(4, num_classes),
            "conv": nn.Conv2d(4, num_classes, 1),
            "misfit": nn.Linear(5, num_classes),
        }[classifier]

    def get_classifier(self) -> nn.Module:
        return self.top.get_submodule("fc")

    def forward_features(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.img_size, f"Input height ({x.shape[-1]}) doesn't match model ({self.img_size})."
        maps: Tensor = self.conv(x).relu()
        return maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = x.mean((2, 3))
        logits: Tensor = pooled if pre_logits else self.top.get_submodule("fc")(pooled)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _create_model(name: str, pretrained: bool = False, **options: Any) -> FakeNet:
    if name == "refused":
        options["classifier"] = "conv"
    if name == "misfit":
        options["classifier"] = "misfit"
    net = FakeNet(**options)
    if pretrained:
        nn.init.constant_(net.conv.weight, 0.25)
    return net


def fake_timm() -> ModuleType:
    """A module with the three functions of timm that the adapter calls."""
    module = ModuleType("timm")
    names = ["plain", "refused", "misfit"]
    module.__dict__.update(
        create_model=_create_model,
        is_model=lambda name: name in names,
        list_models=lambda pattern: [name for name in names if pattern.strip("*") in name],
    )
    return module


@contextmanager
def installed(module: ModuleType | None) -> Iterator[SimpleNamespace]:
    """``import timm`` finds ``module``; or fails, for None."""
    with mock.patch.dict(sys.modules, {"timm": module}):  # type: ignore[dict-item]
        yield SimpleNamespace(timm=module)
