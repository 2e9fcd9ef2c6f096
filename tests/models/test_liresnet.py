"""LiResNet: its published initialization, and its neck."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import jacrev

from atoll.certify.lipschitz import lipschitz
from atoll.models import LiResNet
from atoll.models.liresnet import LinearResidual


def body_bound(model: LiResNet) -> float:
    return lipschitz(nn.Sequential(model.normalize, model.body), model.input_shape).bound.lipschitz


def build(initialization: str, *, depth: int = 6, width: int = 32, features: int = 64, size: int = 16) -> LiResNet:
    torch.manual_seed(3)
    options = {"neck_activation": False, "initialization": initialization}
    return LiResNet((3, size, size), 5, depth=depth, width=width, features=features, **options)


def dense_norm(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """The operator norm of a layer that is affine, from its Jacobian in float64."""
    x = torch.zeros(1, *shape, dtype=torch.float64)
    matrix = jacrev(layer.double())(x).detach()
    return float(torch.linalg.matrix_norm(matrix.reshape(-1, x.numel()), 2))


def test_published_initialization_has_its_moments() -> None:
    depth, width = 6, 32
    model = build("published", depth=depth, width=width)
    blocks = [m for m in model.modules() if isinstance(m, LinearResidual)]
    assert len(blocks) == depth
    kernels = torch.stack([block.conv.weight.detach().double() for block in blocks]) * 9 * width
    # Standard normal numbers: mean, variance and fourth moment, each within five of its standard errors.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert abs(float((kernels**power).mean()) - moment) < 5 * math.sqrt(variance / kernels.numel())
    residual = {id(block.conv) for block in blocks}
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            assert not module.bias.any()
            if id(module) not in residual:
                values = torch.linalg.svdvals(module.weight.detach().double().flatten(1))
                torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)


def test_published_initialization_starts_close_to_a_stem_and_isometries() -> None:
    """Against the dense Jacobians of all layers; a Gaussian block is at most 1 + 2 / (3 sqrt(L W)), about."""
    depth, width = 6, 32
    model = build("published", depth=depth, width=width, size=8)
    shapes, x = [], torch.zeros(1, 3, 8, 8)
    for layer in model.body:
        shapes.append(tuple(x.shape[1:]))
        x = layer(x)
    affine = (nn.Conv2d, nn.Linear, LinearResidual)
    norms = [dense_norm(layer, shape) for layer, shape in zip(model.body, shapes, strict=True) if type(layer) in affine]
    stem, *blocks, conv, dense = norms
    assert len(blocks) == depth
    assert all(1 - 1e-3 < norm < 1 + 1.1 * 2 / (3 * math.sqrt(depth * width)) for norm in blocks)
    assert conv == pytest.approx(1, abs=1e-5)
    assert dense == pytest.approx(1, abs=1e-5)
    # At stride 2 a pixel is in at most 9 of the 5x5 patches, and an orthogonal kernel stretches none of them.
    assert 1 <= stem <= 3
    bound = body_bound(build("published", depth=depth, width=width, size=8))
    assert math.prod(norms) <= bound <= 1.02 * math.prod(norms)
    assert bound < 0.5 * body_bound(build("default", depth=depth, width=width, size=8))


@pytest.mark.slow
def test_starting_bound_of_the_published_net() -> None:
    published, default = (
        body_bound(build(kind, depth=18, width=256, features=2048, size=32)) for kind in ("published", "default")
    )
    assert 3 < published < 4
    assert 55 < default < 75


def test_the_published_neck_ends_in_a_dense_layer_and_has_the_same_weights() -> None:
    torch.manual_seed(0)
    options = {"depth": 1, "width": 4, "features": 6}
    stored, published = LiResNet((1, 8, 8), 3, **options), LiResNet((1, 8, 8), 3, neck_activation=False, **options)
    published.load_state_dict(stored.state_dict())
    assert type(published.body[-1]) is nn.Linear
    x = torch.rand(5, 1, 8, 8)
    features = published.features(x)
    assert (features[:, ::2] > features[:, 1::2]).any()
    assert torch.equal(features.view(5, 3, 2).sort(2).values.flatten(1), stored.features(x))
