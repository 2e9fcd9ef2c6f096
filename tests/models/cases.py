"""The models every generic test runs over, small enough for a CPU.  A new model joins by one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from atoll.models import (
    MLP,
    VGG,
    CentroidNet,
    Classifier,
    ConvNet4C3F,
    ConvNet6C2F,
    HybridViT,
    LiResNet,
    MobileNetV2,
    OrthogonalNet,
    PreActResNet,
    SmallConvNet,
    ViT,
    WideResNet,
)

TINY_VIT: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_ratio": 2}
TINY_STEM: dict[str, Any] = {"stem_width": 32, "blocks": (1, 2, 1)}


@dataclass(frozen=True)
class Case:
    name: str
    model: type[Classifier]
    input_shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    num_classes: int = 3

    def build(self, seed: int = 0) -> Classifier:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.model(self.input_shape, self.num_classes, **self.options)

    def images(self, batch: int = 3, seed: int = 1) -> torch.Tensor:
        return torch.rand(batch, *self.input_shape, generator=torch.Generator().manual_seed(seed))

    def __str__(self) -> str:
        return self.name


MODELS = [
    Case("mlp", MLP, (2,), {"hidden": (5, 5)}),
    Case("4c3f", ConvNet4C3F, (1, 8, 8)),
    Case("6c2f-softplus", ConvNet6C2F, (3, 8, 8), {"activation": "softplus"}),
    Case("small", SmallConvNet, (1, 8, 8), {"widths": (4, 8)}),
    Case("small-bn-gelu", SmallConvNet, (1, 8, 8), {"batch_norm": True, "activation": "gelu"}),
    Case("small-minmax", SmallConvNet, (1, 8, 8), {"activation": "minmax", "initialization": "orthogonal"}),
    Case("liresnet", LiResNet, (3, 8, 8), {"depth": 2, "width": 4, "features": 8}),
    Case("resnet", LiResNet, (1, 9, 8), {"depth": 2, "width": 4, "features": 8, "block": "conventional"}),
    Case("liresnet-plain", LiResNet, (3, 64, 64), {"depth": 1, "width": 2, "features": 4, "block": "plain"}),
    Case(
        "liresnet-published",
        LiResNet,
        (3, 8, 8),
        {"depth": 2, "width": 4, "features": 7, "neck_activation": False, "initialization": "published"},
    ),
    Case("resnet-relu", LiResNet, (1, 8, 8), {"depth": 1, "width": 3, "block": "conventional", "activation": "relu"}),
    Case("orthogonal", OrthogonalNet, (1, 8, 8), {"width": 8, "features": 8}),
    Case("orthogonal-groupsort", OrthogonalNet, (3, 9, 8), {"width": 8, "features": 12, "activation": "groupsort"}),
    Case("mlp-householder", MLP, (3,), {"hidden": (6, 4), "activation": "householder"}),
    Case("small-householder", SmallConvNet, (1, 8, 8), {"widths": (4, 6), "activation": "householder"}),
    Case("resnet-groupsort", LiResNet, (1, 8, 8), {"depth": 1, "width": 4, "features": 8, "activation": "groupsort"}),
    Case(
        "resnet-householder",
        LiResNet,
        (1, 8, 8),
        {"depth": 1, "width": 4, "features": 8, "block": "conventional", "activation": "householder"},
    ),
    Case("centroid", CentroidNet, (5,), {"per_class": 4}),
    Case(
        "centroid-encoder",
        CentroidNet,
        (1, 8, 8),
        {"encoder": partial(SmallConvNet, widths=(4, 8), hidden=8, activation="minmax")},
    ),
    Case("preact18", PreActResNet, (3, 8, 8), {"width": 4, "input_range": "centered"}),
    Case("preact34-odd", PreActResNet, (1, 9, 12), {"width": 2, "depth": 34}),
    Case("wrn-10-1", WideResNet, (3, 8, 8), {"depth": 10, "widen_factor": 1, "dropout": 0.1}),
    Case("vgg16", VGG, (3, 16, 16), {"width": 4}),
    Case("vgg11-gray", VGG, (1, 7, 9), {"width": 4, "depth": 11}),
    Case("mobilenet", MobileNetV2, (3, 8, 8), {"width_multiplier": 0.25}),
    Case("mobilenet-paper", MobileNetV2, (1, 8, 8), {"width_multiplier": 0.1, "project_shortcut": False}),
    Case("vit", ViT, (3, 8, 8), {"patch_size": 4, **TINY_VIT}),
    Case("vit-overlap", ViT, (1, 8, 10), {"patch_size": 4, "stride": 2, "input_range": "[-1,1]", **TINY_VIT}),
    Case("vit-dropout", ViT, (3, 8, 8), {"patch_size": 2, "dropout": 0.1, **TINY_VIT}),
    Case("hybrid", HybridViT, (3, 16, 16), {"strides": (2, 1, 1, 2), **TINY_STEM, **TINY_VIT}),
    Case(
        "hybrid-pool",
        HybridViT,
        (1, 11, 14),
        {"strides": (1, 2, 1, 1), "root_kernel": 3, **TINY_STEM, **TINY_VIT},
    ),
]
