"""Layers against independent implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from atoll.models import VGG, Classifier, HybridViT, MobileNetV2, PreActResNet, ViT, WideResNet
from atoll.models.hybrid import SameMaxPool, StdConv, pad_same, standardize
from atoll.models.mobilenet import rounded
from atoll.models.preact_resnet import PreActBlock
from atoll.models.vit import Attention


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_pytorchs(heads: int) -> None:
    ours = Attention(8, heads=heads).double()
    theirs = nn.MultiheadAttention(8, heads, batch_first=True).double()
    nn.init.normal_(ours.qkv.bias)
    nn.init.normal_(ours.out.bias)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.out.weight,
            "out_proj.bias": ours.out.bias,
        }
    )
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_vit_patches_are_a_matrix_product_on_cut_out_squares() -> None:
    model = ViT((3, 8, 8), 3, patch_size=4, stride=2, width=6, depth=1, heads=1).double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    conv = model.body.patch
    outputs = conv(x).flatten(2).transpose(1, 2)
    kernel = conv.weight.detach().flatten(1).numpy()
    for k, (i, j) in enumerate((i, j) for i in (0, 2, 4) for j in (0, 2, 4)):
        patch = x[:, :, i : i + 4, j : j + 4].flatten(1).numpy()
        np.testing.assert_allclose(outputs[:, k].detach().numpy(), patch @ kernel.T)  # biases start at zero


def test_standardized_weights() -> None:
    conv = StdConv(3, 5, 3).double()
    weight = conv.weight.detach().numpy()
    expected = np.stack([(filter_ - filter_.mean()) / (filter_.std() + 1e-5) for filter_ in weight])
    np.testing.assert_allclose(standardize(conv.weight).detach().numpy(), expected)
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(conv(x), F.conv2d(x, torch.from_numpy(expected), padding=1))


@pytest.mark.parametrize(
    ("side", "kernel", "stride"), [(224, 7, 2), (112, 3, 2), (9, 3, 2), (8, 3, 1), (7, 1, 2), (5, 4, 3)]
)
def test_same_padding(side: int, kernel: int, stride: int) -> None:
    """ceil(side / stride) windows, and the odd pixel of padding at the end."""
    padded = pad_same(torch.ones(1, 1, side, side), kernel, stride)[0, 0]
    outputs = (len(padded) - kernel) // stride + 1
    assert outputs == -(-side // stride)
    row = padded[padded.shape[0] // 2]
    before, after = int(row.argmax()), int(row.flip(0).argmax())
    assert after - before in (0, 1)
    assert before + after == max(0, (outputs - 1) * stride + kernel - side)


def test_same_pooling_ignores_the_padding() -> None:
    x = torch.rand(2, 3, 8, 7)
    padded = F.pad(x, (1, 1, 0, 1), value=float("-inf"))
    assert torch.equal(SameMaxPool(2)(x), F.max_pool2d(padded, 3, 2))


def test_block_whose_shape_stays_adds_to_its_input() -> None:
    block = PreActBlock(4, 4).eval()
    nn.init.zeros_(block.residual[-1].weight)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x)


def test_hybrid_bottlenecks_start_as_their_shortcut() -> None:
    model = HybridViT((3, 16, 16), 3, stem_width=32, blocks=(2, 1, 1), width=8, depth=1, heads=1)
    x = torch.rand(2, 128, 5, 5)
    assert torch.equal(model.body.stem.get_submodule("stages.0.1")(x), x)


@pytest.mark.parametrize(
    "model", [PreActResNet((1, 16, 16), 3, width=4), WideResNet((1, 16, 16), 3, depth=10, widen_factor=1)]
)
def test_features_of_residual_nets_are_averages_of_activations(model: PreActResNet | WideResNet) -> None:
    assert model.eval().features(torch.rand(2, 1, 16, 16)).min() >= 0


def test_mobilenet_widths() -> None:
    assert [rounded(c * 1.4) for c in (16, 24, 32, 64, 96, 160, 320)] == [24, 32, 48, 88, 136, 224, 448]
    narrow = MobileNetV2((3, 32, 32), 10, width_multiplier=0.25)
    assert isinstance(narrow.head, nn.Linear)
    assert narrow.head.in_features == 1280


@pytest.mark.parametrize(("out", "stride"), [(4, 1), (6, 1), (4, 2), (6, 2)])
def test_preact_block_is_its_formula(out: int, stride: int) -> None:
    block = PreActBlock(4, out, stride=stride).double().eval()
    first, conv1, second, conv2 = (
        block.get_submodule(n) for n in ("activate.0", "residual.0", "residual.1", "residual.4")
    )
    for norm in (first, second):
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        nn.init.normal_(norm.running_mean)
        nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    a = first(x).clamp_min(0)
    residual = conv2(second(conv1(a)).clamp_min(0))
    if (out, stride) == (4, 1):
        assert block.shortcut is None
        shortcut = x
    else:
        assert block.shortcut is not None
        kernel = block.shortcut.weight[:, :, 0, 0]
        shortcut = torch.einsum("oi,bihw->bohw", kernel, a[:, :, ::stride, ::stride])
    torch.testing.assert_close(block(x), shortcut + residual)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (PreActResNet((3, 32, 32), 3, width=2), (16, 4, 4)),
        (WideResNet((3, 32, 32), 3, depth=10, widen_factor=2), (128, 8, 8)),
        (VGG((3, 32, 32), 3, width=2), (16, 1, 1)),
        (VGG((1, 28, 28), 3, width=2), (16, 1, 1)),
        (VGG((3, 64, 64), 3, width=2), (16, 2, 2)),
        (MobileNetV2((3, 32, 32), 3, width_multiplier=0.1), (1280, 4, 4)),
    ],
    ids=["preact", "wrn", "vgg", "vgg28", "vgg64", "mobilenet"],
)
def test_maps_before_the_global_average(model: Classifier, shape: tuple[int, int, int]) -> None:
    layers = list(model.body.children())
    place = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.AdaptiveAvgPool2d))
    maps = nn.Sequential(*layers[:place]).eval()(torch.rand(2, *model.input_shape))
    assert maps.shape == (2, *shape)
    torch.testing.assert_close(nn.Sequential(*layers[place:])(maps), maps.mean((2, 3)))
